"""The comparison of clip decodes, with a plain narrow decoder in the place of the host's module."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halo_vae.benchmarks import video_hosts, video_in_comfyui
from halo_vae.benchmarks.plain_wan import random_wan_weights
from halo_vae.benchmarks.video_hosts import FAMILIES, HaloSide, HostFamily, HostSide, as_frames, fill_by_fan_in
from halo_vae.benchmarks.video_report import VideoCase
from halo_vae.optim import device
from halo_vae.optim.device import describe_device
from halo_vae.optim.families import lower
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.optim.families.clip_checks import decode_clips

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
FRAMES = 21
"""Six latent frames: more than one chunk."""


class PlainHost:
    """A Wan 2.1 decoder by the plain interpreter, with the manners of the host's module."""

    def __init__(self, extra_frames: int = 0) -> None:
        self.weights = random_wan_weights(dim=8)
        self.calls = 0
        self._extra = extra_frames

    def to(self, dtype: torch.dtype) -> PlainHost:
        self.weights = {name: tensor.to(dtype) for name, tensor in self.weights.items()}
        return self

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def decode(self, z: Tensor) -> Tensor:
        self.calls += 1
        weights = {name: tensor.float() for name, tensor in self.weights.items()}
        clip = decode_clips(lower(MappingWeights(weights).specs), weights, z.float()).to(z.dtype)
        return torch.cat([clip, clip[:, :, : self._extra]], 2)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> PlainHost:
    module = PlainHost()
    monkeypatch.setattr(video_hosts, "make_module", lambda family: module)
    monkeypatch.setattr(video_in_comfyui, "start", lambda checkout: None)
    monkeypatch.setattr(video_in_comfyui, "host_versions", lambda: "Host 1")
    return module


def a_case(**given: Any) -> VideoCase:
    case = VideoCase(
        family="wan21", size_px=16, frames=FRAMES, precision="fp32", threads=(1,), runs=2, processes=0, versions=""
    )
    return replace(case, **given)


def command(*more: str) -> list[str]:
    return ["checkout", "--size", "16", "--frames", str(FRAMES), "--threads", "1", "--runs", "1", *more]


# -- the comparison


def test_report_compares_both_sides(host: PlainHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, threads = tmp_path / "result.json", torch.get_num_threads()
    assert video_in_comfyui.main(command("--processes", "0", "--json", str(out))) == 0
    assert torch.get_num_threads() == threads
    text = capsys.readouterr().out
    assert "# wan21, 16x16 pixels, 21 frames, fp32, Host 1" in text
    assert "| frames | 21 | 21 | equal |" in text
    assert "only 1 run(s)" in text  # doubt is part of the result
    assert "the host carries the same frames" in text
    result = json.loads(out.read_text("utf-8"))
    assert result["schema_version"] == video_in_comfyui.SCHEMA_VERSION
    assert 0 < result["decoded"]["max_error"] < 1e-4
    assert result["decoded"]["carried_bytes"] > 0
    assert [(t["engine"], len(t["samples_ns"])) for t in result["times"]] == [("host", 1), ("ours", 1)]
    assert result["bars"] == []


def test_every_decode_of_the_host_is_compared_or_timed(host: PlainHost) -> None:
    decoded, times, _ = video_in_comfyui.compare(a_case())
    assert host.calls == 3  # one for the error, two timed
    assert {(t.engine, t.threads): len(t.samples_ns) for t in times} == {("host", 1): 2, ("ours", 1): 2}
    assert decoded.max_error_fp32 == (0.0, decoded.max_error)


def test_one_chunk_carries_nothing(host: PlainHost) -> None:
    assert video_in_comfyui.compare(a_case(frames=5, runs=1))[0].carried_bytes is None


def test_other_frame_counts_are_found(host: PlainHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_hosts, "make_module", lambda family: PlainHost(extra_frames=1))
    decoded, _, _ = video_in_comfyui.compare(a_case(frames=5, runs=1))
    assert (decoded.host_frames, decoded.our_frames) == (6, 5)
    assert decoded.max_error is None


def test_bf16_sides_compute_in_bf16(host: PlainHost) -> None:
    latent = FAMILIES["wan21"].latent(16, 5)
    exact = as_frames(HostSide(host, "fp32").decode(latent))
    narrow, ours = HostSide(host, "bf16"), HaloSide(host.to(torch.bfloat16), "bf16", {})
    clip = ours.decode(latent)
    assert clip.dtype == narrow.decode(latent).dtype == torch.bfloat16
    assert 1e-4 < (clip.float() - exact).abs().max() < 0.2
    assert ours.predict(tuple(latent.shape))[0].output == clip.numel() * 2


@linux
@pytest.mark.parametrize("side", video_in_comfyui.SIDES)
def test_peak_holds_at_least_the_clip(host: PlainHost, side: str) -> None:
    threads = torch.get_num_threads()
    try:
        peak = video_in_comfyui.measure_peak_here(a_case(size_px=128, frames=9), side)
    finally:
        torch.set_num_threads(threads)
    assert peak >= 9 * 128 * 128 * 3 * 4
    assert host.calls == (2 if side == "host" else 0)  # the warm-up and the one that is measured


# -- fresh processes


def test_peaks_come_from_fresh_processes(host: PlainHost, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        started.append((command, env))
        return SimpleNamespace(returncode=0, stdout=f"noise\n{len(started) * 100}\n", stderr="")

    monkeypatch.setattr(video_in_comfyui.subprocess, "run", run)
    args = video_in_comfyui.parse_arguments(command("--processes", "2"))
    assert video_in_comfyui.measure_peaks(args, a_case(processes=2), "ours", 96, 33) == (100, 200)
    asked = video_in_comfyui.parse_arguments(started[0][0][2:])
    assert (asked.child, asked.size, asked.frames, asked.family) == ("ours", 96, 33, "wan21")
    assert all(env[video_in_comfyui.WAIT_POLICY] == "passive" for _, env in started)


def test_failed_process_is_told_and_the_times_are_kept(
    host: PlainHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nMemoryError: no room")
    monkeypatch.setattr(video_in_comfyui.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(sys, "platform", "linux")
    assert video_in_comfyui.main(command("--processes", "1")) == 1
    text = capsys.readouterr().out
    assert "- doubt: measuring the memory of host failed: MemoryError: no room" in text
    assert "- ours at 1 thread(s): " in text
    assert "| peak memory | n/a | n/a | n/a |" in text


def test_child_prints_its_peak(
    host: PlainHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(video_in_comfyui, "measure_peak_here", lambda case, side: 123 if side == "ours" else 0)
    assert video_in_comfyui.main(command("--child", "ours")) == 0
    assert capsys.readouterr().out == "123\n"


# -- growth with the clip


def test_growth_takes_the_output_off(host: PlainHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks(args: Any, case: Any, side: str, size: int, frames: int) -> tuple[int, ...]:
        assert (side, size) == ("ours", 16)
        return (frames * 16 * 16 * 3 * 4 + 1000 + frames,)

    monkeypatch.setattr(video_in_comfyui, "measure_peaks", peaks)
    args = video_in_comfyui.parse_arguments(["checkout", "--size", "32", "--flat", "--flat-size", "16"])
    large, small = video_in_comfyui.run_flat(args, a_case(size_px=32, processes=1))
    assert (large.size_px, small.size_px, large.measured_bytes) == (32, 16, None)
    assert small.measured_bytes == ((1033,), (1129,))
    assert small.predicted_bytes[0] < large.predicted_bytes[0]
    for flat in (large, small):
        assert abs(flat.predicted_change) < 0.5  # the output grows fourfold and is not in it


def test_growth_is_a_report_of_its_own(host: PlainHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "flat.json"
    assert video_in_comfyui.main(command("--flat", "--flat-size", "16", "--processes", "0", "--json", str(out))) == 0
    text = capsys.readouterr().out
    assert "| 16x16 | predicted |" in text
    assert "measured at" not in text
    assert len(json.loads(out.read_text("utf-8"))["flat"]) == 1
    assert host.calls == 0


# -- what is refused


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--size", "20"), "multiple of 8 from 16 on"),
        (("--size", "8"), "multiple of 8 from 16 on"),
        (("--frames", "18"), "1 more than a multiple of 4"),
        (("--frames", "0"), "1 more than a multiple of 4"),
        (("--family", "ltx", "--size", "64", "--frames", "5"), "1 more than a multiple of 8"),
        (("--family", "wan22", "--size", "40", "--frames", "5"), "multiple of 16 from 32 on"),
        (("--flat", "--flat-size", "90"), "no latent decodes to 90 pixels"),
        (("--threads", "two"), "whole numbers"),
        (("--threads", "0"), "at least 1"),
        (("--runs", "0"), "at least 1"),
        (("--processes", "-1"), "at least 0"),
    ],
)
def test_senseless_requests_are_refused(
    host: PlainHost, more: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert video_in_comfyui.main([*command("--processes", "0"), *more]) == 2
    assert word in capsys.readouterr().err
    assert host.calls == 0


def test_memory_off_linux_is_refused(
    host: PlainHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert video_in_comfyui.main(command("--processes", "1")) == 2
    assert "Linux" in capsys.readouterr().err


def test_bf16_is_refused_where_it_is_emulated(
    host: PlainHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulated = replace(describe_device("cpu"), native_dtypes=("float32",))
    monkeypatch.setattr(device, "describe_device", lambda *_: emulated)
    assert video_in_comfyui.main(command("--precision", "bf16", "--processes", "0")) == 2
    assert "bfloat16" in capsys.readouterr().err


def test_an_existing_file_is_kept(host: PlainHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    out.write_text("mine")
    assert video_in_comfyui.main(command("--processes", "0", "--json", str(out))) == 2
    assert out.read_text() == "mine"
    assert str(out) in capsys.readouterr().err


def test_host_without_the_family_is_told(
    host: PlainHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(family: HostFamily) -> Any:
        raise ModuleNotFoundError("No module named 'comfy.ldm.wan.vae2_2'")

    monkeypatch.setattr(video_hosts, "make_module", missing)
    assert video_in_comfyui.main(command("--processes", "0")) == 2
    assert "comfy.ldm.wan.vae2_2" in capsys.readouterr().err


# -- weights


class TinyHost(nn.Module):
    """Parts and names as hosts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv3d(3, 4, 3)
        self.quant_conv = nn.Conv3d(4, 4, 1)
        self.decoder = nn.Module()
        self.decoder.conv1 = nn.Conv3d(64, 64, 3)
        self.decoder.block = nn.Module()
        self.decoder.block.conv2 = nn.Conv3d(64, 64, 3)
        self.decoder.norm = nn.GroupNorm(8, 64)
        self.decoder.gamma = nn.Parameter(torch.zeros(64, 1, 1, 1))
        self.register_buffer("std-of-means", torch.full((64,), torch.nan))
        self.register_buffer("mean-of-means", torch.full((64,), torch.nan))


def drawn(seed: int = 0) -> dict[str, Tensor]:
    module = TinyHost()
    fill_by_fan_in(module, seed)
    return module.state_dict()


def test_weights_are_seeded_and_scaled_by_fan_in() -> None:
    weights = drawn()
    assert all(torch.equal(tensor, drawn()[name]) for name, tensor in weights.items())
    assert not torch.equal(weights["decoder.conv1.weight"], drawn(1)["decoder.conv1.weight"])
    fan_in = 64 * 27
    assert weights["decoder.conv1.weight"].std() == pytest.approx(fan_in**-0.5, rel=0.05)
    assert weights["decoder.block.conv2.weight"].std() == pytest.approx(0.5 * fan_in**-0.5, rel=0.05)
    around = {
        "decoder.norm.weight": 1,
        "decoder.gamma": 1,
        "std-of-means": 1,
        "decoder.norm.bias": 0,
        "mean-of-means": 0,
    }
    for name, middle in around.items():
        assert 0 < (weights[name] - middle).abs().max() < 0.25


def test_module_is_built_without_what_only_encodes() -> None:
    module = video_hosts.make_module(HostFamily(build=TinyHost, latent_channels=64, rate=4, scale=8))
    assert not {name for name in module.state_dict() if name.startswith(("encoder", "quant_conv"))}
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    given = {name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()}
    loaded = HostFamily(build=TinyHost, latent_channels=64, rate=4, scale=8, weights=lambda: given)
    assert all(bool((t == 1).all()) for t in video_hosts.make_module(loaded).state_dict().values())


@pytest.mark.parametrize("name", video_in_comfyui.FAMILIES)
def test_latents_are_those_of_the_family(name: str) -> None:
    family = FAMILIES[name]
    frames, edge = 1 + 2 * family.rate, 3 * family.scale
    latent = family.latent(edge, frames)
    assert tuple(latent.shape) == family.latent_shape(edge, frames) == (1, family.latent_channels, 3, 3, 3)
    assert torch.equal(latent, family.latent(edge, frames))


def test_every_family_has_a_host() -> None:
    assert tuple(FAMILIES) == video_in_comfyui.FAMILIES
