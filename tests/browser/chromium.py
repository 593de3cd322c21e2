"""Where the browser is."""

from __future__ import annotations

import os
import shutil

BROWSER = "HALO_VAE_BROWSER"
"""Names the browser to drive, where it is not found by itself."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The program of a Chromium that is installed; None where there is none."""
    named = os.environ.get(BROWSER)
    return shutil.which(named) if named else next(filter(None, map(shutil.which, _NAMES)), None)
