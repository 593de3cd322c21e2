"""Optional packages with kernels: looked for when somebody asks for them, never at import time."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package and what of it a backend calls."""

    module: str
    """Name to import."""
    install: str
    """What to hand to pip."""
    functions: tuple[tuple[str, tuple[str, ...]], ...]
    """Functions, and the parameters that ours are passed by: an older version lacks some of them."""


def missing(package: Package) -> tuple[str, ...]:
    """Why the package cannot be used; empty where it can. Imports it only if it is installed."""
    if not _is_installed(package.module):
        return (f"the package {package.module} is not installed (pip install '{package.install}')",)
    try:
        module = importlib.import_module(package.module)
    except Exception as error:  # a package of native code fails in many ways
        return (f"the package {package.module} cannot be imported: {_first_line(error)}",)
    lacks = [name for name, parameters in package.functions if not _takes(module, name, parameters)]
    if lacks:
        return (f"{package.module} has no {', '.join(lacks)} of the kind needed; install '{package.install}'",)
    return ()


def load(package: Package) -> ModuleType:
    """The package, which is known to be there."""
    return importlib.import_module(package.module)


def served_by_hip(package: Package) -> tuple[str, ...]:
    """Functions that the package itself says it would run in plain torch on this AMD device, though it has kernels.

    Empty where it cannot be asked: only a torch built for AMD loads those kernels.
    """
    if torch.version.hip is None or missing(package):
        return ()
    registry = getattr(load(package), "registry", None)
    try:
        hip: Mapping[str, object] = registry.list_backends().get("hip", {}) if registry is not None else {}
    except Exception:  # not a published interface: what cannot be read is left alone
        return ()
    capable = hip.get("capabilities")
    if not isinstance(capable, list):
        return ()
    usable = capable if hip.get("available") and not hip.get("disabled") else []
    return tuple(name for name, _ in package.functions if name not in usable)


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _takes(module: ModuleType, name: str, parameters: tuple[str, ...]) -> bool:
    function = getattr(module, name, None)
    if not callable(function):
        return False
    try:
        return set(parameters) <= set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return True  # without a signature there is nothing to compare


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
