"""Flags that all decoding commands share, and the settings they stand for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .command import CommandError

if TYPE_CHECKING:
    from ...optim.settings import DecodeSettings

METHODS = ("auto", "exact", "blended")
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "mixed")
STRATEGIES = ("auto", "strips", "tiles")
BACKENDS = ("auto", "torch", "winograd", "shifted_gemm", "conv2d_sum", "kitchen")
SWITCHES = ("leave", "on", "off")
DEVICE_HELP = "device to decode on: auto (a GPU that torch sees, else the CPU), cpu, cuda, cuda:1, …"


def add_decode_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that shape a decode; their defaults are those of `DecodeSettings`."""
    add = parser.add_argument_group("how to decode").add_argument
    add("--method", choices=METHODS, default="auto", help="exact where the decoder is known, else blended")
    add("--precision", choices=PRECISIONS, default="auto", help="arithmetic of the convolutions")
    add("--plan", choices=STRATEGIES, default="auto", dest="strategy", help="shape of the tiles")
    add("--tile-size", type=int, metavar="PX", help="longest edge of a tile in picture pixels, 0 = planner's choice")
    add("--overlap", type=int, metavar="PX", help="overlap of blended tiles in picture pixels")
    add("--chunk-frames", type=int, metavar="N", help="output frames per chunk of a video, 0 = planner's choice")
    add("--chunk-overlap", type=int, metavar="N", help="output frames that blended chunks of a video share")
    add("--seed", type=int, metavar="N", help="seed of decoders that add noise, -1 = torch's generator")
    add("--kernel-backend", choices=BACKENDS, default="auto", help="what convolutions run on where it takes them")
    add("--fp16-accumulation", action="store_true", help="allow kernels that add up in float16, which loses digits")
    add("--cudnn", choices=SWITCHES, default="leave", help="cuDNN, on ROCm MIOpen, for the time of the decode")
    add("--threads", type=int, metavar="N", help="CPU threads, default torch's")
    add("--device", default="auto", metavar="NAME", help=DEVICE_HELP)
    add("--force", action="store_true", help="overwrite files that exist (`plan` writes none)")


def settings_from(args: argparse.Namespace) -> DecodeSettings:
    """The settings that the flags ask for. SettingsError if one is out of range."""
    from ...optim.settings import DecodeSettings

    names = ("tile_size", "overlap", "chunk_frames", "chunk_overlap", "seed")
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if args.chunk_overlap is None and args.chunk_frames and args.chunk_frames > 0:  # not asked for, so not too much
        given["chunk_overlap"] = min(DecodeSettings().chunk_overlap, args.chunk_frames // 2)
    return DecodeSettings(
        method=args.method, precision_mode=args.precision, plan=args.strategy, kernel_backend=args.kernel_backend,
        fp16_accumulation=args.fp16_accumulation, cudnn=args.cudnn, **given,
    )  # fmt: skip


def apply_threads(args: argparse.Namespace) -> None:
    """Set torch's thread count for this process. CommandError below 1."""
    if args.threads is None:
        return
    if args.threads < 1:
        raise CommandError(f"--threads is {args.threads}; give 1 or more")
    import torch

    torch.set_num_threads(args.threads)


def choose_device(args: argparse.Namespace) -> str:
    """The torch device to decode on. CommandError if torch cannot use the one named."""
    import torch

    from ...optim.accelerator import GPU, gpu_count, has_gpu, is_gpu

    if args.device == "auto":
        return GPU if has_gpu() else "cpu"
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise CommandError(f"--device {args.device} is no device name; give auto, cpu, cuda or cuda:N") from None
    if device.type != "cpu" and not is_gpu(device):
        raise CommandError(f"--device {args.device} is not supported; give auto, cpu, cuda or cuda:N")
    n = gpu_count() if is_gpu(device) else 1
    if (device.index or 0) >= n:
        raise CommandError(f"--device {args.device} does not exist, torch sees {n} GPU(s) here; use --device cpu")
    return str(device)
