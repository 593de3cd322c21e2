"""`halo-vae decode`: latent files in, picture and video files out."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .clips import ClipFiles, ClipTargets, clip_targets
from .command import CommandError, ExitCode
from .extras import NO_EXTRAS, Extras, add_profile_flags, check_extras, extras_of
from .inputs import SUFFIXES
from .movies import check_movie_format, read_fps
from .options import add_decode_flags
from .outputs import (
    FORMATS,
    MOVIE_FORMATS,
    Format,
    check_channels,
    check_format,
    check_targets,
    prepare_folder,
    target_paths,
    write_pictures,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..record import DecodeRecord
    from .session import Session


class DecodeCommand:
    """Decode latents to pictures, one PNG or npy file each, or to videos."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("latents", nargs="+", type=Path, metavar="LATENT", help=f"a latent file ({', '.join(SUFFIXES)})")
        add("--vae", required=True, type=Path, metavar="FILE", help="the VAE's safetensors file")
        add("-o", "--output", required=True, type=Path, metavar="DIR", help="folder for the pictures")
        add("--format", choices=FORMATS, default="png", help="npy keeps float32 in 0-1; mp4 and webm are for videos")
        add("--fps", metavar="N", help="frames per second of mp4 and webm, default 24, with Wan 2.1's VAE 16")
        add("--json", action="store_true", help="one record per line on stdout, the log on stderr")
        add_profile_flags(parser)
        add_decode_flags(parser)

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command. Everything that can be refused is refused before the first file is written."""
        from .session import open_session

        check_format(args.format)
        if args.format in MOVIE_FORMATS:
            check_movie_format(args.format)
        elif args.fps is not None:
            raise CommandError("--fps goes with --format mp4 or webm; other files have no frame rate")
        check_extras(args)
        session = open_session(args, args.vae)
        jobs = [prepare_job(session, path, args.output, args.format, args.fps) for path in args.latents]
        extras = [extras_of(args, path.stem) for path in args.latents]
        targets = [*(t for job in jobs for t in job.targets), *(t for beside in extras for t in beside.paths)]
        check_targets(targets, force=args.force)
        prepare_folder(args.output)
        for job, beside in zip(jobs, extras, strict=True):
            record = run_job(session, job, args.format, beside, force=args.force)
            report_job(job, record, beside, as_json=args.json)
        return ExitCode.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One latent file and the files it becomes."""

    source: Path
    latent: Tensor
    """[B, C, H, W], or [B, C, T, H, W] for clips; float32."""
    targets: tuple[Path, ...]
    """One file per picture, frame or clip."""
    clips: ClipTargets | None = None
    """The same by clip, where clips are decoded."""


def prepare_job(session: Session, source: Path, folder: Path, fmt: Format, fps: str | None = None) -> Job:
    """Read a latent and plan it, so that a wrong one is found now. LatentError, PlanError, CommandError."""
    latent = session.read(source)
    session.plan(tuple(latent.shape))
    family = session.decoder.program.family
    check_channels(fmt, session.decoder.program.out_channels)
    if session.is_video:
        n_clips, n_frames = latent.shape[0], session.frames_of(latent)
        clips = clip_targets(folder, source.stem, n_clips, n_frames, fmt, read_fps(fps, family))
        return Job(source=source, latent=latent, targets=clips.paths, clips=clips)
    if fmt in MOVIE_FORMATS:
        raise CommandError(f"--format {fmt} is for videos and this {family} decoder makes pictures; use png or npy")
    return Job(source=source, latent=latent, targets=target_paths(folder, source.stem, latent.shape[0], fmt))


def run_job(
    session: Session, job: Job, fmt: Format, beside: Extras = NO_EXTRAS, *, force: bool = False
) -> DecodeRecord:
    """Decode one latent and write its pictures and what goes beside them, of a decode that failed the latter only."""
    before = session.last_record()
    try:
        return _run_job(session, job, fmt, force=force)
    finally:
        record = session.last_record()
        if record is not None and record is not before:
            beside.write(record)


def _run_job(session: Session, job: Job, fmt: Format, *, force: bool) -> DecodeRecord:
    """The pictures; the frames of clips as they finish."""
    if job.clips is not None:
        with ClipFiles(job.clips, force=force) as files:
            return session.decode_frames(job.latent, files.take, label=job.source.stem)
    images, record = session.decode(job.latent, label=job.source.stem)
    write_pictures(images, job.targets, fmt)
    return record


def report_job(job: Job, record: DecodeRecord, beside: Extras = NO_EXTRAS, *, as_json: bool) -> None:
    """What was written. On stdout the record as JSON, or the names of the files; the rest on stderr."""
    from ..render.text import render_line
    from .session import emit_json

    sys.stderr.write(f"{job.source.name}: {render_line(record)}\n")
    if as_json:
        emit_json(record.to_json())
    for path in (*job.targets, *(p for p in beside.paths if p.exists())):
        (sys.stderr if as_json else sys.stdout).write(f"{path}\n")
