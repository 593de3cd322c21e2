"""Benchmarks of fake children: everything but the decodes is real."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halo_vae.profiling.bench.cases import BenchCase
from halo_vae.profiling.bench.protocol import ChildEvent, ChildRequest
from halo_vae.profiling.bench.request import BenchRequest
from halo_vae.profiling.bench.runner import Tools
from halo_vae.profiling.bench.spawn import ChildOutcome, Interpreter, run_child
from halo_vae.tests.profiling.bench.fake_child import fake

IMAGE = BenchCase(key="image", title="Image", family="kl", width_px=512, height_px=512)
HALF = BenchCase(key="half", title="Half", family="kl", width_px=512, height_px=512, precision="fp16")
PATIENCE_S = 60.0


def request(**changes: Any) -> BenchRequest:
    """One picture, by the bundled VAE, in one configuration."""
    known: dict[str, Any] = {
        "host": "here", "cases": (IMAGE,), "configurations": ("phase3",), "scenarios": ("hot",), "runs": 3,
        "vaes": ("tiny",), "time_limit_s": PATIENCE_S,
    }  # fmt: skip
    return BenchRequest(**{**known, **changes})


def fake_tools(folder: Path, **environ: str) -> Tools:
    """Children are fake ones; `environ` reaches them as FAKE_…, and they log what they are asked."""
    python = fake(folder)

    def spawn(
        ask: ChildRequest, interpreter: Interpreter, environment: Mapping[str, str], limit_s: float,
        heard: Callable[[ChildEvent], None] = lambda event: None,
    ) -> ChildOutcome:  # fmt: skip
        return run_child(ask, Interpreter(python=python, folder=interpreter.folder), environment, limit_s, heard)

    faults = {f"FAKE_{name.upper()}": value for name, value in environ.items()}
    env = {"PATH": os.environ["PATH"], "FAKE_LOG": str(folder / "asked.jsonl"), **faults}
    return Tools(spawn=spawn, environ=env)


def asked(folder: Path, task: str = "run") -> list[dict[str, Any]]:
    """What children of one kind were given: request, environ, cwd."""
    lines = (folder / "asked.jsonl").read_text("utf-8").splitlines()
    return [found for line in lines if (found := json.loads(line))["request"]["task"] == task]
