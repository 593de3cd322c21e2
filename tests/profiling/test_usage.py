"""What the history says is worth tuning next, and how choices say who made them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from halo_vae.optim.errors import DecodeCancelled
from halo_vae.optim.events import Choice
from halo_vae.profiling.doctor_folders import read_tuned_entries
from halo_vae.profiling.record import CacheUse, DecodeRecord
from halo_vae.profiling.render.text import render_record
from halo_vae.profiling.render.tuning import render_suggestions, tuning_section
from halo_vae.profiling.usage import is_tuned, origin_of, origins_of, suggest, usage_of
from halo_vae.tests.profiling.fakes import PLAN, SECOND, busy_events, make_collector, record_events, record_failure

RECORD: DecodeRecord = record_events(make_collector(), busy_events)
TUNED = Choice(name="layout", value="contiguous", reason="tuned: 25% faster than the rules, measured 2026-01-02")


def record(
    vae: str = "a", seconds: float = 1.0, *, first: bool = False, hits: int = 0, **fields: object
) -> DecodeRecord:
    made = replace(
        RECORD, identity=replace(RECORD.identity, vae_hash=vae), wall_ns=int(seconds * SECOND), first_of_shape=first,
        caches=(CacheUse(name="tuning", lookups=1, hits=hits),),
    )  # fmt: skip
    return replace(made, **fields)  # type: ignore[arg-type]


def on_hip(made: DecodeRecord) -> DecodeRecord:
    return replace(made, environment=replace(made.environment, hip="7.1.0", device="Radeon 8060S Graphics"))


def test_groups_are_told_by_time() -> None:
    slow, quick = usage_of([record("a", 1), record("b", 5, first=True), record("a", 2), record("b", 1)])
    assert (slow.vae_hash, slow.decodes, slow.total_ns, slow.first_share) == ("b", 2, 6 * SECOND, 5 / 6)
    assert (quick.vae_hash, quick.decodes, quick.total_ns, quick.first_ns) == ("a", 2, 3 * SECOND, 0)
    assert (slow.family, slow.dtype, slow.device) == ("kl", "float32", "cpu")
    assert slow.shapes == ((1, 4, 64, 64),)


def test_dtypes_and_devices_are_groups_of_their_own() -> None:
    half = replace(record(), identity=replace(record().identity, loaded_dtype="bfloat16"))
    assert len(usage_of([record(), half, on_hip(record())])) == 3


def test_what_tuning_cannot_change_is_left_out() -> None:
    collector = make_collector()
    record_failure(collector, DecodeCancelled("stopped"), busy_events)
    blended = replace(record(), plan=replace(PLAN, method="blended", approximate=True))
    assert usage_of([*collector.records(), blended, replace(record(), plan=None)]) == ()


def test_suggestions_are_what_is_used_often_and_not_tuned() -> None:
    once, often, done = [record("once", 9)], [record("often", 1)] * 3, [record("done", 5, hits=1)] * 2
    (found,) = suggest(usage_of([*once, *often, *done]))
    assert found.usage.vae_hash == "often"
    assert found.reason == "3 decodes took 3.00 s; not tuned"


def test_first_decodes_of_a_shape_are_a_reason() -> None:
    (found,) = suggest(usage_of([record(seconds=9, first=True), record(seconds=1)]))
    assert found.reason == "2 decodes took 10.0 s; 90.0 % of it in first decodes of a shape; not tuned"
    (found,) = suggest(usage_of([on_hip(record(seconds=9, first=True)), on_hip(record(seconds=1))]))
    assert "first decodes of a shape, where kernels are searched for" in found.reason
    (found,) = suggest(usage_of([record(seconds=1, first=True), record(seconds=9)]))
    assert "first decodes" not in found.reason


def test_changed_versions_are_a_reason() -> None:
    (usage,) = usage_of([record(hits=1), record(hits=0)])
    assert (usage.tuned, usage.was_tuned) == (False, True)
    (found,) = suggest([usage])
    assert found.reason.endswith("was tuned, but not for the versions it ran with last")


def test_a_record_is_tuned_by_its_lookup_or_its_choices() -> None:
    assert is_tuned(record(hits=1))
    assert not is_tuned(record())
    assert is_tuned(replace(record(), caches=None, plan=replace(PLAN, choices=(TUNED,))))
    assert not is_tuned(replace(record(), caches=None, plan=None))


def test_choices_say_who_made_them() -> None:
    reasons = {
        "tuned: 3% faster": "tuned", "default: small": "default", "rule: the only one": "rule", "asked for": "asked",
        "as asked": "asked", "at most 8": "rule",
    }  # fmt: skip
    choices = [Choice(name=f"c{i}", value="x", reason=reason) for i, reason in enumerate(reasons)]
    assert [origin_of(c) for c in choices] == list(reasons.values())
    assert origins_of(choices) == {"tuned": ("c0",), "asked": ("c3", "c4"), "rule": ("c2", "c5"), "default": ("c1",)}
    assert origins_of([]) == {}


def test_the_panel_counts_choices_by_who_made_them() -> None:
    other = Choice(name="plan", value="tiles", reason="default: stable shapes")
    text = render_record(replace(RECORD, plan=replace(PLAN, choices=(TUNED, other, *PLAN.choices))))
    (line,) = (line for line in text.splitlines() if line.split()[:1] == ["choices"])
    assert "1 tuned, 1 by rule, 1 by default" in line
    assert "tuned: layout" in line


def test_suggestions_as_text() -> None:
    found = suggest(usage_of([record("a" * 40)] * 2))
    assert "a" * 16 + " " in render_suggestions(found)
    assert "no decoder" in render_suggestions(())
    assert [r.label for r in tuning_section(2, found).rows] == ["tuned", "tune next"]
    assert [(r.label, r.value) for r in tuning_section(None, ()).rows] == [("tuned", "n/a")]


def test_the_doctor_counts_entries_and_leaves_a_broken_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    assert read_tuned_entries(None) is None
    assert read_tuned_entries(tmp_path) == 0
    path.write_text('{"schema_version": 1, "entries": {"a": {}, "b": {}}}')
    assert read_tuned_entries(tmp_path) == 2
    for broken in ("{", "[]", '{"entries": 3}', "{}"):
        path.write_text(broken)
        assert read_tuned_entries(tmp_path) is None
        assert path.read_text() == broken
