"""Cache conditions, counted: real decodes on a backend whose cache on disk is charged for each unseen shape."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pytest

from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.weights import FileWeights
from halo_vae.profiling.bench.cases import BenchCase
from halo_vae.profiling.bench.protocol import ChildEvent, ChildRequest
from halo_vae.profiling.bench.request import BenchRequest
from halo_vae.profiling.bench.results import RunLine
from halo_vae.profiling.bench.runner import Tools, run_bench
from halo_vae.profiling.bench.spawn import ChildOutcome, Interpreter, run_child
from halo_vae.profiling.cli.demo import DATA, VAE_NAME

CASE = BenchCase(key="picture", title="Picture", family="kl", width_px=256, height_px=256)
PROBE = Path(__file__).with_name("charging_backend.py")


def spawn_without_references(
    ask: ChildRequest, interpreter: Interpreter, environment: Mapping[str, str], limit_s: float,
    heard: Callable[[ChildEvent], None] = lambda event: None,
) -> ChildOutcome:  # fmt: skip
    """Errors are not the subject here."""
    if ask.task == "reference":
        return ChildOutcome(ending="failed", sentence="not wanted")
    return run_child(ask, interpreter, environment, limit_s, heard)


def lines_of(folder: Path, plan: Literal["strips", "tiles"], *scenarios: str) -> dict[str, RunLine]:
    wanted = BenchRequest(
        host="here", cases=(CASE,), configurations=("phase3",), scenarios=scenarios, runs=1, threads=1,  # type: ignore[arg-type]
        vaes=("tiny",), device="cpu", plan=plan, kernel_backend="torch", probe=PROBE, time_limit_s=300.0,
    )  # fmt: skip
    tools = Tools(spawn=spawn_without_references, environ=os.environ)
    outcome = run_bench(wanted, folder, lambda line: None, tools=tools)
    assert [line.error for line in outcome.lines] == [None] * len(scenarios)
    return {line.scenario: line for line in outcome.lines}


def planned_shapes(plan: Literal["strips", "tiles"], size: tuple[int, int]) -> set[object]:
    """What the engine means to ask for."""
    decoder = open_decoder(FileWeights(DATA / VAE_NAME))
    settings = DecodeSettings(plan=plan, kernel_backend="torch")
    return set(Engine().plan(decoder, (1, 4, *size), settings).conv_shapes)


def test_tiles_are_charged_when_cold_and_never_again(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, "tiles", "cold", "warm", "hot")
    n_shapes = len(planned_shapes("tiles", (32, 32)))
    assert n_shapes > 5
    assert {name: line.cache_charges for name, line in lines.items()} == {"cold": n_shapes, "warm": 0, "hot": 0}
    assert lines["warm"].latent_shape == (1, 4, 32, 36)
    assert lines["warm"].shapes is not None
    assert lines["warm"].shapes.not_in_hot == ()
    cold, hot = lines["cold"].shapes, lines["hot"].shapes
    assert cold is not None
    assert hot is not None
    assert (cold.requested, cold.new) == (n_shapes, n_shapes)
    assert (hot.requested, hot.new) == (n_shapes, 0)


def test_strips_are_charged_again_when_warm_and_the_line_names_them(tmp_path: Path) -> None:
    warm = lines_of(tmp_path, "strips", "warm")["warm"]
    strange = planned_shapes("strips", (32, 36)) - planned_shapes("strips", (32, 32))
    assert strange
    assert warm.cache_charges == len(strange)
    assert warm.shapes is not None
    assert len(warm.shapes.not_in_hot) == len(strange)
    assert all(" * " in words and words.endswith("channels_last") for words in warm.shapes.not_in_hot)


@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_the_two_plans_differ_in_what_a_new_size_asks_for(plan: Literal["strips", "tiles"]) -> None:
    assert (planned_shapes(plan, (32, 36)) <= planned_shapes(plan, (32, 32))) == (plan == "tiles")
