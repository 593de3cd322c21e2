"""What the doctor's report is made of: facts as they were read. None = could not be read, or there is no such thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DriverAccess = Literal["open", "denied", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device that decodes would run on, and what follows from it."""

    name: str
    """Device string of torch ("cpu", "cuda:0")."""
    kind: str
    """"cpu", "hip", "cuda" or "other"."""
    model: str | None
    """What the driver calls it ("Radeon 8060S Graphics")."""
    gfx: str | None
    """Architecture that torch reports, without feature suffixes ("gfx1151"); AMD only."""
    kernel_gfx: str | None
    """Architecture of the AMD GPU by the kernel driver's word, which no variable overrides."""
    family: str
    unified_memory: bool
    """True where the device shares the host's memory: a CPU, an APU."""
    compute_units: int | None
    native_dtypes: tuple[str, ...]
    strategy: str
    layout: str
    batch_cap: int
    attention: str
    convolution: str
    built_for: tuple[str, ...] | None
    """Architectures that this torch has kernels for; None on builds for the CPU."""
    capability: tuple[int, int] | None
    """Compute capability (8, 9); NVIDIA only."""
    gpu_visible: bool | None
    """Whether torch sees a GPU at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Memory of the host and the device in bytes."""

    host_total_bytes: int | None
    host_available_bytes: int | None
    swap_total_bytes: int | None
    swap_used_bytes: int | None
    carve_out_total_bytes: int | None
    """VRAM by amdgpu: an APU's carve-out, a card's own memory. Source: /sys/class/drm/card*/device/mem_info_*."""
    carve_out_used_bytes: int | None
    gtt_total_bytes: int | None
    """System memory that an AMD GPU may map, and below what it does."""
    gtt_used_bytes: int | None
    torch_total_bytes: int | None
    """Source: torch.cuda.mem_get_info, which is HIP's figure on ROCm."""
    torch_free_bytes: int | None
    budget_bytes: int | None
    """What a decode may take."""
    budget_reason: str
    """Which of the figures limits it."""
    invalid_readings: tuple[str, ...]
    """Figures that were refused, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """Versions of what a decode depends on."""

    halo_vae: str
    python: str
    torch: str
    hip: str | None
    rocm: str | None
    miopen: str | None
    cuda: str | None
    cudnn: str | None
    """As torch numbers it: 91002 is 9.10.2."""
    system: str
    """"Linux", "Windows", "Darwin"."""
    kernel: str | None
    """Release of the system."""
    driver: str | None
    """Version of the GPU driver where it has one of its own."""
    comfy_kitchen: str | None
    comfyui: str | None
    """Version of the ComfyUI that this process could import; it is not imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagFacts:
    """Torch's global flags as they are now in this process."""

    cudnn_enabled: bool | None
    """On ROCm this is MIOpen."""
    cudnn_benchmark: bool | None
    cudnn_deterministic: bool | None
    float32_convolution: str | None
    """How float32 convolutions multiply: "ieee", "tf32", or "none" where nobody has said."""
    float32_matmul: str | None
    """How float32 matrix products multiply, in the same words."""
    sdpa_flash: bool | None
    sdpa_mem_efficient: bool | None
    sdpa_math: bool | None
    sdpa_cudnn: bool | None
    fp16_accumulation: bool | None
    fp16_reduced_sums: bool | None
    bf16_reduced_sums: bool | None
    blas: str | None
    threads: int | None
    """Threads inside one operation."""
    interop_threads: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KitchenFunction:
    """One function that decodes can use; `present` is None where the package was not imported."""

    name: str
    present: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KitchenBackend:
    """One backend of comfy-kitchen by its own word."""

    name: str
    available: bool
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KitchenFacts:
    """The optional package comfy-kitchen."""

    installed: bool
    importable: bool | None
    """None where it was not tried."""
    reason: str | None
    """Why it cannot be imported, or was not."""
    functions: tuple[KitchenFunction, ...]
    backends: tuple[KitchenBackend, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """One folder that keeps something between processes."""

    purpose: str
    path: str | None
    """None where there is no place for it, and in a redacted report."""
    exists: bool | None
    bytes: int | None
    """Size of all files in it; None where it is missing or not all of it can be read."""
    files: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """Memory kept between decodes."""

    held_bytes: int | None
    """Held by this process now; None in a process that does not decode."""
    keep_bytes: int
    """Most that stays after a decode, unless the settings say otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformFacts:
    """The machine around the device."""

    wsl: bool
    """Windows Subsystem for Linux."""
    cpu: str | None
    cpu_count: int | None
    """Logical processors."""
    kfd: DriverAccess | None
    """Whether this user may open ROCm's device node, /dev/kfd; None away from Linux."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was read at one time in one process."""

    device: DeviceFacts
    memory: MemoryFacts
    versions: VersionFacts
    flags: FlagFacts
    platform: PlatformFacts
    kitchen: KitchenFacts
    folders: tuple[FolderFacts, ...]
    history_lines: int | None
    """Records in the history."""
    pool: PoolFacts
    tuned_entries: int | None = None
    """Decoders whose choices were tuned, for any device and versions."""
