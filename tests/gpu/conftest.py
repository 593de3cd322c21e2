"""Writes what the tests on a device found to a file that says on what: see docs/gfx1151.md."""

from __future__ import annotations

import json
import math
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from halo_vae.tests.gpu.support import DEVICE, ON_CPU

SCHEMA_VERSION = 1
_STARTED = time.monotonic()
_FOUND: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember how each test of this folder ended, and what it measured (`record_property`)."""
    if "tests/gpu/" not in report.nodeid.replace(os.sep, "/"):
        return
    name = report.nodeid.rpartition("tests/gpu/")[2]
    line = _FOUND.setdefault(name, {"test": name, "outcome": "passed", "seconds": 0.0, "measured": {}})
    line["seconds"] = round(line["seconds"] + report.duration, 4)
    line["measured"].update({k: _plain(v) for k, v in report.user_properties})
    if report.outcome != "passed":
        line["outcome"], line["why"] = report.outcome, _reason(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, if any test ran."""
    if any(line["outcome"] != "skipped" for line in _FOUND.values()):
        path = Path(session.config.getoption("gpu_report"))
        path.write_text(json.dumps(summary(), indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def summary() -> dict[str, Any]:
    """Everything, without paths and without values of environment variables."""
    from halo_vae.profiling.doctor import diagnose
    from halo_vae.profiling.doctor_read import read_facts

    lines = list(_FOUND.values())
    outcomes = [line["outcome"] for line in lines]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "gpu-tests",
        "device_is_a_stand_in": ON_CPU,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - _STARTED, 1),
        "outcomes": {o: outcomes.count(o) for o in sorted(set(outcomes))},
        "doctor": diagnose(read_facts(str(DEVICE), import_packages=True), os.environ).redacted().to_json(),
        "tests": lines,
    }


def _plain(value: Any) -> Any:
    """JSON has no inf and no nan."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _reason(report: pytest.TestReport) -> str:
    """The last line that says anything; a skip's reason."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    text = lines[0][1:].strip() if lines else str(report.longrepr)[-200:]
    return text.replace(str(Path.home()), "~")[:500]
