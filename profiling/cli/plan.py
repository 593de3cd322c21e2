"""`halo-vae plan`: what a decode would do and cost, without decoding."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .command import CommandError, ExitCode
from .inputs import SUFFIXES
from .options import add_decode_flags

if TYPE_CHECKING:
    from .session import Session


class PlanCommand:
    """Show what a decode would do, without decoding: tiles per op, convolution shapes, peak memory, arithmetic."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("latent", nargs="?", type=Path, metavar="LATENT", help=f"a latent file ({', '.join(SUFFIXES)})")
        add("--size", metavar="WxH", help="size of the picture in pixels, instead of a latent file")
        add("--batch", type=int, metavar="N", help="pictures in the batch, with --size (default 1)")
        add("--vae", required=True, type=Path, metavar="FILE", help="the VAE's safetensors file")
        add("--json", action="store_true", help="the plan as one JSON object on stdout")
        add_decode_flags(parser)

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command. Nothing is decoded and nothing is written."""
        from .session import emit_json, open_session

        if (args.latent is None) == (args.size is None):
            raise CommandError("give a latent file or --size WxH, one of the two")
        if args.batch is not None and args.size is None:
            raise CommandError("--batch goes with --size; a latent file has its own batch")
        session = open_session(args, args.vae)
        shape = tuple(session.read(args.latent).shape) if args.latent else latent_shape_for(session, args)
        planned = session.plan(shape)
        from .plan_text import plan_line, render_plan

        if args.json:
            emit_json(plan_line(session.decoder, shape, planned))
        else:
            sys.stdout.write(render_plan(session.decoder, shape, planned))
        return ExitCode.OK


def latent_shape_for(session: Session, args: argparse.Namespace) -> tuple[int, int, int, int]:
    """The latent [B, C, H, W] that a picture of --size needs. CommandError if no latent gives that size."""
    found = re.fullmatch(r"(\d{1,6})\s*[xX×]\s*(\d{1,6})", args.size.strip())
    if found is None:
        raise CommandError(f"--size is {args.size!r}; give width x height in pixels, e.g. 1024x768")
    width, height = (int(g) for g in found.groups())
    program = session.decoder.program
    rows, cols = program.scale[1], program.scale[2]
    if width < cols or height < rows or width % cols or height % rows:
        raise CommandError(
            f"--size is {args.size}, but this {program.family} decoder makes multiples of {cols}x{rows} pixels; "
            f"the nearest is {max(1, round(width / cols)) * cols}x{max(1, round(height / rows)) * rows}"
        )
    batch = 1 if args.batch is None else args.batch
    if batch < 1:
        raise CommandError(f"--batch is {batch}; give 1 or more")
    return batch, program.latent_channels, height // rows, width // cols
