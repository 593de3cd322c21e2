"""Run by itself: what torch's float32 precisions are before, within and after a scope, in processes of many histories.

Prints one JSON object: by history {"before", "inside", "after", "later", "untouched"}. `later` is what follows when the
user then sets the general precision, `untouched` the same in a process where no scope ever was.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from halo_vae.optim.scope import BackendFlags, backend_scope
from halo_vae.tests.flags import has_precisions, state

_BACKENDS: Any = torch.backends
FLAGS = BackendFlags(float32=("cuda", "mkldnn"))
EXITS: tuple[BaseException | None, ...] = (None, ValueError("no"), KeyboardInterrupt("stop"), MemoryError("full"))


def old_cudnn() -> None:
    _BACKENDS.cudnn.allow_tf32 = False


def old_matmul() -> None:
    _BACKENDS.cuda.matmul.allow_tf32 = True


def new_matmul() -> None:
    _BACKENDS.cuda.matmul.fp32_precision = "tf32"


def new_conv() -> None:
    _BACKENDS.cudnn.conv.fp32_precision = "ieee"


def new_conv_tf32() -> None:
    _BACKENDS.cudnn.conv.fp32_precision = "tf32"


def general() -> None:
    _BACKENDS.fp32_precision = "tf32"


def backend() -> None:
    _BACKENDS.cudnn.fp32_precision = "tf32"


def cpu_backend() -> None:
    _BACKENDS.mkldnn.fp32_precision = "bf16"


def cpu_conv() -> None:
    _BACKENDS.mkldnn.conv.fp32_precision = "bf16"


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


OLD: dict[str, tuple[Callable[[], None], ...]] = {
    "untouched": (), "old cudnn": (old_cudnn,), "old matmul": (old_matmul,), "old both": (old_cudnn, old_matmul),
    "medium": (medium,),
}  # fmt: skip
NEW: dict[str, tuple[Callable[[], None], ...]] = {
    "new matmul": (new_matmul,), "new conv": (new_conv,), "new both": (new_conv, new_matmul),
    "general": (general,), "backend": (backend,), "cpu backend": (cpu_backend,), "cpu conv": (cpu_conv,),
    "general and matmul": (general, new_matmul), "general and backend": (general, backend),
    "general, backend and conv": (general, backend, new_conv_tf32),
    "old matmul, new conv": (old_matmul, new_conv), "new conv, old matmul": (new_conv, old_matmul),
    "old cudnn, new matmul": (old_cudnn, new_matmul), "new matmul, old matmul": (new_matmul, old_matmul),
    "medium, general": (medium, general), "medium, cpu conv, new matmul": (medium, cpu_conv, new_matmul),
}  # fmt: skip


def compute() -> None:
    """What a decode does on the CPU."""
    x = torch.ones(1, 4, 8, 8)
    torch.nn.functional.conv2d(x, torch.ones(4, 4, 3, 3))
    torch.nn.functional.linear(x, torch.ones(4, 8))


def observe(steps: tuple[Callable[[], None], ...], *, scoped: bool) -> dict[str, Any]:
    """States of this process, which has no history yet."""
    for step in steps:
        step()
    seen: dict[str, Any] = {"before": state(), "inside": [], "after": []}
    for leaving in EXITS:
        with suppress(ValueError, KeyboardInterrupt, MemoryError), backend_scope(FLAGS) if scoped else nullcontext():
            seen["inside"].append(state())
            compute()
            if leaving is not None:
                raise leaving
        seen["after"].append(state())
    if has_precisions():
        for precision in ("ieee", "none"):
            _BACKENDS.fp32_precision = precision
            seen[precision] = state()
    return seen


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of work in a child process; nothing has been computed yet, so there are no threads to lose."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(text)
    return result


def main() -> None:
    """Every history, with and without scopes."""
    histories = OLD | (NEW if has_precisions() else {})
    found = {}
    for name, steps in histories.items():
        seen = in_child(lambda steps=steps: observe(steps, scoped=True))  # type: ignore[misc]
        never = in_child(lambda steps=steps: observe(steps, scoped=False))  # type: ignore[misc]
        later = {key: seen[key] for key in ("ieee", "none") if key in seen}
        found[name] = seen | {"later": later, "untouched": {key: never[key] for key in later}}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
