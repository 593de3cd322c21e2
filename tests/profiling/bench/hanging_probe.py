"""A probe that tells its process's number and never comes back."""

from __future__ import annotations

import os
import time
from pathlib import Path


def install() -> None:
    """Write the number, then sleep."""
    target = Path(os.environ["PROBE_PID_FILE"])
    target.with_suffix(".new").write_text(str(os.getpid()))
    target.with_suffix(".new").rename(target)
    while True:
        time.sleep(60)
