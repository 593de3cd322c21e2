"""The nodes' functions on real VAE objects, inside each ComfyUI's own Python, in float32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from halo_vae.tests.comfyui.inside_runner import run_inside
from halo_vae.tests.comfyui.installs import Install

SAME = 1e-4
ANY_WIDTH = (0, 4)
"""First version here whose VAE object takes decoders of any width from a file."""


def assert_right(facts: dict[str, Any], method: str = "exact", error: float = SAME) -> None:
    assert facts["error"] <= error
    assert facts["spread"] > 0.05  # not a picture of one colour
    assert facts["method"] == method
    assert facts["dtype"] == facts["stock_dtype"]
    assert facts["same_weights"]
    assert not facts["inference"]


@pytest.fixture(scope="session")
def states(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_inside(install, tmp_path_factory.mktemp("states"), "states.py")


@pytest.mark.parametrize("state", ["plain", "patched", "wrapped", "eighths that cast", "eighths"])
def test_weights_in_every_state(states: Any, state: str) -> None:
    assert_right(states[state])
    assert states[state]["same_manners"]


@pytest.mark.parametrize("state", ["offloaded", "offloaded patched", "offloaded wrapped"])
def test_offloaded_weights(states: Any, state: str) -> None:
    assert_right(states[state])
    assert states[state]["same_manners"]
    assert states["layers"]["casting"] > 10
    assert states["layers"]["patching"] == 1


@pytest.mark.parametrize("state", ["in part", "in part patched"])
def test_weights_offloaded_in_part(states: Any, state: str) -> None:
    assert_right(states[state])
    assert 0 < states["layers in part"]["casting"] < states["layers"]["casting"]


@pytest.mark.parametrize("state", ["blended", "eighths blended", "offloaded blended"])
def test_blended_over_the_hosts_own_call(states: Any, state: str) -> None:
    assert_right(states[state], "blended")


def test_the_states_differ(states: Any) -> None:
    assert states["patches matter"] > 0.01
    assert states["wrapping matters"] > 0.01


@pytest.mark.parametrize(
    ("flags", "loaded", "made"),
    [
        (("--fp16-vae",), "float16", "float32"),
        (("--bf16-vae",), "bfloat16", "float32"),
        (("--fp16-intermediates",), "float32", "float16"),
        (("--bf16-vae", "--fp16-intermediates"), "bfloat16", "float16"),
        (("--gpu-only",), "float32", "float32"),
    ],
    ids=lambda given: "".join(given) if isinstance(given, tuple) else given,
)
def test_dtypes_by_flag(install: Install, tmp_path: Any, flags: tuple[str, ...], loaded: str, made: str) -> None:
    if "--fp16-intermediates" in flags and install.version < ANY_WIDTH:
        pytest.skip("this ComfyUI has no --fp16-intermediates")
    facts = run_inside(install, tmp_path, "flags.py", *flags)
    # as far from the float32 picture as the host's own decode is, give or take the order of rounding
    assert_right(facts, error=1.5 * facts["stock_error"] + 1e-3)
    assert facts["computed_in"] == [loaded]
    assert facts["dtype"] == f"torch.{made}"
    assert facts["output_device"] == ("cpu:0" if "--gpu-only" in flags else "cpu")


def test_every_kind_of_decoder(install: Install, tmp_path: Any) -> None:
    if install.version < ANY_WIDTH:
        pytest.skip("this ComfyUI loads decoders of the published width only")
    facts = run_inside(install, tmp_path, "families.py")
    for name in ("sd", "flux", "flux2", "x4", "taesd"):
        assert_right(facts[name])
    assert [facts[n]["family"] for n in ("sd", "flux", "flux2", "x4", "taesd")] == ["kl"] * 4 + ["taesd"]
    for name in ("pixels", "pixels tiled"):  # VK-2
        assert_right(facts[name], "blended", error=1e-6)
        assert facts[name]["shape"] == [1, 37, 53, 3]


VIDEOS = {
    "wan21": ("wan21", 9), "wan21 with alpha": ("wan21", 5), "wan22": ("wan22", 9), "hunyuan": ("hunyuan_video", 9),
    "hunyuan15": ("hunyuan15", 9), "refiner": ("hunyuan_refiner", 12), "mochi": ("mochi", 13), "cosmos": ("cosmos", 17),
    "cogvideox": ("cogvideox", 9), "ltx": ("ltx", 17), "ltx causal": ("ltx", 17), "ltx conditioned": ("ltx", 17),
    "ltx with noise": ("ltx", 17), "ltx split": ("ltx", 17), "taehv": ("taehv", 9), "taehv unscaled": ("taehv", 9),
    "taehv ltx2": ("taehv", 9), "svd": ("svd", 3),
}  # fmt: skip
"""By kind of video VAE, the family it is recognised as and the frames of its first clip."""
NEWER_VIDEOS = {
    "wan21 with alpha": "has no VAE with alpha", "hunyuan15": "takes such weights for the refiner of pictures",
    "cogvideox": "has no such VAE", **dict.fromkeys(("taehv", "taehv unscaled", "taehv ltx2"), "has no such VAE"),
    **{kind: "builds LTX-Video's decoders at one width" for kind in VIDEOS if kind.startswith("ltx")},
}  # fmt: skip
"""What versions before 0.4 cannot do."""


@pytest.fixture(scope="session")
def videos(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kinds = [kind for kind in VIDEOS if install.version >= ANY_WIDTH or kind not in NEWER_VIDEOS]
    return run_inside(install, tmp_path_factory.mktemp("videos"), "videos.py", *kinds)


@pytest.mark.parametrize("kind", VIDEOS)
def test_clips_of_the_hosts_own_vaes(install: Install, videos: Any, kind: str) -> None:
    if install.version < ANY_WIDTH and kind in NEWER_VIDEOS:
        pytest.skip(f"this ComfyUI {NEWER_VIDEOS[kind]}")
    facts, (family, n_frames) = videos[kind], VIDEOS[kind]
    assert "failed" not in facts, facts["failed"]
    known = kind != "hunyuan" or install.version >= ANY_WIDTH  # older ones take its norms over the whole clip
    assert facts["family"] == (family if known else None), facts["reason"]
    assert facts["same"]
    assert next(iter(facts["cases"].values()))["shape"][0] == n_frames
    assert len(facts["cases"]) >= 4
    for case, made in facts["cases"].items():
        assert made["method"] == ("exact" if known else "blended"), case
        assert made["shape"] == made["stock shape"], case
        assert made["spread"] > 0.05, case
        if known or made["n_chunks"] == 1:
            assert made["error"] <= SAME, case
        assert not made["inference"], case
    small = [made for case, made in facts["cases"].items() if case.endswith("small")]
    assert [made["n_chunks"] > 1 for made in small] == [True]


@pytest.fixture(scope="session")
def odd(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_inside(install, tmp_path_factory.mktemp("odd"), "odd.py")


@pytest.mark.parametrize("which", ["empty", "missing"])
def test_vk_8_no_vae_in_it(odd: Any, which: str) -> None:
    assert "ValueError" in odd[which]
    assert "AttributeError" not in odd[which]
    assert "no valid VAE in this checkpoint" in odd[which][-1]


def test_ls_7_wrong_vae(odd: Any) -> None:
    assert "16 channels" in odd["wrong channels"][-1]
    assert "decodes 4" in odd["wrong channels"][-1]


def test_ls_3_extras(odd: Any) -> None:
    assert odd["extras"] == ["samples", "noise_mask", "batch_index"]
    assert "no 'samples'" in odd["no samples"][-1]


def test_ls_1_nested_latent(odd: Any) -> None:
    assert odd["nested"] <= SAME


def test_ls_6_picture_into_a_video_vae(odd: Any) -> None:
    assert_right(odd["picture"])
    assert odd["picture"]["shape"] == [1, 32, 32, 3]


def test_clip_into_a_video_vae(odd: Any) -> None:
    assert_right(odd["clip"])
    assert odd["clip"]["shape"] == [9, 32, 32, 3]


def test_unknown_decoders_are_blended_and_say_so(odd: Any) -> None:
    assert_right(odd["strange clip"], "blended")
    (reason,) = odd["strange clip"]["fallbacks"]
    assert "nobody" in reason
    assert "set method to blended" in odd["exact unknown"][-1]
    assert "auto chooses  blended" in odd["monitor"]


def test_changed_layers_are_not_bypassed(odd: Any) -> None:
    assert_right(odd["circular"], "blended")
    assert "pads its borders by circular" in odd["circular"]["fallbacks"][0]


def test_interrupt_is_consumed_once(odd: Any) -> None:
    assert odd["interrupted"] == ["InterruptProcessingException", False]
    assert odd["after interrupt"] == 0.0


@pytest.fixture(scope="session")
def memory(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_inside(install, tmp_path_factory.mktemp("memory"), "memory.py")


def test_another_model_stays_loaded(memory: Any) -> None:
    assert not memory["stock"]["stays"]  # its estimate would not have fitted
    assert memory["halo"]["stays"]
    assert memory["halo"]["asked"] < memory["stock"]["asked"] / 5


def test_the_pool_counts_and_goes_when_room_is_needed(memory: Any) -> None:
    assert memory["counted"] == [1, True]
    assert memory["held"] > 0
    assert memory["held after a small model"] == memory["held"]
    assert memory["held after a large model"] == 0
    assert memory["held again"] > 0
    assert memory["held after unloading all"] == 0


def test_om_1_other_models_go_when_an_allocation_fails(memory: Any) -> None:
    assert memory["out of memory"] == {
        "stays": False, "vae": True, "rungs": ["kept memory given back"], "status": "ok",
    }  # fmt: skip


@pytest.fixture(scope="session")
def loading(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_inside(install, tmp_path_factory.mktemp("loading"), "loading.py")


def test_ui_7_all_nodes_without_optional_packages(loading: Any) -> None:
    assert loading["nodes"] == [
        "HaloVAEDecode", "HaloVAEDecodeTiled", "HaloVAEDecodeVideo", "HaloVAEStats", "HaloVAEMonitor",
        "HaloVAETune", "HaloVAEBenchmark",
    ]  # fmt: skip
    assert loading["same schema twice"]
    (line,) = loading["said"]
    assert line.startswith("INFO Halo VAE ")


def test_addresses_are_registered_once(loading: Any) -> None:
    first, second = loading["routes"]
    assert first == second == [
        "GET /halo_vae/doctor", "GET /halo_vae/export", "GET /halo_vae/history", "GET /halo_vae/metrics",
        "GET /halo_vae/panels/{name}", "GET /halo_vae/records/{name}", "POST /halo_vae/clear",
    ]  # fmt: skip
    (line,) = loading["twice said"]
    assert line.startswith("WARNING Halo VAE is loaded twice")
    assert loading["threads"] == 0


def test_comfyui_that_is_too_old_is_told(loading: Any) -> None:
    assert loading["too old"] in ("ImportError", "ModuleNotFoundError")
    (line,) = loading["too old said"]
    assert line.startswith("ERROR")
    assert "needs ComfyUI 0.3.64 or newer" in line
    assert line.endswith("traceback")


def test_ui_1_nodes_called_from_python(loading: Any) -> None:
    assert loading["called"] == [[[1, 32, 32, 3], "DecodeRecord", ["text", "halo_vae"]]] * 4
    assert loading["frames"] == 1
