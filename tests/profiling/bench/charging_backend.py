"""A convolution backend with a cache on disk that is charged for each shape it has not seen: a probe for children.

What MIOpen's find database does, with a cost that can be counted. A shape is what the backend really gets, so it is
counted apart from what the engine says that it asks for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as functional


def install() -> Callable[[], int]:
    """Wrap torch's convolutions of this process; gives the number of charges so far."""
    database = Path(os.environ["MIOPEN_USER_DB_PATH"])
    charges = 0

    def wrap(name: str) -> None:
        plain = getattr(functional, name)

        def convolve(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal charges
            key = repr((name, tuple(x.shape), tuple(weight.shape), str(x.dtype)))
            entry = database / hashlib.sha256(key.encode()).hexdigest()
            if not entry.exists():
                charges += 1
                entry.touch()
            return plain(x, weight, *args, **kwargs)

        setattr(functional, name, convolve)

    for name in ("conv2d", "conv3d"):
        wrap(name)
    return lambda: charges
