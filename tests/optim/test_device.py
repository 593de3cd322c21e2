"""What a decode runs on, as data."""

from __future__ import annotations

import builtins
import io
from typing import Any

import pytest
import torch

from halo_vae.optim.accelerator import SideStream
from halo_vae.optim.device import available_host_bytes, describe_device


def test_the_cpu() -> None:
    found = describe_device("cpu")
    assert (found.kind, found.name, found.strategy, found.layout) == ("cpu", "cpu", "strips", "channels_last")
    assert found.unified_memory
    assert found.native_dtypes[-1] == "float32"
    assert describe_device(torch.device("cpu")).native_dtypes == found.native_dtypes
    assert found.batch_cap >= 1
    assert found.tile_bytes > 0


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_is_fast_only_where_the_cpu_multiplies_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert describe_device("cpu").native_dtypes == (("bfloat16", "float32") if native else ("float32",))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    assert describe_device("cpu").native_dtypes[0] == "bfloat16"


def test_a_torch_that_cannot_say_counts_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert describe_device("cpu").native_dtypes == ("float32",)


@pytest.mark.parametrize(
    ("hip", "kind", "layout", "attention"),
    [(None, "cuda", "channels_last", "sdpa"), ("7.0", "hip", "contiguous", "matmul")],
)
def test_gpus_take_fixed_tiles(
    hip: str | None, kind: str, layout: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    found = describe_device("cuda:1")
    assert (found.kind, found.name, found.strategy) == (kind, "cuda:1", "tiles")
    assert (found.layout, found.attention) == (layout, attention)
    assert found.native_dtypes[0] == "float16"


def test_other_devices_are_planned_for_too() -> None:
    assert describe_device("mps").kind == "other"


def read_as(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.open

    def fake(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path != "/proc/meminfo":
            return real(path, *args, **kwargs)
        if text is None:
            raise FileNotFoundError(path)
        return io.StringIO(text)

    monkeypatch.setattr(builtins, "open", fake)


@pytest.mark.usefixtures("machine_memory")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MemTotal: 9000 kB\nMemAvailable:    2048 kB\nX: 1\n", 2 << 20),
        ("MemTotal: 9 kB\n", None),
        ("MemAvailable: much\n", None),
        ("MemAvailable:\n", None),
        (None, None),  # not Linux
    ],
)
def test_free_memory_is_read_or_none(text: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    read_as(text, monkeypatch)
    assert available_host_bytes() == expected
    assert describe_device("cpu").budget_bytes == expected


def test_the_cpu_has_no_side_stream() -> None:
    stream = SideStream(torch.device("cpu"))
    with stream.active():
        pass
    assert stream.is_done()
    stream.join()
