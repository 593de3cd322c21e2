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
    from ...optim.program import Program
    from .session import Session

MAX_FRAMES = 4096


class PlanCommand:
    """Show what a decode would do, without decoding: tiles per op, convolution shapes, peak memory, arithmetic."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("latent", nargs="?", type=Path, metavar="LATENT", help=f"a latent file ({', '.join(SUFFIXES)})")
        add("--size", metavar="WxH", help="size of the picture in pixels, instead of a latent file")
        add("--batch", type=int, metavar="N", help="pictures or clips in the batch, with --size (default 1)")
        add("--frames", type=int, metavar="N", help="frames of each clip, with --size and a video VAE (default 1)")
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
        if args.frames is not None and args.size is None:
            raise CommandError("--frames goes with --size; a latent file has its own frames")
        session = open_session(args, args.vae)
        shape = tuple(session.read(args.latent).shape) if args.latent else latent_shape_for(session, args)
        planned = session.plan(shape)
        from .plan_text import plan_line, render_plan

        if args.json:
            emit_json(plan_line(session.decoder, shape, planned))
        else:
            sys.stdout.write(render_plan(session.decoder, shape, planned))
        return ExitCode.OK


def latent_shape_for(session: Session, args: argparse.Namespace) -> tuple[int, ...]:
    """The latent [B, C, H, W], or [B, C, T, H, W] of clips, that --size needs. CommandError if none gives it."""
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
    size = height // rows, width // cols
    if session.is_video:
        return batch, program.latent_channels, latent_frames_for(program, args.frames), *size
    if args.frames is not None:
        raise CommandError(f"--frames is for video VAEs and this {program.family} decoder makes pictures; use --batch")
    return batch, program.latent_channels, *size


def latent_frames_for(program: Program, frames: int | None) -> int:
    """Latent frames of a clip of that many frames. CommandError if there is none."""
    from ...optim.video.frames import output_frames

    wanted = 1 if frames is None else frames
    if not 1 <= wanted <= MAX_FRAMES:
        raise CommandError(f"--frames is {wanted}; give 1 to {MAX_FRAMES}")
    made = {output_frames(program, t): t for t in range(wanted + 1, 0, -1)}
    if wanted not in made:
        nearest = min((n for n in made if n), key=lambda n: (abs(n - wanted), n))
        raise CommandError(f"--frames is {wanted}, but this {program.family} decoder makes none such; try {nearest}")
    return made[wanted]
