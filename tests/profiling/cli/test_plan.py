"""`halo-vae plan`: what it promises is what a decode then does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.store import HistoryStore

Run = Callable[..., Any]
MakeLatent = Callable[..., Path]


def plan_json(halo: Run, vae: Path, *argv: object) -> dict[str, Any]:
    ended = halo("plan", "--vae", vae, "--json", "--device", "cpu", *argv)
    assert ended.code == 0, ended.err
    assert ended.out.count("\n") == 1
    line: dict[str, Any] = json.loads(ended.out)
    return line


def test_plan_of_a_size_is_that_of_its_latent(halo: Run, vae: Path, latent_file: MakeLatent) -> None:
    latent = latent_file("two.latent", (2, 4, 5, 7))
    by_size = plan_json(halo, vae, "--size", "56x40", "--batch", 2)
    by_latent = plan_json(halo, vae, latent)
    for plan in (by_size, by_latent):  # free memory is that of the moment
        plan["plan"]["choices"] = [choice for choice in plan["plan"]["choices"] if choice["name"] != "memory"]
    assert by_size == by_latent
    assert by_size["latent_shape"] == [2, 4, 5, 7]
    assert by_size["image_shape"] == [2, 40, 56, 3]


@pytest.mark.parametrize("flags", [(), ("--plan", "tiles", "--tile-size", "32"), ("--precision", "bf16")])
def test_decode_does_what_was_planned(
    flags: tuple[str, ...], halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    latent = latent_file("wide.latent", (1, 4, 9, 14))
    planned = plan_json(halo, vae, latent, *flags)
    ended = halo(
        "decode", latent, "--vae", vae, "-o", tmp_path / "out", "--format", "npy", "--json", "--device", "cpu", *flags
    )
    record = DecodeRecord.from_json(json.loads(ended.out))
    assert record.plan is not None
    assert record.convs is not None
    assert record.tiles is not None
    assert record.plan.macs == planned["plan"]["macs"] == sum(op["macs"] for op in planned["ops"])
    assert record.tiles.count == planned["plan"]["n_tiles"] == sum(op["n_tiles"] for op in planned["ops"])
    asked = {(s.input, s.weight, s.dtype) for s in record.convs.shapes}
    promised = {(tuple(s["input"]), tuple(s["weight"]), s["dtype"]) for s in planned["conv_shapes"]}
    assert asked == promised
    assert planned["predicted_bytes"] == record.plan.predicted.total


def test_plan_decodes_and_writes_nothing(halo: Run, vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = halo("plan", "--vae", vae, "--size", "4096x4096", "--force")
    assert ended.code == 0, ended.err
    assert list(tmp_path.iterdir()) == []
    assert HistoryStore().read().records == ()


def test_text_shows_ops_shapes_and_peak(halo: Run, vae: Path) -> None:
    ended = halo("plan", "--vae", vae, "--size", "56x40")
    for words in ("decoder.conv_in", "convolution shapes", "Predicted peak", "1×4×5×7 → 1×40×56×3", "arithmetic"):
        assert words in ended.out


def test_blended_plan_is_marked_approximate(halo: Run, vae: Path) -> None:
    line = plan_json(halo, vae, "--size", "512x64", "--method", "blended", "--tile-size", 128)
    assert line["plan"]["method"] == "blended"
    assert line["plan"]["approximate"] is True
    assert line["plan"]["tile_grid"][1] > 1
    assert line["predicted_bytes"] > 8 * 512 * 64 * 3 / 2  # more than the picture itself


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "--size WxH"),
        (("--size", "57x40"), "56x40"),  # names the nearest size that works
        (("--size", "4x4"), "8x8"),
        (("--size", "0x8"), "multiples"),
        (("--size", "big"), "give width x height"),
        (("--size", "-8x8"), "argument --size"),
        (("--size", "56x40", "--batch", "0"), "--batch is 0"),
        (("none.latent",), "does not exist"),
        (("none.latent", "--size", "56x40"), "one of the two"),
        (("none.latent", "--batch", "2"), "--batch goes with --size"),
        (("--size", "56x40", "--tile-size", "1"), "tile_size is 1"),
        (("--size", "56x40", "--method", "stock"), "invalid choice"),
    ],
)
def test_bad_input_is_exit_code_2(argv: tuple[str, ...], says: str, halo: Run, vae: Path) -> None:
    ended = halo("plan", "--vae", vae, *argv)
    assert ended.code == 2
    assert says in ended.err
    assert ended.out == ""
