"""Messages to the page: how often, what they say, and that no decode suffers from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from halo_vae.nodes import actions
from halo_vae.nodes.live_messages import ENDED, MAX_PER_S, PROGRESS, LiveMessages
from halo_vae.tests.fixtures import latent
from halo_vae.tests.nodes.fake_host import FakeHost, Interrupted
from halo_vae.tests.nodes.support import clip_vae, kl_vae, new_session
from halo_vae.tests.profiling.fakes import MS, PLAN, SECOND, FakeClock

Z = latent((1, 4, 12, 20))
KEYS = {
    "node", "prompt_id", "stage", "phase", "chunk", "op", "tile", "done", "total", "elapsed_ns", "memory_bytes",
    "work_per_s",
}  # fmt: skip


class Page:
    """Hears messages, and when."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.heard: list[tuple[int, Mapping[str, Any]]] = []
        self.reads = 0
        self.live = LiveMessages(self.send, node="4", prompt_id="p", memory=lambda: self.read, clock=self.clock)

    def send(self, event: str, data: Mapping[str, Any]) -> None:
        assert event == PROGRESS
        self.heard.append((self.clock.ns, data))

    def read(self) -> int:
        self.reads += 1
        return 1000 + self.reads

    @property
    def last(self) -> Mapping[str, Any]:
        return self.heard[-1][1]

    def most_in_a_second(self) -> int:
        times = [at for at, _ in self.heard]
        return max(sum(start <= at < start + SECOND for at in times) for start in times)


def test_first_message_says_that_it_began() -> None:
    page = Page()
    page.clock.advance(3 * MS)
    page.live.begin()
    assert page.last == {
        "node": "4", "prompt_id": "p", "stage": "start", "phase": "other", "chunk": None, "op": None, "tile": None,
        "done": 0, "total": None, "elapsed_ns": 0, "memory_bytes": 1001, "work_per_s": None,
    }  # fmt: skip


def test_position_is_told_from_one() -> None:
    page = Page()
    page.live.begin()
    page.clock.advance(SECOND)
    page.live.planned(PLAN)
    page.live.chunk_started(0, 3)
    page.live.op_started(6, 9, "decoder.conv_in", 4)
    page.live.mark("compute")
    page.live.tile_started(1, 4, (1, 4, 8, 8), "float32")
    page.live.progress(250, 1000)
    page.clock.advance(SECOND)
    page.live.mark("compute")
    assert set(page.last) == KEYS
    assert page.last["chunk"] == [1, 3]
    assert page.last["op"] == [7, 9, "decoder.conv_in"]
    assert page.last["tile"] == [2, 4]
    assert (page.last["stage"], page.last["phase"]) == ("decode", "compute")
    assert (page.last["done"], page.last["total"]) == (250, 1000)
    assert page.last["elapsed_ns"] == 2 * SECOND
    page.live.planned(PLAN)  # planned again, it begins again
    page.live.finish()
    assert (page.last["chunk"], page.last["op"], page.last["tile"]) == (None, None, None)


@pytest.mark.parametrize("every_ns", [50_000, 7 * MS, 90 * MS])
def test_ten_messages_a_second_at_most(every_ns: int) -> None:
    page = Page()
    page.live.begin()
    n = 3 * SECOND // every_ns
    for i in range(n):
        page.clock.advance(every_ns)
        page.live.tile_started(i, n, (1,), "float32")
        page.live.mark(("compute", "transfer", "plan")[i % 3])  # type: ignore[arg-type]
        page.live.progress(i + 1, n)
    page.live.finish()
    assert page.most_in_a_second() <= MAX_PER_S
    assert len(page.heard) >= 3 * (MAX_PER_S - 1)
    assert page.last["done"] == page.last["total"] == n
    assert page.reads == len(page.heard)  # memory is read for a message only


def test_slow_decodes_are_told_of_every_event() -> None:
    page = Page()
    page.live.begin()
    for i in range(5):
        page.clock.advance(SECOND)
        page.live.progress(i + 1, 5)
    assert [data["done"] for _, data in page.heard] == [0, 1, 2, 3, 4, 5]
    page.live.finish()
    assert len(page.heard) == 6  # the last position was told


def test_a_new_stage_is_told_at_once() -> None:
    page = Page()
    page.live.begin()
    for phase in ("lower", "plan", "load", "compute", "stage", "stitch", "transfer", "sync"):
        page.clock.advance(MS)
        page.live.mark(phase)  # type: ignore[arg-type]
    stages = [data["stage"] for _, data in page.heard]
    assert stages == ["start", "lower", "plan", "load", "decode", "transfer", "sync"]


def test_speed_is_that_of_the_last_second() -> None:
    page = Page()
    page.live.begin()
    for _ in range(4):  # 100 in 4 s, then 400 in 4 s
        page.clock.advance(SECOND)
        page.live.progress(page.live._done + 25, 1000)
    assert page.last["work_per_s"] == pytest.approx(25)
    for _ in range(40):
        page.clock.advance(100 * MS)
        page.live.progress(page.live._done + 10, 1000)
    assert page.last["work_per_s"] == pytest.approx(100, rel=0.15)


def test_a_page_that_cannot_be_reached_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost(refuses=True)
    done = actions.decode(new_session(host).at("4"), {"samples": Z}, kl_vae())
    assert done.panel is not None
    assert torch.equal(done.images, actions.decode(new_session(), {"samples": Z}, kl_vae()).images)
    lines = [line.getMessage() for line in caplog.records]
    assert sum("progress of a decode cannot be shown" in line for line in lines) == 1
    assert sum("end of a decode cannot be shown" in line for line in lines) == 1


def test_memory_that_cannot_be_read_does_not_stop_a_decode() -> None:
    def broken() -> int:
        raise OSError

    live = LiveMessages(lambda event, data: None, node=None, prompt_id=None, memory=lambda: broken)
    live.begin()
    live.progress(1, 1)
    live.finish()


@pytest.mark.parametrize("method", ["exact", "blended", "stock"])
def test_a_decode_is_told_from_start_to_end(method: str) -> None:
    host = FakeHost()
    done = actions.decode(new_session(host).at("4"), {"samples": Z}, kl_vae(), method=method, tile_size=16, overlap=0)
    assert host.sent[-1][0] == ENDED
    assert [name for name, _ in host.sent].count(ENDED) == 1
    (ended,) = host.heard(ENDED)
    assert ended == {"node": "4", "prompt_id": "a prompt", "panel": done.panel}
    told = host.heard(PROGRESS)
    assert all(set(data) == KEYS and data["node"] == "4" for data in told)
    assert (told[0]["stage"], told[0]["done"], told[0]["total"]) == ("start", 0, None)
    assert told[-1]["done"] == told[-1]["total"]
    assert [data["done"] for data in told] == sorted(data["done"] for data in told)
    assert "decode" in [data["stage"] for data in told]
    assert all(data["memory_bytes"] > 0 for data in told)  # this process's own


def test_a_clip_tells_its_chunks() -> None:
    host, vae = FakeHost(), clip_vae()
    z = latent((1, vae.latent_channels, 5, 4, 4))
    done = actions.decode_video(new_session(host).at("4"), {"samples": z}, vae, chunk_frames=4, tile_size=0)
    assert done.record.plan.n_chunks > 1
    assert host.heard(PROGRESS)[-1]["chunk"] == [done.record.plan.n_chunks] * 2


def test_cp_1_the_end_of_a_cancelled_decode_is_told() -> None:
    host = FakeHost(interrupt_after=3)
    with pytest.raises(Interrupted):
        actions.decode(new_session(host).at("4"), {"samples": Z}, kl_vae(), tile_size=16)
    assert host.sent[-1][0] == ENDED
    (ended,) = host.heard(ENDED)
    assert ended["panel"]["record"]["status"] == "interrupted"
    assert host.heard(PROGRESS)[-1]["total"] != host.heard(PROGRESS)[-1]["done"]


def test_the_end_of_a_failed_decode_is_told() -> None:
    host, vae = FakeHost(), kl_vae()
    vae.process_output = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        actions.decode(new_session(host).at("4"), {"samples": Z}, vae)
    (ended,) = host.heard(ENDED)
    assert (ended["panel"]["record"]["status"], ended["panel"]["record"]["error"]) == ("error", "division by zero")


def test_nothing_is_told_of_what_never_began() -> None:
    host = FakeHost()
    with pytest.raises(ValueError, match="no VAE"):
        actions.decode(new_session(host).at("4"), {"samples": Z}, None)
    assert host.sent == []


def test_without_panels_only_the_end_is_told() -> None:
    host = FakeHost(settings={"HaloVAE.Panel": False})
    actions.decode(new_session(host).at("4"), {"samples": Z}, kl_vae())
    assert [name for name, _ in host.sent] == [ENDED]
