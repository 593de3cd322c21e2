"""Facts about a host's model that its weights cannot tell, in the form that lowering takes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class UnclearModelError(ValueError):
    """The model does something to its latent that no hint can say."""


def hints_of(model: Any, latent_channels: int | None) -> Mapping[str, str]:
    """Hints for `optim.families.lower`. UnclearModelError where a model does more to its latents than scale them.

    `config`: what the model was built from, as its file would carry it (LTX-Video). `latent_scale`: the factor that the
    model multiplies its latents by (TAEHV, whose file tells it by a dtype that is gone once it is loaded).
    """
    hints: dict[str, str] = {}
    config = getattr(model, "config", None)
    if isinstance(config, Mapping):
        with contextlib.suppress(TypeError, ValueError):  # what is no JSON is no config of such a file
            hints["config"] = json.dumps({"vae": dict(config)})
    process = getattr(model, "process_in", None)
    if callable(process):
        hints["latent_scale"] = repr(_factor(process, latent_channels or 1))
    return hints


def _factor(process: Any, channels: int) -> float:
    """The number that `process` multiplies by."""
    zero = torch.zeros(1, channels, 1, 1, 1)
    try:
        at: list[Tensor] = [process(zero + value) for value in (0.0, 1.0, -2.0)]
        factor = float(at[1].flatten()[0])
        plain = all(torch.equal(y, (zero + v) * factor) for y, v in zip(at, (0, 1, -2), strict=True))
    except Exception as error:  # somebody else's function
        raise UnclearModelError(f"its process_in cannot be tried ({error})") from error
    if not plain:
        raise UnclearModelError("its process_in does more than multiply")
    return factor
