"""The measure of what recording costs: that it counts what a decode tells, at every level. No time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halo_vae.benchmarks import profiling_cost
from halo_vae.benchmarks.engines import HaloSide, random_latent
from halo_vae.benchmarks.plain_kl import random_sd_weights
from halo_vae.tests.profiling.test_cost import Counting


def test_it_tells_the_events_of_a_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling_cost, "REPEATS", 2)
    monkeypatch.setattr(profiling_cost, "LIMITS", {"off": 0.0, "summary": 1e9, "per_op": 1e9})
    path = tmp_path / "cost.json"
    asked = ["--size", "64", "--ch", "32", "--runs", "1", "--json", str(path)]
    assert profiling_cost.main(asked) == 1  # `off` is over its limit here
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [c["level"] for c in found["levels"]] == ["off", "summary", "per_op"]
    assert [c["samples"] > 0 for c in found["levels"]] == [False, False, True]
    sizes = [c["record_bytes"] for c in found["levels"]]
    assert sizes == sorted(sizes)
    side, heard = HaloSide("strips", random_sd_weights(ch=32)), Counting()
    side.decode(random_latent(64))
    side.engine.decode(side.decoder, random_latent(64), side.settings, observer=heard)  # type: ignore[arg-type]
    for level in ("off", "summary", "per_op"):
        counted = {e["event"]: e["count"] for e in found["events"] if e["level"] == level}
        assert counted == dict(heard.heard)
        assert counted["tile_started"] > 20
    monkeypatch.setattr(profiling_cost, "LIMITS", {"off": 1e9, "summary": 1e9, "per_op": 1e9})
    assert profiling_cost.main(asked[:-2]) == 0
