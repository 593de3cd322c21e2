"""A child process without torch that speaks the benchmark's protocol: run as a script, or as an interpreter by `fake`.

$FAKE_FAULT names what goes wrong: crash, hang, nan, error, garbage; $FAKE_FAULT_AT after how many samples of a process;
$FAKE_FAULT_IN the configuration that it goes wrong in.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "python": "3.12.0", "torch": "2.9.1", "cuda": None, "hip": None, "miopen": None, "cudnn": None, "os": "Linux",
    "machine": "x86_64", "cpu": "a CPU", "cpu_count": 2, "threads": 2, "device": "cpu", "device_arch": None,
    "variables": [],
}  # fmt: skip
FACTS = {"load_before": 0.1, "load_after": 0.2, "cores": 2, "clock_drift_ns": 0, "run_ns": 1000}


def tell(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def fail(request: dict[str, Any], done: int) -> None:
    fault = os.environ.get("FAKE_FAULT")
    wanted = os.environ.get("FAKE_FAULT_IN", request["configuration"]) == request["configuration"]
    if fault is None or not wanted or done != int(os.environ.get("FAKE_FAULT_AT", "0")):
        return
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        Path(os.environ.get("FAKE_PID_FILE", os.devnull)).write_text(str(os.getpid()))
        time.sleep(600)
    if fault == "nan":
        tell(event="not_finite", sentence="3 of 12 values of the picture are NaN or infinite")
        raise SystemExit(0)
    if fault == "error":
        tell(event="failed", sentence=f"WeightsError: {request['vae']} holds no tensor 'x'")
        raise SystemExit(3)
    if fault == "garbage":
        sys.stdout.write('{"event": "sam\nnoise\n[1]\n')


def main() -> None:
    request = json.loads(sys.stdin.readline())
    if log := os.environ.get("FAKE_LOG"):
        wanted = ("MIOPEN_USER_DB_PATH", "TRITON_REDIS_KEY_FORMAT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
        seen = {name: os.environ.get(name) for name in wanted}
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"request": request, "environ": seen, "cwd": os.getcwd()}) + "\n")
    if request["task"] == "describe":
        facts = {"device": "cpu", "arch": "x86_64", "threads": request["threads"] or 2, "has_fp16": False, "pci": None}
        tell(event="described", described={"environment": ENVIRONMENT, **facts})
        return
    if request["task"] == "reference":
        Path(request["reference"]).write_bytes(b"a picture")
        tell(event="done")
        return
    database = Path(os.environ["MIOPEN_USER_DB_PATH"])
    size = request["latent_shape"] if request["plan"] == "strips" else "a tile"
    shapes = [f"{size} * {kernel}" for kernel in ("3x3", "1x1")]
    charges = sum(not (database / shape).exists() for shape in shapes)
    for shape in shapes:
        (database / shape).touch()
    for i in range(request["warm_ups"]):
        tell(event="warm_up", ns=9000 + i)
    for i in range(request["runs"]):
        fail(request, i)
        tell(event="sample", ns=1000 + i)
    fail(request, request["runs"])
    timed_charges = 0 if request["warm_ups"] else charges
    measured = {
        "dtype": request["precision"], "shapes": shapes, "n_new": 0 if request["warm_ups"] else len(shapes),
        "max_error": 0.001, "mean_error": 0.0001, "psnr_db": None if request["configuration"] == "baseline" else 70.0,
        "psnr_infinite": request["configuration"] == "baseline", "peak_bytes": 1 << 20, "charges": timed_charges,
        "facts": FACTS,
    }  # fmt: skip
    tell(event="done", measured=measured)


def fake(folder: Path) -> str:
    """An executable that takes the place of a Python and is this script. POSIX only."""
    path = folder / "fake-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{Path(__file__).resolve()}"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


if __name__ == "__main__":
    main()
