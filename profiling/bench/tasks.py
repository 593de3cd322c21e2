"""What a child process does: describe the device, make a reference picture, or time one configuration.

A time runs from a latent in hand to pictures on the CPU, the device idle at both ends. With loading, it begins where
the VAE's file is opened, for a process that has torch but nothing of the VAE.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...optim.accelerator import GPU, has_gpu, is_gpu, wait_for
from ...optim.device import describe_device
from ...optim.device_readers import SYS, find_card, read_pci_address
from ..environment import read_environment
from ..fidelity import Fidelity, measure_fidelity
from ..memory import MemoryCounter, PeakWatch, counters_for
from .cases import BenchError
from .facts import FactsWatch, Readers, read_temperature
from .probe import Charges, install_probe
from .protocol import ChildEvent, ChildRequest, Described, Measured
from .sides import PlainSide, Shapes, Side, open_side, prepare

Tell = Callable[[ChildEvent], None]


def perform(request: ChildRequest, tell: Tell) -> None:
    """One task, in this process."""
    charges = None if request.probe is None else install_probe(Path(request.probe))
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    device = torch.device((GPU if has_gpu() else "cpu") if request.device == "auto" else request.device)
    if request.task == "describe":
        tell(ChildEvent(event="described", described=describe(device)))
    elif request.task == "reference":
        write_reference(request, device)
        tell(ChildEvent(event="done"))
    else:
        Timing(request, device, tell, charges).run()


def describe(device: torch.device) -> Described:
    """The device and its environment."""
    profile, environment = describe_device(device), read_environment(str(device))
    return Described(
        environment=environment, device=str(device), arch=environment.device_arch or environment.machine,
        threads=torch.get_num_threads(), has_fp16="float16" in profile.native_dtypes,
        pci=read_pci_address(device) if is_gpu(device) else None,
    )  # fmt: skip


def make_latent(request: ChildRequest) -> Tensor:
    """The seeded latent, float32 on the CPU."""
    return torch.randn(request.latent_shape, generator=torch.Generator().manual_seed(request.seed))


def write_reference(request: ChildRequest, device: torch.device) -> None:
    """Decode the latent plainly in float32, one picture or clip at a time, and keep the pictures as float32."""
    if request.reference is None:
        raise BenchError("a reference needs a file to go to")
    side = PlainSide(Path(request.vae), torch.float32, device, Shapes())
    pictures = torch.cat([side.decode(one) for one in torch.split(make_latent(request), 1)])
    with open(request.reference, "wb") as file:
        np.save(file, pictures.numpy(), allow_pickle=False)


class Timing:
    """One run of one configuration."""

    def __init__(self, request: ChildRequest, device: torch.device, tell: Tell, charges: Charges | None) -> None:
        """Nothing is opened yet."""
        self._request, self._device, self._tell = request, device, tell
        self._charges = charges or (lambda: 0)
        self._counted = charges is not None
        self._shapes = Shapes()
        self._latent = make_latent(request)
        self._side: Side | None = None

    def run(self) -> None:
        """Tell each time as it is taken, and the rest at the end. Pictures that are not finite end the run."""
        request = self._request
        prepare(request, self._device)
        facts = FactsWatch(_readers(self._device))
        peak = PeakWatch(_counter(str(self._device)))
        if not request.with_loading:
            self._side = self._open()
        picture = None
        for _ in range(request.warm_ups):
            if (picture := self._timed("warm_up")) is None:
                return
        known, charged = len(self._shapes.seen), self._charges()
        for _ in range(request.runs):
            picture = None  # the last one's memory is not this one's
            if (picture := self._timed("sample")) is None:
                return
        charged, seen = self._charges() - charged, peak.finish()
        found = None if picture is None else self._compare(picture)
        counted = request.configuration != "stock"
        self._tell(
            ChildEvent(
                event="done",
                measured=Measured(
                    dtype=self._opened().dtype, shapes=tuple(self._shapes.seen),
                    n_new=len(self._shapes.seen) - known if counted else None,
                    max_error=None if found is None else found.max_abs,
                    mean_error=None if found is None else found.mean_abs,
                    psnr_db=None if found is None or found.mse == 0 else found.psnr_db,
                    psnr_infinite=found is not None and found.mse == 0,
                    peak_bytes=seen.above_start_bytes, charges=charged if self._counted else None,
                    facts=facts.finish(),
                ),
            )
        )  # fmt: skip

    def _timed(self, event: str) -> Tensor | None:
        """One decode; None where its pictures are not finite, which is told."""
        if self._request.with_loading:
            self._side = None
            gc.collect()
        wait_for(self._device)
        start = time.perf_counter_ns()
        side = self._open() if self._request.with_loading else self._opened()
        self._side = side
        picture = side.decode(self._latent)
        wait_for(self._device)
        took = max(1, time.perf_counter_ns() - start)
        if not bool(torch.isfinite(picture).all()):
            bad = int(torch.count_nonzero(~torch.isfinite(picture)))
            sentence = f"{bad} of {picture.numel()} values of the picture are NaN or infinite"
            self._tell(ChildEvent(event="not_finite", sentence=sentence))
            return None
        self._tell(ChildEvent(event="warm_up" if event == "warm_up" else "sample", ns=took))
        return picture

    def _open(self) -> Side:
        return open_side(self._request, self._device, self._shapes)

    def _opened(self) -> Side:
        if self._side is None:
            raise BenchError("a run needs at least one decode")
        return self._side

    def _compare(self, picture: Tensor) -> Fidelity | None:
        if self._request.reference is None:
            return None
        reference = torch.from_numpy(np.load(self._request.reference, allow_pickle=False))
        found = measure_fidelity(picture, reference)
        return found if math.isfinite(found.mse) else None


def _counter(device: str) -> MemoryCounter | None:
    """What holds a decode: the device's memory, on a CPU the process's."""
    counters = counters_for(device)
    return counters.allocated if is_gpu(device) else counters.process


def _readers(device: torch.device) -> Readers:
    if not is_gpu(device):
        return Readers()
    card = find_card(read_pci_address(device), SYS)
    return Readers(temperature=lambda: None if card is None else read_temperature(SYS, card))
