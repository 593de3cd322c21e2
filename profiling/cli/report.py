"""`halo-vae report`: results of benchmarks as tables and charts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .command import CommandError, ExitCode
from .history_files import check_target, write_text

FORMATS = ("md", "html", "json")
LANES = ("single", "instrumented", "nightly")


class ReportCommand:
    """Show results of benchmarks: figures with their doubts, phases against the baseline, cache conditions, every run.

    Results of different lanes are never mixed: name one where a file has several. Exit code 1 if a picture is wrong.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("results", nargs="+", type=Path, metavar="RESULTS", help="files that `halo-vae bench` wrote, as one")
        add("-o", "--output", type=Path, metavar="FILE", help="file to write instead of stdout")
        add("--format", choices=FORMATS, help="Markdown, one HTML page, or figures as JSON; by default as FILE ends")
        add("--lane", choices=LANES, help="needed where the results are of several lanes")
        add("--force", action="store_true", help="overwrite a file that exists")

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command."""
        args.format = _format_of(args)
        check_target(args)
        from ..bench.lanes import MixedError, in_lane
        from ..bench.report import build_report
        from ..bench.results import read_all

        results = read_all(args.results)
        try:
            results = results if args.format == "json" and args.lane is None else in_lane(results, args.lane)
            report = None if args.format == "json" else build_report(results)
        except MixedError as error:
            raise CommandError(f"{error}, with --lane") from error
        if not results.runs and not results.series:
            lane = f" of the lane {args.lane}" if args.lane else ""
            raise CommandError(f"there is no run{lane} in {', '.join(map(str, args.results))}; run `halo-vae bench`")
        if report is None:
            from ..bench.aggregate import aggregate, to_json

            figures = aggregate(results)
            write_text(to_json(figures), args)
            failures = [f for lane in figures["lanes"].values() for f in lane if f["passed"] is False]
        else:
            from ..bench.report import render

            write_text(render(report, args.format), args)
            failures = list(report.failures)
        return _outcome(len(failures), results.skipped)


def _format_of(args: argparse.Namespace) -> str:
    """What is asked for, else what the file's name ends in, else Markdown."""
    asked: str | None = args.format
    ending = args.output.suffix.lower().lstrip(".") if args.output is not None else ""
    return asked or {"htm": "html"}.get(ending, ending if ending in FORMATS else "md")


def _outcome(n_wrong: int, skipped: int) -> ExitCode:
    from ..render.units import format_count

    if skipped:
        sys.stderr.write(f"halo-vae: left out {format_count(skipped, 'line')} of the results that cannot be read\n")
    if n_wrong:
        what = format_count(n_wrong, "figure has wrong pictures", "figures have wrong pictures")
        sys.stderr.write(f"halo-vae: {what}; the report says FAIL\n")
    return ExitCode.FAILED if n_wrong else ExitCode.OK
