"""`halo-vae doctor`: what decodes run on here, and what of it is known to be bad."""

from __future__ import annotations

import argparse
import os
import sys

from .command import ExitCode
from .options import choose_device


class DoctorCommand:
    """Report device, memory, versions, flags and variables, and what of them is known to be bad, with advice.

    Nothing is decoded, written or changed. Exit code 1 if decodes would fail or come out wrong, else 0.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("--json", action="store_true", help="the report as one JSON object on stdout")
        add("--redact", action="store_true", help="leave out paths and the values of variables, to show it to others")
        add("--device", default="auto", metavar="NAME", help="device to report: auto, cpu, cuda, cuda:1, …")

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command."""
        device = choose_device(args)
        from ..doctor import diagnose
        from ..doctor_read import read_facts
        from ..render.doctor import render_report
        from .session import emit_json

        report = diagnose(read_facts(device, import_packages=True), os.environ)
        code = ExitCode.FAILED if report.has_errors else ExitCode.OK
        if args.redact:
            report = report.redacted()
        if args.json:
            emit_json(report.to_json())
        else:
            sys.stdout.write(render_report(report))
        return code
