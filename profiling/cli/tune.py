"""`halo-vae tune`: measure what makes a VAE's decodes fast on this device, and keep it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .command import CommandError, ExitCode
from .options import apply_threads, choose_device

if TYPE_CHECKING:
    from ...optim.decode import Decoder
    from ...optim.device import DeviceProfile
    from ...optim.tuning import TunedEntry, TuningStore

_BUDGET_S = 60.0


class TuneCommand:
    """Measure which kernels, layouts and tiles make a VAE's decodes fast on this device, and keep it for all decodes.

    What is found is used by every later decode of a VAE of the same structure that leaves the choice to `auto`, here
    and in ComfyUI, until torch, the driver or the device changes. Ctrl-C keeps what was measured so far.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("--vae", type=Path, metavar="FILE", help="the VAE's safetensors file")
        add("--device", default="auto", metavar="NAME", help="device to tune for: auto, cpu, cuda, cuda:1, …")
        add(
            "--threads", type=int, metavar="N", help="CPU threads, default torch's; on a CPU a choice holds for as many"
        )
        add("--budget", type=float, default=_BUDGET_S, metavar="SECONDS", help="time to spend, default 60")
        add("--precisions", action="store_true", help="try narrower arithmetic too, which changes the picture a little")
        add("--fp16-accumulation", action="store_true", help="try kernels that add up in float16, which loses digits")
        add("--json", action="store_true", help="what was found as JSON on stdout, the log on stderr")
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--list", action="store_true", help="show what is kept, and tune nothing")
        what.add_argument("--forget", action="store_true", help="drop what is kept of decoders built as this VAE's")
        what.add_argument("--suggest", action="store_true", help="show which decoders of the history are worth tuning")

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command."""
        if args.suggest:
            return _suggest(as_json=args.json)
        from ...optim.tuning import TuningStore

        store = TuningStore()
        if args.list and args.vae is None:
            return _show_all(store.entries(), as_json=args.json)
        if args.vae is None:
            raise CommandError("give the VAE to tune for with --vae FILE, or --list or --suggest")
        if args.list or args.forget:
            return _kept_of(args, store)
        return _tune(args, store)


def _tune(args: argparse.Namespace, store: TuningStore) -> ExitCode:
    from ...optim.device import describe_device
    from ...optim.packing import dtype_name
    from ...optim.tune import TuneOptions, check_options
    from ...optim.tune_run import tune_decoder
    from ...optim.tuning import key_of
    from .progress import StepBar

    options = TuneOptions(budget_s=args.budget, precisions=args.precisions, fp16_accumulation=args.fp16_accumulation)
    check_options(options)
    decoder = _open(args)
    profile = describe_device(decoder.device)
    _advise(profile)
    key = key_of(decoder.program, dtype_name(decoder.loaded_dtype), profile)
    before = store.get(key)
    try:
        with StepBar("tuning") as bar:
            entry = tune_decoder(
                decoder, profile, options, store=store, hints=getattr(decoder.weights, "metadata", {}), report=bar.step
            )
    except KeyboardInterrupt:
        kept = store.get(key)
        if kept is None or kept == before:
            raise
        _show(kept, as_json=args.json)
        raise CommandError("cancelled; what was measured is kept", exit_code=ExitCode.CANCELLED) from None
    _show(entry, as_json=args.json)
    return ExitCode.OK


def _open(args: argparse.Namespace) -> Decoder:
    from .session import open_vae

    apply_threads(args)
    return open_vae(args.vae, choose_device(args))


def _advise(profile: DeviceProfile) -> None:
    """On ROCm, what to set so that MIOpen's search is paid for here and not in decodes."""
    from ..render.tuning import miopen_advice

    hip = None if profile.versions is None else profile.versions.hip
    for line in miopen_advice(os.environ, hip, "Windows" if sys.platform == "win32" else "Linux"):
        sys.stderr.write(f"{line}\n")


def _kept_of(args: argparse.Namespace, store: TuningStore) -> ExitCode:
    """List or forget what is kept of decoders of one structure, whatever device and versions it is for."""
    from ...optim.tuning import structure_of

    structure = structure_of(_open(args).program)
    found = tuple(e for e in store.entries() if e.key.structure == structure)
    if args.list:
        return _show_all(found, as_json=args.json)
    for entry in found:
        store.remove(entry.key)
    from ..render.units import format_count
    from .session import emit_json

    if args.json:
        emit_json({"schema_version": 1, "kind": "forgotten", "structure": structure, "entries": len(found)})
    else:
        sys.stdout.write(f"forgot {format_count(len(found), 'entry', 'entries')} of decoder {structure}\n")
    return ExitCode.OK


def _suggest(*, as_json: bool) -> ExitCode:
    from ..codec import encode
    from ..render.tuning import render_suggestions
    from ..store import HistoryStore
    from ..usage import suggest, usage_of
    from .session import emit_json

    found = suggest(usage_of(HistoryStore().read().records))
    if not as_json:
        sys.stdout.write(render_suggestions(found))
    for suggestion in found if as_json else ():
        emit_json({"schema_version": 1, "kind": "suggestion", **encode(suggestion)})
    return ExitCode.OK


def _show(entry: TunedEntry, *, as_json: bool) -> None:
    from ..render.tuning import render_entry

    if as_json:
        _show_all((entry,), as_json=True)
    else:
        sys.stdout.write(render_entry(entry))


def _show_all(entries: tuple[TunedEntry, ...], *, as_json: bool) -> ExitCode:
    """A table, or one object per line."""
    from ..codec import encode
    from ..render.tuning import render_entries
    from .session import emit_json

    if not as_json:
        sys.stdout.write(render_entries(entries))
    for entry in entries if as_json else ():
        emit_json({"schema_version": 1, "kind": "tuned", **encode(entry), "gain": entry.gain})
    return ExitCode.OK
