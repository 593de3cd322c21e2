"""Takes the tensor out of what a sampler hands on; the dictionary, its extras and the tensor stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..optim.errors import LatentError


def latent_of(samples: Mapping[str, Any]) -> Tensor:
    """The latent of a LATENT dictionary, unchanged and not copied; of a nested one (video and audio) the video part.

    That is the first part of rank 5, or the first part where none is: the host puts the picture before the sound.

    LatentError where the dictionary has no tensor under "samples".
    """
    if not isinstance(samples, Mapping):
        raise LatentError(f"the latent is a {type(samples).__name__}; give a dictionary with a tensor under 'samples'")
    if "samples" not in samples:
        keys = ", ".join(map(str, samples)) or "none"
        raise LatentError(f"the latent dictionary has no 'samples' (its keys: {keys}); connect the output of a sampler")
    latent = samples["samples"]
    if getattr(latent, "is_nested", False):  # duck-typed: not every host version has a class for it
        parts = latent.unbind()
        if not parts:
            raise LatentError("the nested latent holds no part; connect the output of a sampler")
        latent = next((part for part in parts if isinstance(part, Tensor) and part.ndim == 5), parts[0])
    if not isinstance(latent, Tensor):
        raise LatentError(f"'samples' holds a {type(latent).__name__}; a tensor is needed")
    return latent
