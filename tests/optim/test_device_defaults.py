"""What each machine does by itself with full-size decoders at 1024x1024, and why. Plans only: no weights exist."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from halo_vae.optim import decoder as decoder_module
from halo_vae.optim.decoder import open_decoder
from halo_vae.optim.device import profile_from
from halo_vae.optim.device_defaults import APU_BATCH, TABLE, UNKNOWN_HIP, Reasons, defaults_for
from halo_vae.optim.errors import PlanError
from halo_vae.optim.settings import DecodeSettings
from halo_vae.tests.optim.profiles import (
    CUDA,
    DECODERS,
    GFX942,
    GFX1030,
    GFX1100,
    GIB,
    LATENTS,
    MACHINES,
    flux,
    plan_on,
    profile_of,
    reasons_of,
    sd,
    wan,
)

APUS = ("gfx1151", "gfx1151-gtt", "gfx1151-windows")
HIP = (*APUS, "gfx1100", "gfx1030", "gfx942")

# machine: family, APU, plan, layout, dtypes first choice first, batch cap, attention
EXPECTED = {
    "gfx1151": ("rdna3.5", True, "tiles", "contiguous", ("float16", "bfloat16"), 8, "matmul"),
    "gfx1151-gtt": ("rdna3.5", True, "tiles", "contiguous", ("float16", "bfloat16"), 8, "matmul"),
    "gfx1151-windows": ("rdna3.5", True, "tiles", "contiguous", ("float16", "bfloat16"), 8, "matmul"),
    "gfx1100": ("rdna3", False, "tiles", "contiguous", ("float16", "bfloat16"), 16, "matmul"),
    "gfx1030": ("rdna2", False, "tiles", "contiguous", ("float16",), 16, "matmul"),
    "gfx942": ("cdna", False, "tiles", "contiguous", ("float16", "bfloat16"), 16, "matmul"),
    "cuda": ("cuda", False, "tiles", "channels_last", ("float16", "bfloat16"), 16, "sdpa"),
    "cpu": ("cpu", True, "strips", "channels_last", ("bfloat16", "float32"), 16, "sdpa"),
}


@pytest.mark.parametrize("machine", list(MACHINES))
def test_defaults_of_each_machine(machine: str) -> None:
    found = profile_of(machine)
    made = (
        found.family, found.unified_memory, found.strategy, found.layout, found.native_dtypes, found.batch_cap,
        found.attention,
    )  # fmt: skip
    assert made == EXPECTED[machine]
    assert found.versions == MACHINES[machine].versions
    assert found.compute_units == MACHINES[machine].compute_units
    assert found.gfx == (machine.partition("-")[0] if found.kind == "hip" else None)


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize("name", list(DECODERS))
def test_plans_follow_the_table_and_say_why(name: str, machine: str) -> None:
    device = profile_of(machine)
    plan = plan_on(device, DECODERS[name](torch.bfloat16), LATENTS[name])
    told = reasons_of(plan.summary)
    assert plan.summary.strategy == device.strategy
    assert plan.layout == device.layout
    assert plan.attention == device.attention
    assert told["plan"] == (device.strategy, f"default: {device.reasons.strategy}")
    assert told["layout"] == (device.layout, f"default: {device.reasons.layout}")
    assert told["attention"] == (device.attention, f"default: {device.reasons.attention}")
    assert told["tile_bytes"][1] == f"default: {device.reasons.tile_bytes}"
    assert device.reasons.convolution in told["convolutions"][1] or "no algorithm of ours" in told["convolutions"][1]
    assert told["precision"][1].startswith("default: ")
    assert device.reasons.precision in told["precision"][1]
    assert told["memory"][1] == device.budget_reason
    assert device.fits(plan.predicted)
    edge = 256 if device.strategy == "tiles" else 1024
    assert plan.summary.tile_px[1] <= edge


# dtype of (convolutions, maps between them) at 1024x1024 for a decoder loaded in float32
WIDE = {
    "sd": {"gfx1030": ("float32", "float32"), "other": ("bfloat16", "bfloat16")},
    "flux": {"gfx1030": ("float32", "float32"), "other": ("bfloat16", "bfloat16")},
    "wan": {"cpu": ("bfloat16", "bfloat16"), "other": ("float16", "float16")},
}


@pytest.mark.parametrize("machine", list(MACHINES))
@pytest.mark.parametrize("name", list(DECODERS))
def test_a_large_picture_takes_the_narrowest_dtype_of_decoder_and_device(name: str, machine: str) -> None:
    device, expected = profile_of(machine), WIDE[name]
    plan = plan_on(device, DECODERS[name](torch.float32), LATENTS[name])
    assert (plan.dtypes.compute, plan.dtypes.stream) == expected.get(machine, expected["other"])
    # never wider than it was loaded
    narrow = plan_on(device, DECODERS[name](torch.bfloat16), LATENTS[name])
    assert (narrow.dtypes.compute, narrow.dtypes.stream) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("machine", HIP)
def test_a_medium_picture_multiplies_in_float16_over_wide_maps(machine: str) -> None:
    plan = plan_on(profile_of(machine), sd(torch.float32), (1, 4, 96, 96))
    assert (plan.dtypes.compute, plan.dtypes.stream) == ("float16", "float32")
    assert "default: a picture between 512 and 1024 px" in reasons_of(plan.summary)["precision"][1]


@pytest.mark.parametrize("machine", list(MACHINES))
def test_a_batch_is_capped_at_eight_on_an_apu(machine: str) -> None:
    device = profile_of(machine)
    plan = plan_on(device, sd(torch.bfloat16), (32, 4, 8, 8))
    assert plan.summary.images_per_pass == device.batch_cap == (APU_BATCH if machine in APUS else 16)
    value, reason = reasons_of(plan.summary)["images_per_pass"]
    assert value == str(device.batch_cap)
    assert ("an APU shares its memory" in reason) == (machine in APUS)
    # at 1024x1024 a picture fills every chip but the largest
    large = plan_on(device, sd(torch.bfloat16), LATENTS["sd"]).summary.images_per_pass
    assert large == (4 if machine == "gfx942" else 1)


@pytest.mark.parametrize("machine", list(MACHINES))
def test_backends_by_default(machine: str) -> None:
    device = profile_of(machine)
    pictures = plan_on(device, flux(torch.float32), LATENTS["flux"], DecodeSettings(precision_mode="fp32"))
    counts = reasons_of(pictures.summary)["convolutions"][0]
    assert ("winograd" in counts) == (machine == "cpu")
    clips = plan_on(device, wan(torch.float32), LATENTS["wan"], DecodeSettings(precision_mode="bf16"))
    value, reason = reasons_of(clips.summary)["convolutions"]
    assert "conv2d_sum" in value
    assert "3-D kernels run as conv2d_sum" in reason
    assert device.reasons.convolution3d in reason


@pytest.mark.parametrize("name", list(DECODERS))
def test_where_convolutions_unfold_their_input_the_peak_says_so(name: str) -> None:
    device = profile_of("gfx1151")
    assert device.unfolds
    assert not profile_of("cuda").unfolds
    decoder, shape = DECODERS[name](torch.bfloat16), LATENTS[name]
    plain = plan_on(replace(device, unfolds=False), decoder, shape).predicted
    told = plan_on(device, decoder, shape).predicted
    assert told.pool == plain.pool
    # nine taps of the widest tile, in at most the size that the table promises
    assert 3 * device.tile_bytes < told.scratch - plain.scratch <= 9 * device.tile_bytes


@pytest.mark.parametrize(
    ("machine", "loaded"),
    [
        ("gfx1151", {"sd": "bfloat16", "flux": "bfloat16", "wan": "bfloat16"}),
        ("gfx1030", {"sd": "float32", "flux": "float32", "wan": "float16"}),  # bfloat16 is emulated there
        ("cuda", {"sd": "bfloat16", "flux": "bfloat16", "wan": "bfloat16"}),
    ],
)
def test_a_decoder_is_loaded_in_a_dtype_that_the_device_has(
    machine: str, loaded: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "describe_device", lambda device: profile_of(machine))
    for name, make in DECODERS.items():
        opened = open_decoder(make(torch.float32).weights, device="cuda:0")
        assert str(opened.loaded_dtype) == f"torch.{loaded[name]}"
        assert open_decoder(opened.weights, device="cpu").loaded_dtype == torch.float32


def test_a_small_budget_cuts_tiles_and_names_the_limit() -> None:
    tight = replace(profile_of("gfx1151-gtt"), budget_bytes=1200 << 20)
    roomy = plan_on(profile_of("gfx1151-gtt"), flux(torch.bfloat16), LATENTS["flux"])
    cut = plan_on(replace(tight, budget_bytes=roomy.predicted.total - 1), flux(torch.bfloat16), LATENTS["flux"])
    assert cut.summary.n_tiles > roomy.summary.n_tiles
    assert cut.predicted.scratch < roomy.predicted.scratch
    with pytest.raises(PlanError, match="the system's available memory less 2 GiB"):
        plan_on(replace(tight, budget_bytes=GIB // 4), flux(torch.bfloat16), LATENTS["flux"])


@pytest.mark.parametrize("row", [*TABLE.values(), UNKNOWN_HIP], ids=[*TABLE, "unknown hip"])
def test_every_row_is_whole(row: object) -> None:
    reasons = row.reasons  # type: ignore[attr-defined]
    assert row.batch_cap <= 16  # type: ignore[attr-defined]
    assert [f.name for f in fields(Reasons) if getattr(reasons, f.name) == f.default] == []


def test_a_chip_that_nobody_knows_is_treated_as_hip() -> None:
    found = profile_from(replace(GFX1100, arch="gfx1250", driver_gfx=None))
    assert (found.gfx, found.family, found.layout, found.attention) == ("gfx1250", "other", "contiguous", "matmul")
    assert found.native_dtypes == ("float16",)
    nameless = profile_from(replace(GFX1100, arch=None, driver_gfx=None))
    assert (nameless.gfx, nameless.kind, nameless.attention) == (None, "hip", "matmul")


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((6, 1), ("float32",)),
        ((7, 5), ("float16",)),
        ((8, 0), ("float16", "bfloat16")),
        (None, ("float16", "bfloat16")),
    ],
)
def test_older_cuda_devices(capability: tuple[int, int] | None, dtypes: tuple[str, ...]) -> None:
    found = profile_from(replace(CUDA, capability=capability))
    assert found.native_dtypes == dtypes
    if capability is not None and capability < (8, 0):
        assert f"sm_{capability[0]}{capability[1]}" in found.reasons.precision


def test_an_apu_is_one_by_torchs_word_or_by_its_name() -> None:
    assert profile_from(replace(GFX942, integrated=True)).unified_memory  # as an MI300A is
    assert profile_from(replace(GFX942, integrated=True)).batch_cap == APU_BATCH
    assert profile_from(replace(GFX1030, arch="gfx1035", integrated=False)).unified_memory
    assert not profile_from(replace(GFX1030, integrated=None)).unified_memory
    assert defaults_for("cpu", hip=False, apu=True).batch_cap == 16
