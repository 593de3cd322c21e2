"""Torch's process-wide switches: what a decode wants of them and why, and that all are as before however it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from halo_vae.optim import scope
from halo_vae.optim.scope import BackendFlags, FlagsInForce, backend_scope
from halo_vae.optim.torch_flags import SDPA_KERNELS, SWITCHES, put_back
from halo_vae.tests.flags import BOOLEANS, EXITS, Stop, booleans, given, leave_by, running, state


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No scope of another test, and nobody warned; each test must leave the state as it was."""
    monkeypatch.setattr(scope, "_REGISTRY", scope._Registry())
    before = state()
    yield
    assert state() == before
    assert scope._REGISTRY.entries == []
    assert scope._REGISTRY.applied == {}


def only(name: str, value: bool) -> BackendFlags:
    """Flags with an opinion of one switch (of SDPA: of its four, of sums: of three)."""
    use: Any = "on" if value else "off"
    if name.startswith("sdpa_") and not name.endswith("_sums"):
        kernel = name.removeprefix("sdpa_")
        chosen = tuple(k for k in SDPA_KERNELS if (k == kernel) == value)
        return BackendFlags(sdpa=chosen)
    field: Any = {name: use} if not name.endswith("_sums") else {"reduced_sums": use}
    return BackendFlags(**field)


# -- every switch, every way out


@pytest.mark.parametrize("way_out", EXITS)
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("name", BOOLEANS)
def test_each_switch_is_set_and_put_back(name: str, wanted: bool, initial: bool, way_out: str) -> None:
    with given(**{name: initial}):
        before = state()

        def work() -> None:
            with backend_scope(only(name, wanted)) as in_force:
                assert BOOLEANS[name][0]() is wanted
                told = {change.name: (change.before, change.now) for change in in_force.changes}
                text = {True: "on", False: "off"}
                assert told.get(name) == (None if wanted == initial else (text[initial], text[wanted]))
                leave_by(way_out)

        running(work, way_out)
        assert state() == before


@pytest.mark.parametrize("way_out", EXITS)
def test_flags_without_an_opinion_touch_nothing(way_out: str) -> None:
    before = state()

    def work() -> None:
        with backend_scope(BackendFlags()) as in_force:
            assert state() == before
            assert in_force == FlagsInForce(changes=(), unreadable=(), flags=BackendFlags())
            leave_by(way_out)

    running(work, way_out)


@pytest.mark.parametrize("way_out", EXITS)
def test_inner_scopes_win_and_give_back_to_the_outer(way_out: str) -> None:
    with given(cudnn=True, fp16_reduced_sums=True, sdpa_flash=True):

        def work() -> None:
            with backend_scope(BackendFlags(cudnn="off", sdpa=("math",))):
                outer = booleans()
                with suppress(Stop), backend_scope(BackendFlags(cudnn="on", reduced_sums="off")) as inner:
                    assert (BOOLEANS["cudnn"][0](), BOOLEANS["fp16_reduced_sums"][0]()) == (True, False)
                    assert not BOOLEANS["sdpa_flash"][0]()  # the inner one has no opinion of it
                    assert "cudnn" not in [change.name for change in inner.changes]  # as before both
                    raise Stop
                assert booleans() == outer
                leave_by(way_out)

        running(work, way_out)
        assert booleans()["cudnn"]


def test_the_same_scope_twice() -> None:
    flags = BackendFlags(cudnn="off", float32=("mkldnn",))
    with given(cudnn=True):
        with backend_scope(flags), backend_scope(flags):
            assert not booleans()["cudnn"]
        assert booleans()["cudnn"]


# -- two threads


class Turns:
    """Runs steps of two threads in a given order."""

    def __init__(self, order: str) -> None:
        self._order, self._at, self._changed = order, 0, threading.Condition()

    def take(self, who: str) -> None:
        """Wait for the next turn of `who`."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._order[self._at] == who, timeout=30)

    def done(self) -> None:
        with self._changed:
            self._at += 1
            self._changed.notify_all()


@pytest.mark.parametrize("way_out", EXITS)
@pytest.mark.parametrize("order", ["abab", "abba", "aabb", "baba"])
def test_two_threads_put_back_when_the_last_has_left(order: str, way_out: str) -> None:
    turns, inside, errors = Turns(order + "."), {}, []
    flags = {"a": BackendFlags(cudnn="off", reduced_sums="off"), "b": BackendFlags(cudnn="off", sdpa=("math",))}

    def decode(who: str) -> None:
        try:
            turns.take(who)
            with backend_scope(flags[who]):
                inside[who] = booleans()
                turns.done()
                turns.take(who)
                inside[f"{who} at its end"] = booleans()
                leave_by(way_out)
        except BaseException as error:
            errors.append(type(error))
        finally:
            turns.done()

    with given(cudnn=True, fp16_reduced_sums=True, sdpa_flash=True):
        before = state()
        threads = [threading.Thread(target=decode, args=(who,)) for who in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert state() == before
    make = EXITS[way_out]
    assert errors == ([] if make is None else [type(make())] * 2)
    for who in ("a", "a at its end", "b", "b at its end"):
        assert not inside[who]["cudnn"], who
    assert not inside["a at its end"]["fp16_reduced_sums"]
    assert not inside["b at its end"]["sdpa_flash"]


def test_of_two_threads_the_first_decides() -> None:
    entered, leave, inside = threading.Event(), threading.Event(), []

    def first() -> None:
        with backend_scope(BackendFlags(cudnn="off")):
            entered.set()
            leave.wait(30)

    with given(cudnn=True):
        thread = threading.Thread(target=first)
        thread.start()
        assert entered.wait(30)
        with backend_scope(BackendFlags(cudnn="on")) as second:
            inside.append(booleans()["cudnn"])
            assert [(c.name, c.before, c.now) for c in second.changes] == [("cudnn", "on", "off")]
            leave.set()
            thread.join(30)
            inside.append(booleans()["cudnn"])  # now it is the only one
        assert inside == [False, True]


# -- what goes wrong


class Refuses:
    """A switch that torch will not tell."""

    @staticmethod
    def apply(value: object, undo: object) -> None:
        raise RuntimeError("you have mixed old and new settings\nsee the notes")


def test_what_cannot_be_read_is_left_alone_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scope, "SWITCHES", {**SWITCHES, "cudnn": Refuses})
    with given(cudnn=True, fp16_reduced_sums=True):
        with backend_scope(BackendFlags(cudnn="off", reduced_sums="off")) as in_force:
            assert booleans()["cudnn"]
            assert not booleans()["fp16_reduced_sums"]
        assert in_force.unreadable == ("cudnn (you have mixed old and new settings)",)
        choice = in_force.choice()
        assert choice is not None
        assert "left alone" in choice.reason
        assert "mixed old and new settings" in choice.reason


class HalfWay:
    """Stops with a switch already set."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def apply(self, value: object, undo: list[Callable[[], object]]) -> None:
        undo.append(lambda: torch.backends.cuda.enable_flash_sdp(True))
        torch.backends.cuda.enable_flash_sdp(False)
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), RuntimeError("refused")])
def test_a_scope_that_fails_to_begin_puts_back_what_it_had_set(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(scope, "SWITCHES", {**SWITCHES, "sdpa_flash": HalfWay(error)})
    flags = BackendFlags(cudnn="off", sdpa=("math",))
    with given(cudnn=True, sdpa_flash=True, sdpa_mem_efficient=True):
        before = booleans()
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt, match="now"), backend_scope(flags):
                pytest.fail("the scope began")
        else:
            with backend_scope(flags) as in_force:
                assert booleans()["sdpa_flash"]  # left alone
            assert in_force.unreadable == ("sdpa_flash (refused)",)
        assert booleans() == before


def test_every_switch_is_put_back_though_one_refuses() -> None:
    done: list[str] = []

    def refuse(error: BaseException) -> Callable[[], object]:
        def put() -> None:
            raise error

        return put

    assert put_back([lambda: done.append("first"), refuse(RuntimeError("no")), lambda: done.append("last")]) == ["no"]
    with pytest.raises(KeyboardInterrupt):
        put_back([lambda: done.append("more"), refuse(KeyboardInterrupt())])
    assert done == ["last", "first", "more"]
