"""The nodes as data: ids, sockets and widgets, in the order in which workflows store their values.

Ids and the order of what is here never change; new widgets go to the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..optim.settings import Method, PrecisionMode

STATS = "HALO_VAE_STATS"
"""Socket type of a decode's record."""
CATEGORY = "Halo VAE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An input that only a link can feed."""

    id: str
    type: str
    tooltip: str
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Widget:
    """An input with a widget."""

    id: str
    kind: Literal["int", "bool", "choice"]
    default: int | bool | str
    tooltip: str
    minimum: int | None = None
    maximum: int | None = None
    step: int | None = None
    options: tuple[str, ...] = ()
    advanced: bool = True
    """Hidden until asked for, where the host can hide widgets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """An output."""

    id: str
    type: str
    tooltip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node as the host shows it."""

    id: str
    title: str
    description: str
    links: tuple[Link, ...]
    widgets: tuple[Widget, ...]
    outputs: tuple[Socket, ...]
    aliases: tuple[str, ...] = ()
    """Other words to find it by."""
    is_output: bool = False
    """True where it runs even if nothing hangs on its outputs."""

    def defaults(self) -> dict[str, Any]:
        """Widget values of a fresh node."""
        return {w.id: w.default for w in self.widgets}


_SAMPLES = Link(id="samples", type="LATENT", tooltip="The latent to decode.")
_VAE = Link(id="vae", type="VAE", tooltip="The VAE of the model that made the latent.")
_IMAGE = Socket(id="IMAGE", type="IMAGE", tooltip="The decoded pictures, video frames one after another.")
_STATS_OUT = Socket(id="STATS", type=STATS, tooltip="What the decode did and cost, for VAE Decode Stats (Halo).")
_FRAMES = Socket(id="frames", type="INT", tooltip="Number of pictures in IMAGE: the frames of all clips.")
_TEXT = Socket(id="text", type="STRING", tooltip="The panel as text.")

_CHOICES = (
    Widget(
        id="method",
        kind="choice",
        default="auto",
        options=get_args(Method),
        advanced=False,
        tooltip="exact equals the untiled decode within rounding and needs a known decoder; blended feathers "
        "tiles of any VAE and is approximate; stock is ComfyUI's own; auto is exact where it can be, else blended.",
    ),
    Widget(
        id="precision_mode",
        kind="choice",
        default="auto",
        options=get_args(PrecisionMode),
        advanced=False,
        tooltip="Arithmetic of the convolutions. auto keeps the VAE's own dtype for small pictures and narrows for "
        "large ones where the device is faster for it; mixed narrows the convolutions alone.",
    ),
)
_SWITCHES = (
    Widget(
        id="batch_optimization", kind="bool", default=True,
        tooltip="Decode several pictures in one pass where that pays.",
    ),
    Widget(
        id="memory_prefetching", kind="bool", default=True,
        tooltip="Prepare the next pass's latent while this one computes.",
    ),
    Widget(
        id="adaptive_precision", kind="bool", default=True,
        tooltip="Compute again in a wider dtype what came out as NaN or infinite; off: stop with an error instead.",
    ),
    Widget(
        id="tensor_layout_optimization", kind="bool", default=True,
        tooltip="Use the memory layout in which this device is fastest; off: contiguous.",
    ),
    Widget(
        id="advanced_caching", kind="bool", default=True,
        tooltip="Keep programs, plans and repacked weights for the next decode; off: make them anew, and hold less.",
    ),
)  # fmt: skip

DECODE = NodeSpec(
    id="HaloVAEDecode",
    title="VAE Decode (Halo)",
    description="Decodes latents in tiles, equal to an untiled decode; planned before it runs, measured while it does.",
    links=(_SAMPLES, _VAE),
    widgets=(
        *_CHOICES,
        Widget(
            id="tile_size", kind="int", default=768, minimum=0, maximum=16384, step=32,
            tooltip="Most pixels of the picture along an edge of a tile; 0 leaves it to the planner.",
        ),
        Widget(
            id="overlap", kind="int", default=96, minimum=0, maximum=8192, step=32,
            tooltip="Pixels of the picture that neighbouring tiles share; the blended method only. At most a third of "
            "a tile is used.",
        ),
        *_SWITCHES,
    ),
    outputs=(_IMAGE, _STATS_OUT),
    aliases=("vae decode", "decode latent", "latent to image", "exact decode", "rocm", "strix halo", "halo"),
)  # fmt: skip

DECODE_TILED = NodeSpec(
    id="HaloVAEDecodeTiled",
    title="VAE Decode Tiled (Halo)",
    description="Takes the place of VAE Decode (Tiled): the same widgets, and no seams where the decoder is known.",
    links=(_SAMPLES, _VAE),
    widgets=(
        Widget(
            id="tile_size", kind="int", default=512, minimum=64, maximum=4096, step=32,
            tooltip="Most pixels of the picture along an edge of a tile.",
        ),
        Widget(
            id="overlap", kind="int", default=64, minimum=0, maximum=4096, step=32,
            tooltip="Pixels of the picture that neighbouring tiles share; the blended and stock methods only.",
        ),
        Widget(
            id="temporal_size", kind="int", default=64, minimum=8, maximum=4096, step=4,
            tooltip="Frames of a video decoded at a time; a decoder that is known shows no border between them.",
        ),
        Widget(
            id="temporal_overlap", kind="int", default=8, minimum=4, maximum=4096, step=4,
            tooltip="Frames that neighbouring parts of a video share; the blended and stock methods only. At most half "
            "a part is used.",
        ),
        *_CHOICES,
        *_SWITCHES,
    ),
    outputs=(_IMAGE, _STATS_OUT),
    aliases=("vae decode tiled", "tiled decode", "low memory", "seamless tiles", "out of memory", "rocm", "halo"),
)  # fmt: skip

DECODE_VIDEO = NodeSpec(
    id="HaloVAEDecodeVideo",
    title="VAE Decode Video (Halo)",
    description="Decodes video latents chunk by chunk: equal to decoding the whole clip at once where the decoder is "
    "known, in the memory of a chunk.",
    links=(_SAMPLES, _VAE),
    widgets=(
        *_CHOICES,
        Widget(
            id="tile_size", kind="int", default=0, minimum=0, maximum=16384, step=32,
            tooltip="Most pixels of a frame along an edge of a tile; 0 leaves it to the planner.",
        ),
        Widget(
            id="overlap", kind="int", default=96, minimum=0, maximum=8192, step=32,
            tooltip="Pixels of a frame that neighbouring tiles share; the blended method only. At most a third of a "
            "tile is used.",
        ),
        Widget(
            id="chunk_frames", kind="int", default=0, minimum=0, maximum=4096, step=1,
            tooltip="Frames of the video decoded at a time; 0 leaves it to the planner. A decoder that is known shows "
            "no border between them.",
        ),
        Widget(
            id="chunk_overlap", kind="int", default=8, minimum=0, maximum=4096, step=1,
            tooltip="Frames that neighbouring chunks share; the blended method only. At most half a chunk is used.",
        ),
        Widget(
            id="noise_seed", kind="int", default=-1, minimum=-1, maximum=2**63 - 1, step=1,
            tooltip="Seed of the noise that some decoders add, as LTX-Video's; exact method only. -1 draws from "
            "torch's own generator, as ComfyUI's VAE Decode does.",
        ),
        *_SWITCHES,
    ),
    outputs=(_IMAGE, _STATS_OUT, _FRAMES),
    aliases=("vae decode video", "video decode", "decode clip", "latent to video", "wan", "chunks", "rocm", "halo"),
)  # fmt: skip

STATS_VIEW = NodeSpec(
    id="HaloVAEStats",
    title="VAE Decode Stats (Halo)",
    description="Shows what a decode did and cost.",
    links=(Link(id="stats", type=STATS, tooltip="The STATS output of a Halo VAE decode node."),),
    widgets=(),
    outputs=(_TEXT,),
    aliases=("vae stats", "decode statistics", "profiler", "halo"),
    is_output=True,
)

MONITOR = NodeSpec(
    id="HaloVAEMonitor",
    title="VAE Monitor (Halo)",
    description="Shows the device, what a VAE is taken for, what method auto would choose and why, and advice from the "
    "history of decodes. Decodes nothing.",
    links=(
        Link(id="vae", type="VAE", tooltip="The VAE to look at.", optional=True),
        Link(id="samples", type="LATENT", tooltip="A latent of the size to plan for.", optional=True),
    ),
    widgets=(),
    outputs=(_TEXT,),
    aliases=("vae info", "vae monitor", "performance monitor", "device info", "halo"),
    is_output=True,
)

TUNE = NodeSpec(
    id="HaloVAETune",
    title="VAE Tune (Halo)",
    description="Measures what makes decodes with a VAE fast on this device and keeps it: later decodes use it, at "
    "every size. Decodes random latents only.",
    links=(Link(id="vae", type="VAE", tooltip="The VAE to tune for."),),
    widgets=(
        Widget(
            id="budget_seconds", kind="int", default=60, minimum=5, maximum=3600, step=1, advanced=False,
            tooltip="Seconds to spend. What was measured is kept; running it again with more time tries the rest.",
        ),
        Widget(
            id="try_precisions", kind="bool", default=False, advanced=False,
            tooltip="Try narrower arithmetic too, which changes pictures a little; its error is kept with it.",
        ),
        Widget(
            id="fp16_accumulation", kind="bool", default=False, advanced=False,
            tooltip="Try kernels that add up products in float16, which loses digits.",
        ),
    ),
    outputs=(Socket(id="text", type="STRING", tooltip="What was measured and found, as text."),),
    aliases=("vae tune", "autotune", "benchmark kernels", "halo"),
    is_output=True,
)  # fmt: skip

BENCHMARK = NodeSpec(
    id="HaloVAEBenchmark",
    title="VAE Benchmark (Halo)",
    description="Decodes one latent with ComfyUI's own decode and with Halo in turn: time, memory, error and a picture "
    "of the difference.",
    links=(_SAMPLES, _VAE),
    widgets=(
        Widget(
            id="warm_ups", kind="int", default=1, minimum=0, maximum=20, step=1, advanced=False,
            tooltip="Decodes of each side before the timed ones; shown apart, and never part of a figure.",
        ),
        Widget(
            id="runs", kind="int", default=5, minimum=1, maximum=50, step=1, advanced=False,
            tooltip="Timed decodes of each side, taken in turn. Fewer than 5 are doubtful.",
        ),
        *_CHOICES,
        Widget(
            id="tile_size", kind="int", default=768, minimum=0, maximum=16384, step=32,
            tooltip="Most pixels of the picture along an edge of a tile of Halo's; 0 leaves it to the planner.",
        ),
        Widget(
            id="overlap", kind="int", default=96, minimum=0, maximum=8192, step=32,
            tooltip="Pixels of the picture that neighbouring tiles of Halo's share; the blended method only.",
        ),
        Widget(
            id="chunk_frames", kind="int", default=0, minimum=0, maximum=4096, step=1,
            tooltip="Frames of a video that Halo decodes at a time; 0 leaves it to the planner.",
        ),
        Widget(
            id="stock", kind="choice", default="plain", options=("plain", "tiled"), advanced=False,
            tooltip="What Halo is compared with: ComfyUI's VAE Decode, or its VAE Decode (Tiled) as that node comes.",
        ),
    ),
    outputs=(
        Socket(id="IMAGE", type="IMAGE", tooltip="Halo's pictures, of its last run."),
        Socket(
            id="difference", type="IMAGE",
            tooltip="Where the two pictures differ, from black over red to white; the report has the scale.",
        ),
        Socket(id="report", type="STRING", tooltip="Verdict, times, memory, error and doubts, as text."),
        Socket(id="figures", type="STRING", tooltip="The same as JSON, with every single time."),
        Socket(id="speedup", type="FLOAT", tooltip="Stock's median time ÷ Halo's; above 1 Halo is faster."),
        Socket(id="max_error", type="FLOAT", tooltip="Largest difference from stock's picture, both in 0 to 1."),
        Socket(id="STATS", type=STATS, tooltip="What Halo's last run did and cost, for VAE Decode Stats (Halo)."),
    ),
    aliases=("vae benchmark", "compare vae decode", "a/b", "speed test", "halo"),
    is_output=True,
)  # fmt: skip

SPECS = (DECODE, DECODE_TILED, DECODE_VIDEO, STATS_VIEW, MONITOR, TUNE, BENCHMARK)
