"""`halo-vae demo`: the bundled latents through the bundled VAE."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .command import CommandError, ExitCode
from .decode import prepare_job, report_job, run_job
from .options import add_decode_flags
from .outputs import PICTURE_FORMATS, check_format, check_targets, prepare_folder

DATA = Path(__file__).resolve().parent.parent / "demo_data"
VAE_NAME = "tiny_kl_vae.safetensors"


class DemoCommand:
    """Decode the bundled latents with the bundled small VAE and show what it took. Needs nothing but the package."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("-o", "--output", type=Path, default=Path("demo_output"), metavar="DIR", help="default: demo_output")
        add("--format", choices=PICTURE_FORMATS, default="png", help="npy keeps float32 in 0-1")
        add("--json", action="store_true", help="one record per line on stdout, the log on stderr")
        add_decode_flags(parser)

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command."""
        from ..render.text import render_metrics, render_record
        from .session import open_session

        check_format(args.format)
        latents = demo_latents()
        session = open_session(args, DATA / VAE_NAME)
        jobs = [prepare_job(session, path, args.output, args.format) for path in latents]
        check_targets([t for job in jobs for t in job.targets], force=args.force)
        prepare_folder(args.output)
        for job in jobs:
            record = run_job(session, job, args.format)
            report_job(job, record, as_json=args.json)
        if not args.json:
            sys.stdout.write(f"\n{render_record(record)}\n{render_metrics(session.collector.metrics())}")
        return ExitCode.OK


def demo_latents() -> tuple[Path, ...]:
    """The latents that come with the package. CommandError if it was installed without them."""
    found = tuple(sorted(DATA.glob("*.latent")))
    if not found or not (DATA / VAE_NAME).is_file():
        message = "the demo's files were not installed with the package; install it again"
        raise CommandError(message, exit_code=ExitCode.FAILED)
    return found
