from __future__ import annotations

import csv
import io
from dataclasses import fields, replace

import pytest

from halo_vae.profiling.export import csv_of
from halo_vae.profiling.export.table import COLUMNS, cell
from halo_vae.profiling.record import DecodeStatus
from halo_vae.profiling.rows import HistoryRow, row_of
from halo_vae.tests.profiling.fakes import RECORD_ID, busy_events, make_collector, record_events

ROW = replace(
    row_of(record_events(make_collector(), busy_events)), wall_ns=1_500_000_000, energy_uj=None, vae_hash="0123abcd"
)


def parsed(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


def test_the_whole_text_of_one_row() -> None:
    head = (
        "record_id,started_at,status,error,family,vae_hash,device,method,approximate,precision,loaded_dtype,"
        "latent_shape,image_shape,wall_ns,first_of_shape,predicted_bytes,measured_bytes,used_bytes,n_tiles,"
        "n_fallbacks,temporal_consistency,energy_uj,level,environment_id"
    )
    line = (
        f"{RECORD_ID},2026-01-02T03:04:05.678+00:00,ok,,kl,0123abcd,cpu,exact,false,bfloat16,float32,"
        f"1x4x64x64,1x512x512x3,1500000000,true,400,,,1,1,0.75,,summary,{ROW.environment_id}"
    )
    assert csv_of([ROW]) == f"{head}\r\n{line}\r\n"


def test_no_rows_are_a_head_alone() -> None:
    assert csv_of([]) == ",".join(COLUMNS) + "\r\n"
    assert tuple(f.name for f in fields(HistoryRow)) == COLUMNS


def test_quotes_commas_and_line_breaks_come_back_as_they_were() -> None:
    error = 'no "room", none\r\nat all\n'
    row = replace(ROW, status=DecodeStatus.ERROR, error=error)
    assert '"no ""room"", none\r\nat all\n"' in csv_of([row])
    assert parsed(csv_of([row, ROW]))[1][COLUMNS.index("error")] == error
    assert [len(line) for line in parsed(csv_of([row, ROW]))] == [len(COLUMNS)] * 3


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_what_a_spreadsheet_would_run_is_text(first: str) -> None:
    hostile = f"{first}HYPERLINK(1)"
    row = replace(ROW, family=hostile, error=hostile, device=hostile)
    line = parsed(csv_of([row]))[1]
    assert [line[COLUMNS.index(name)] for name in ("family", "error", "device")] == [f"'{hostile}"] * 3


def test_numbers_stay_numbers() -> None:
    assert [cell(v) for v in (-5, -0.25, 0, 12, True, False, None, (1, 4, 8), (), "a=b")] == [
        "-5", "-0.25", "0", "12", "true", "false", "", "1x4x8", "", "a=b",
    ]  # fmt: skip


def test_text_that_no_file_can_hold_is_mended() -> None:
    assert cell("a\udc80b\x00c") == "a?bc"
    csv_of([replace(ROW, family="a\udc80\x00")]).encode()
