"""What each convolution backend takes, as data, and why it refuses the rest. Integers and names only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..program import Conv, Size
from ..settings import DecodeSettings
from . import winograd
from .packages import Package, missing, served_by_hip

if TYPE_CHECKING:
    from ..device import DeviceProfile
    from ..tiling import TileGrid

Medium = Literal["pictures", "clips"]
Upsampled = Literal["picture", "frame", "frames"]
"""Where an upsampling may come before a kernel: in pictures, in clips under one frame, and under several frames."""

MIN_CHANNELS = 32
"""Below this the transforms of `winograd` cost more than the products they save."""
MIN_PIXELS = 1024
"""Output pixels of an op below which transforming its filter costs more than it saves (measured at 512 channels)."""
MAX_ELEMENTS = 2**31 - 1
"""Kernels index one tensor with 32 bits."""
EVERY_DTYPE = ("float16", "bfloat16", "float32", "float64")
BOTH_LAYOUTS = ("channels_last", "contiguous")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvCase:
    """One convolution as a backend is asked for it."""

    medium: Medium
    kernel: Size
    in_channels: int
    out_channels: int
    """Channels of the kernel that runs: four times as many where an upsampling is folded into it."""
    upsample: int
    fold: bool
    """The upsampling runs at the source's resolution; without it, it would have to be done before."""
    dtype: str
    """What the kernel multiplies in."""
    layout: str
    edge: int
    """Rows or columns of the smallest tile, whichever are fewer."""
    tile: int
    """Output pixels of the largest call."""
    pixels: int
    """Output pixels of the op, for each frame of its kernel."""

    @property
    def upsampled(self) -> Upsampled:
        """What an upsampling of this case comes before."""
        return "picture" if self.medium == "pictures" else "frame" if self.kernel[0] == 1 else "frames"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRule:
    """What a backend's own norm, activation and padding take."""

    dtypes: tuple[str, ...]
    multiple: int
    """Channels come in multiples of this."""
    most_channels: int
    most_groups: int
    activations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What one backend takes."""

    name: str
    media: tuple[Medium, ...] = ("pictures", "clips")
    kinds: tuple[str, ...] = ()
    """Kinds of devices; empty = all."""
    families: tuple[str, ...] = ()
    """Families among AMD's GPUs; empty = all."""
    dtypes: tuple[str, ...] = EVERY_DTYPE
    dtype_reason: str = "takes {allowed}, not {dtype}"
    layouts: tuple[str, ...] = BOTH_LAYOUTS
    edges: tuple[int, ...] = ()
    """Edges of a kernel in H and W; empty = all."""
    frames: tuple[int, ...] = ()
    """Frames of a kernel; empty = all."""
    upsampling: tuple[Upsampled, ...] = ("picture", "frame", "frames")
    least_channels: int = 1
    in_multiple: int = 1
    in_below: int = 0
    """So few input channels are taken whatever their number."""
    out_multiple: int = 1
    least_edge: int = 1
    """Rows and columns that every tile has; not asked of a folded upsampling."""
    least_pixels: int = 1
    float16_sums: bool = False
    """Products are added up in float16, which `fp16_accumulation` has to allow."""
    package: Package | None = None
    norm: NormRule | None = None
    """Also normalises, activates and pads, where this holds."""


KITCHEN_PACKAGE = Package(
    module="comfy_kitchen",
    install="comfy-kitchen>=0.2.40",
    functions=(
        ("fp16_conv3d", ("x", "weight", "bias", "residual", "out")),
        ("group_norm_silu_pad3d", ("x", "num_groups", "eps", "pad", "silu", "zero_pad", "out", "stats")),
        ("group_norm_stats3d", ("x", "num_groups", "eps")),
    ),
)
TORCH = Constraints(name="torch", upsampling=("picture", "frame"))
WINOGRAD = Constraints(
    name="winograd",
    dtypes=("float32",),
    dtype_reason="{dtype} would round the transformed values",
    layouts=("channels_last",),
    edges=(3,),
    least_channels=MIN_CHANNELS,
    least_edge=winograd.EDGE,
    least_pixels=MIN_PIXELS,
)
SHIFTED_GEMM = Constraints(name="shifted_gemm", edges=(3,))
CONV2D_SUM = Constraints(name="conv2d_sum", media=("clips",), frames=(2, 3, 4, 5))
KITCHEN = Constraints(
    name="kitchen",
    # on a CPU the package runs its plain form, in which its numbers can be checked without the device
    kinds=("hip", "cpu"),
    families=("rdna3", "rdna3.5", "rdna4"),
    dtypes=("float16",),
    layouts=("channels_last",),
    edges=(3,),
    upsampling=("picture",),
    in_multiple=8,
    in_below=8,
    out_multiple=8,
    float16_sums=True,
    package=KITCHEN_PACKAGE,
    norm=NormRule(
        dtypes=("float16", "bfloat16"), multiple=8, most_channels=2048, most_groups=1024, activations=("none", "silu")
    ),
)
"""The package's matrix kernels need the matrix units of RDNA 3 and later, and cover chips that its wheel was built for.
Source: comfy-kitchen 0.2.40, its list of architectures and the checks before each of its kernels."""
BACKENDS: Mapping[str, Constraints] = {b.name: b for b in (TORCH, WINOGRAD, SHIFTED_GEMM, CONV2D_SUM, KITCHEN)}
"""Every backend that a decode may ask for."""


def constraints_of(name: str, profile: DeviceProfile) -> Constraints:
    """The constraints of a backend on a device, which may state its own."""
    return next((c for c in profile.backends if c.name == name), BACKENDS[name])


def picture_case(op: Conv, *, fold: bool, dtype: str, layout: str, grid: TileGrid) -> ConvCase:
    """A convolution of pictures in tiles of `grid`."""
    # the last strip may be shorter than the others
    last = grid.height % grid.rows or grid.rows if not grid.slides else grid.rows
    return ConvCase(
        medium="pictures",
        kernel=op.kernel,
        in_channels=op.in_channels,
        out_channels=op.out_channels * (4 if fold else 1),
        upsample=op.upsample,
        fold=fold,
        dtype=dtype,
        layout=layout,
        edge=min(last, grid.cols),
        tile=grid.images_per_call * grid.rows * grid.cols,
        pixels=grid.computed,
    )


def refusals(
    constraints: Constraints, case: ConvCase, profile: DeviceProfile, settings: DecodeSettings
) -> tuple[str, ...]:
    """Every reason why the backend does not take the convolution; empty where it does."""
    why = [*_device(constraints, profile), *_numbers(constraints, case), *_shape(constraints, case)]
    if constraints.float16_sums and not settings.fp16_accumulation:
        why.append("adds up in float16, which fp16_accumulation does not allow")
    if constraints.package is not None and not why:
        # last, as looking into a package imports it
        why += missing(constraints.package)
        if not why and profile.kind == "hip" and (slow := served_by_hip(constraints.package)):
            why.append(f"{constraints.package.module} would run {', '.join(slow)} in plain torch on this device")
    return tuple(why)


def _device(c: Constraints, profile: DeviceProfile) -> list[str]:
    if c.kinds and profile.kind not in c.kinds:
        return [f"runs on {_either(c.kinds)}, not on {profile.kind}"]
    if c.families and profile.kind == "hip" and profile.family not in c.families:
        return [f"needs one of {', '.join(c.families)}, not {profile.family}"]
    return []


def _numbers(c: Constraints, case: ConvCase) -> list[str]:
    why = []
    if case.dtype not in c.dtypes:
        why.append(c.dtype_reason.format(dtype=case.dtype, allowed=_either(c.dtypes)))
    if case.layout not in c.layouts:
        why.append(f"needs {_either(c.layouts)}")
    return why


def _shape(c: Constraints, case: ConvCase) -> list[str]:
    why = []
    if case.medium not in c.media:
        why.append(f"takes {_either(c.media)} only")
    written_out = case.upsample == 2 and not case.fold
    if c.edges and (case.kernel[1] not in c.edges or case.kernel[1] != case.kernel[2] or written_out):
        why.append(f"takes only {_either([f'{e}x{e}' for e in c.edges])} kernels, upsampled or not")
    elif case.upsample == 2 and case.upsampled not in c.upsampling:
        why.append(f"takes no upsampling before a kernel over a {case.upsampled}".replace("a frames", "several frames"))
    if c.frames and case.medium == "clips" and case.kernel[0] not in c.frames:
        why.append(f"takes kernels over {_either([str(f) for f in c.frames])} frames only")
    outputs = case.out_channels // (4 if case.fold else 1)
    if min(case.in_channels, outputs) < c.least_channels:
        why.append(f"fewer than {c.least_channels} channels")
    if case.in_channels % c.in_multiple and case.in_channels >= c.in_below:
        why.append(f"{case.in_channels} input channels are not a multiple of {c.in_multiple}")
    if case.out_channels % c.out_multiple:
        why.append(f"{case.out_channels} output channels are not a multiple of {c.out_multiple}")
    if not case.fold and case.edge < c.least_edge:
        why.append(f"a tile is smaller than {c.least_edge}x{c.least_edge}")
    if case.pixels < c.least_pixels:
        why.append(f"fewer than {c.least_pixels} pixels")
    if case.tile * max(case.in_channels, case.out_channels) > MAX_ELEMENTS:
        why.append(f"a tile has more than {MAX_ELEMENTS} elements")
    return why


def norm_refusals(c: Constraints, op: Conv, *, fold: bool, stream: str, dtype: str) -> tuple[str, ...]:
    """Why a backend does not normalise, activate and pad the input of `op`; empty where it does."""
    rule = c.norm
    if rule is None:
        return ("leaves norms to others",)
    why = []
    if stream != dtype or dtype not in rule.dtypes:
        why.append(f"stages {_either(rule.dtypes)} out of the same, not {dtype} out of {stream}")
    if op.in_channels % rule.multiple or op.in_channels > rule.most_channels:
        why.append(f"{op.in_channels} channels are not a multiple of {rule.multiple} up to {rule.most_channels}")
    if op.act not in rule.activations or (op.norm is None and op.act != "none"):
        why.append(f"activates with {_either(rule.activations)} after a norm, not with {op.act}")
    if op.norm is not None and (op.norm.groups > rule.most_groups or op.in_channels % op.norm.groups):
        why.append(f"{op.norm.groups} groups of {op.in_channels} channels")
    if op.upsample == 2 and not fold:
        why.append("takes no upsampling")
    return tuple(why)


def _either(names: tuple[str, ...] | list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
