"""`halo-vae history`: decodes of the past, listed, shown, exported, cleared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .command import CommandError, ExitCode
from .history_files import FORMATS, check_target, export_text, write_chart, write_text

if TYPE_CHECKING:
    from ..record import DecodeRecord
    from ..rows import HistoryRow
    from ..store import HistoryPage, HistoryStore

STATUSES = ("ok", "interrupted", "out_of_memory", "non_finite", "error")
MAX_LIST = 1000
_ID_HELP = "id of a decode, or as many of its first digits as no other has, at least 4"


class HistoryCommand:
    """List, show, export and clear the records of decodes, those of ComfyUI's nodes included."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        what = parser.add_subparsers(metavar="WHAT", required=True)

        def add(name: str, call: Callable[[argparse.Namespace], ExitCode], text: str) -> argparse.ArgumentParser:
            sub = what.add_parser(name, help=text, description=text, epilog=parser.epilog)
            sub.set_defaults(history=call)
            return sub

        listed = add("list", list_decodes, "Show decodes as a table, the newest first.")
        listed.add_argument("--limit", type=int, default=20, metavar="N", help=f"most decodes, 1 to {MAX_LIST}")
        listed.add_argument("--status", choices=STATUSES, help="only decodes that ended so")
        listed.add_argument("--vae", metavar="TEXT", help="only decodes of this family, or whose VAE's hash begins so")
        listed.add_argument("--json", action="store_true", help="one row per line as JSON on stdout")
        shown = add("show", show_decode, "Show everything that was recorded of one decode.")
        shown.add_argument("id", metavar="ID", help=_ID_HELP)
        shown.add_argument("--json", action="store_true", help="the record as one JSON object on stdout")
        export = add("export", export_decodes, "Write decodes for other programs, the oldest first.")
        export.add_argument("ids", nargs="*", metavar="ID", help=f"{_ID_HELP}; all unless given")
        export.add_argument("--format", choices=FORMATS, default="json", help="see docs/cli.md")
        export.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write instead of stdout")
        export.add_argument("--force", action="store_true", help="overwrite a file that exists")
        cleared = add("clear", clear_decodes, "Remove every record, for good.")
        cleared.add_argument("--yes", action="store_true", help="really do it")

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command."""
        call: Callable[[argparse.Namespace], ExitCode] = args.history
        return call(args)


def list_decodes(args: argparse.Namespace) -> ExitCode:
    """A table, or one JSON object per line."""
    if not 1 <= args.limit <= MAX_LIST:
        raise CommandError(f"--limit is {args.limit}; give 1 to {MAX_LIST}")
    from ..codec import encode
    from ..render.history import render_rows
    from .session import emit_json

    rows: list[HistoryRow] = []
    skipped = 0
    for page in _pages(_store(), 100 if args.status or args.vae else args.limit):
        skipped += page.skipped
        rows += _fitting(page, args)
        if len(rows) >= args.limit:
            break
    del rows[args.limit :]
    for row in rows if args.json else ():
        emit_json({"schema_version": 1, "kind": "history_row", **encode(row)})
    if not args.json:
        sys.stdout.write(render_rows(rows))
    _tell_skipped(skipped)
    return ExitCode.OK


def show_decode(args: argparse.Namespace) -> ExitCode:
    """The panel of one record, or its JSON."""
    from ..render.text import render_record
    from .session import emit_json

    record = _one(_store(), args.id)
    if args.json:
        emit_json(record.to_json())
    else:
        sys.stdout.write(render_record(record))
        sys.stdout.write(f"\nid {record.record_id}, started {record.started_at}\n")
    return ExitCode.OK


def export_decodes(args: argparse.Namespace) -> ExitCode:
    """Decodes as JSON or CSV, or one of them as a trace or a chart."""
    check_target(args)
    store = _store()
    if args.format in ("trace", "png"):
        record = _single(store, args)
        if args.format == "png":
            write_chart(record, args)
        else:
            write_text(export_text(args.format, (record,)), args)
        return ExitCode.OK
    if args.ids:
        records = tuple(_one(store, given) for given in dict.fromkeys(args.ids))
        records = tuple(sorted(records, key=lambda record: record.started_at))
    else:
        found = store.read()
        records = found.records
        _tell_skipped(found.skipped)
    write_text(export_text(args.format, records), args)
    return ExitCode.OK


def clear_decodes(args: argparse.Namespace) -> ExitCode:
    """Remove the history's files."""
    from ..render.units import format_count

    store = _store()
    if not args.yes:
        raise CommandError(f"this removes every record in {store.path.parent} for good; repeat it with --yes")
    sys.stdout.write(f"removed {format_count(store.clear(), 'record')}\n")
    return ExitCode.OK


def _store() -> HistoryStore:
    from ..store import HistoryStore

    return HistoryStore()


def _pages(store: HistoryStore, limit: int) -> Iterator[HistoryPage]:
    """Pages, the newest first, as they are asked for."""
    before: str | None = None
    while True:
        page = store.page(limit, before)
        yield page
        before = page.next
        if before is None:
            return


def _fitting(page: HistoryPage, args: argparse.Namespace) -> list[HistoryRow]:
    from ..rows import row_of

    rows = map(row_of, page.records)
    return [row for row in rows if args.status in (None, row.status.value) and _is_of(row, args.vae)]


def _is_of(row: HistoryRow, vae: str | None) -> bool:
    """True where a row is of the family, or of the VAE whose hash begins so."""
    return vae is None or row.family == vae or (bool(vae) and (row.vae_hash or "").startswith(vae))


def _single(store: HistoryStore, args: argparse.Namespace) -> DecodeRecord:
    """The decode that is named, else the newest. CommandError for several, and where there is none."""
    if len(args.ids) > 1:
        raise CommandError(f"--format {args.format} takes one decode and {len(args.ids)} ids are given; give one")
    if args.ids:
        return _one(store, args.ids[0])
    newest = store.read(1).records
    if not newest:
        raise CommandError(f"there is no decode in {store.path.parent} yet; decode something first")
    return newest[0]


def _one(store: HistoryStore, given: str) -> DecodeRecord:
    """The record whose id begins so. CommandError where none or several do."""
    try:
        found = store.matching(given.lower())
    except ValueError as error:
        raise CommandError(str(error)) from error
    if not found:
        raise CommandError(f"no decode has an id that begins with {given}; `halo-vae history list` shows them")
    if len(found) > 1 and found[0].record_id != found[1].record_id:
        raise CommandError(
            f"several decodes have an id that begins with {given}, {found[0].record_id} and {found[1].record_id} among "
            "them; give more digits"
        )
    return found[0]


def _tell_skipped(skipped: int) -> None:
    if skipped:
        from ..render.units import format_count

        sys.stderr.write(f"halo-vae: left out {format_count(skipped, 'line')} of the history that cannot be read\n")
