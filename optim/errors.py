"""Errors of the engine: each says what was given, what is allowed and what to do; figures are attributes."""

from __future__ import annotations

from collections.abc import Sequence

_PACKAGE, _ROOT = "halo_vae", __name__.removesuffix(".optim.errors")


class HaloError(Exception):
    """Base of every error the package raises on purpose."""

    def __init_subclass__(cls) -> None:
        """Named as of `halo_vae` under whichever name a host has imported the package.

        ComfyUI imports it under its folder's path, and shows an error's full name before its sentence.
        """
        super().__init_subclass__()
        if cls.__module__.startswith(f"{_ROOT}."):
            cls.__module__ = _PACKAGE + cls.__module__.removeprefix(_ROOT)


class SettingsError(HaloError, ValueError):
    """A setting is outside its range."""


class LatentError(HaloError, ValueError):
    """The latent cannot be decoded: wrong shape, wrong channel count, empty, or not finite."""


class WeightsError(HaloError, ValueError):
    """A weight file or mapping is unreadable, truncated, or lacks a tensor that a program needs."""


class UnknownDecoderError(WeightsError):
    """No family recognises the weights.

    Attributes:
        keys_seen: the first few tensor names that were looked at.
        families: names of the families that were tried.
    """

    def __init__(self, message: str, *, keys_seen: Sequence[str], families: Sequence[str]) -> None:
        """Store the evidence beside the sentence."""
        super().__init__(message)
        self.keys_seen = tuple(keys_seen)
        self.families = tuple(families)


class PlanError(HaloError, ValueError):
    """No plan fits what was asked.

    Attributes:
        need_bytes: what the smallest plan would take, or None.
        free_bytes: the budget it was planned for, or None.
    """

    def __init__(self, message: str, *, need_bytes: int | None = None, free_bytes: int | None = None) -> None:
        """Store the figures beside the sentence."""
        super().__init__(message)
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


class NonFiniteError(HaloError):
    """An op gave inf or NaN in the widest dtype allowed, so the picture would be wrong.

    Attributes:
        op: name of the op.
        dtype: the dtype that failed.
    """

    def __init__(self, message: str, *, op: str, dtype: str) -> None:
        """Store op and dtype beside the sentence."""
        super().__init__(message)
        self.op = op
        self.dtype = dtype


class DecodeCancelled(HaloError):
    """The caller's observer asked to stop; pool, flags and model are as they were."""
