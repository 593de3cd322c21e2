"""One round in one process: open the VAE, decode once to warm up, then decode and take the time."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from ...optim.accelerator import gpu_api, has_gpu, is_gpu, wait_for
from ..bench.facts import FactsWatch
from ..bench.protocol import ChildRequest
from ..bench.sides import Shapes, open_side
from ..bench.tasks import make_latent
from ..memory import process_counter
from .records import Answer, Ask, Measured

LOOKS = 32
"""Values of the pictures that are kept."""


def measure(ask: Ask) -> Answer:
    """Time `iterations` decodes together. A picture that is not finite has no time."""
    device = torch.device(ask.device)
    if is_gpu(device) and not has_gpu():
        return Answer(status="failed", error="its torch sees no GPU")
    if ask.threads is not None:
        torch.set_num_threads(ask.threads)
    request = ChildRequest(
        task="run", device=ask.device, threads=ask.threads, vae=str(Path(ask.vae)), latent_shape=ask.latent_shape,
        seed=ask.seed, configuration=ask.configuration, precision=ask.precision,
    )  # fmt: skip
    latent, side = make_latent(request), open_side(request, device, Shapes())
    started = time.perf_counter_ns()
    picture = side.decode(latent)
    wait_for(device)
    warm_up_ns = max(1, time.perf_counter_ns() - started)
    if (sentence := _not_finite(picture)) is not None:
        return Answer(status="not_finite", error=sentence)
    facts = FactsWatch()
    started, cpu = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(ask.iterations):
        del picture  # the last one's memory is not this one's
        picture = side.decode(latent)
    wait_for(device)
    ns, cpu_ns = max(1, time.perf_counter_ns() - started), time.process_time_ns() - cpu
    if (sentence := _not_finite(picture)) is not None:
        return Answer(status="not_finite", error=sentence)
    process = process_counter()
    return Answer(
        measured=Measured(
            ns=ns, cpu_ns=cpu_ns, iterations=ask.iterations, warm_up_ns=warm_up_ns, dtype=side.dtype,
            threads=torch.get_num_threads(), peak_bytes=None if process is None else process.peak_bytes(),
            gpu_peak_bytes=int(gpu_api().max_memory_reserved(device)) if is_gpu(device) else None,
            look=look_at(picture), facts=facts.finish(),
        )
    )  # fmt: skip


def look_at(picture: Tensor) -> tuple[float, ...]:
    """At most `LOOKS` values, spread evenly, to six digits."""
    flat = picture.reshape(-1)
    return tuple(round(value, 6) for value in flat[:: max(1, -(-flat.numel() // LOOKS))].tolist())


def _not_finite(picture: Tensor) -> str | None:
    bad = int(torch.count_nonzero(~torch.isfinite(picture)))
    return f"{bad} of {picture.numel()} values of the picture are NaN or infinite" if bad else None
