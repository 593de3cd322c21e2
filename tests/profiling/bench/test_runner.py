"""What is run, in which caches, in what order, and what one line says of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halo_vae.profiling.bench.cases import CASES, BenchError
from halo_vae.profiling.bench.request import BenchRequest, ComfyUI
from halo_vae.profiling.bench.results import ResultsFile, RunLine, line_of, parse_line
from halo_vae.profiling.bench.runner import BenchOutcome, Progress, run_bench
from halo_vae.tests.profiling.bench.fake_child import ENVIRONMENT
from halo_vae.tests.profiling.bench.fakes_bench import HALF, IMAGE, asked, fake_tools, request

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake interpreter is a shell script")


def bench(tmp_path: Path, wanted: BenchRequest, **faults: str) -> BenchOutcome:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return run_bench(wanted, work, lambda line: None, tools=fake_tools(tmp_path, **faults))


def test_hot_line_holds_samples_warm_ups_errors_and_where_it_ran(tmp_path: Path) -> None:
    (line,) = bench(tmp_path, request(threads=2, warm_ups=2, seed=7)).lines
    assert (line.status, line.case, line.configuration, line.scenario) == ("ok", "image", "phase3", "hot")
    assert line.samples_ns == (1000, 1001, 1002)
    assert line.warm_ups_ns == (9000, 9001)
    assert (line.host, line.arch, line.device, line.dtype, line.threads) == ("here", "x86_64", "cpu", "fp32", 2)
    assert (line.vae, line.seed, line.latent_shape, line.asked_samples) == ("tiny", 7, (1, 4, 64, 64), 3)
    assert (line.max_error, line.mean_error, line.psnr_db, line.psnr_infinite) == (0.001, 0.0001, 70.0, False)
    assert (line.served, line.page_cache, line.note) == ("recomputed", "kept", "the small bundled VAE")
    assert line.environment.torch == ENVIRONMENT["torch"]
    assert parse_line(line_of(line)) == line


def test_equal_pictures_have_no_psnr_but_a_flag(tmp_path: Path) -> None:
    (line,) = bench(tmp_path, request(configurations=("baseline",))).lines
    assert (line.psnr_db, line.psnr_infinite) == (None, True)


def test_cold_samples_are_processes_with_empty_caches_of_their_own(tmp_path: Path) -> None:
    (line,) = bench(tmp_path, request(scenarios=("cold",))).lines
    assert line.samples_ns == (1000, 1000, 1000)
    assert line.cache_charges == 6  # two shapes in each of three processes
    runs = asked(tmp_path)
    assert len(runs) == 3
    assert len({run["environ"]["MIOPEN_USER_DB_PATH"] for run in runs}) == 3
    assert len({run["environ"]["TRITON_REDIS_KEY_FORMAT"] for run in runs}) == 3
    assert all(run["request"]["with_loading"] and not run["request"]["warm_ups"] for run in runs)


def test_warm_processes_have_copies_of_the_hot_runs_caches_and_another_size(tmp_path: Path) -> None:
    hot, warm = bench(tmp_path, request(scenarios=("warm", "hot"), plan="tiles")).lines
    assert (hot.scenario, warm.scenario) == ("hot", "warm")
    assert (hot.cache_charges, warm.cache_charges) == (0, 0)
    assert warm.latent_shape == (1, 4, 56, 72)
    assert warm.shapes is not None
    assert warm.shapes.not_in_hot == ()
    folders = [run["environ"]["MIOPEN_USER_DB_PATH"] for run in asked(tmp_path)]
    assert len(set(folders)) == 4  # a copy for each: no warm run warms the next


def test_warm_run_names_shapes_that_the_hot_one_did_not_ask_for(tmp_path: Path) -> None:
    _, warm = bench(tmp_path, request(scenarios=("warm", "hot"), plan="strips")).lines
    assert warm.shapes is not None
    assert warm.shapes.not_in_hot == ("[1, 4, 56, 72] * 3x3", "[1, 4, 56, 72] * 1x1")
    assert warm.cache_charges == 6


def test_warm_alone_fills_the_caches_first_and_keeps_no_line_of_that(tmp_path: Path) -> None:
    (warm,) = bench(tmp_path, request(scenarios=("warm",), plan="tiles")).lines
    assert (warm.scenario, warm.cache_charges) == ("warm", 0)
    first = asked(tmp_path)[0]["request"]
    assert (first["warm_ups"], first["runs"], first["latent_shape"]) == (1, 0, [1, 4, 64, 64])


def test_warm_run_without_a_hot_one_that_ended_well_is_none(tmp_path: Path) -> None:
    hot, warm = bench(tmp_path, request(scenarios=("hot", "warm")), fault="crash", fault_at="1").lines
    assert (hot.status, warm.status) == ("crashed", "failed")
    assert "nothing is warm" in (warm.error or "")


@pytest.mark.parametrize(("found", "label"), [("dropped", "frozen"), ("unverified", "frozen*")])
def test_frozen_run_drops_the_file_before_each_process(tmp_path: Path, found: Any, label: str) -> None:
    dropped: list[Path] = []

    def drop(path: Path) -> Any:
        dropped.append(path)
        return found

    work = tmp_path / "work"
    work.mkdir()
    tools = replace(fake_tools(tmp_path), drop=drop)
    (line,) = run_bench(request(scenarios=("frozen",)), work, lambda line: None, tools=tools).lines
    assert len(dropped) == 3
    assert (line.page_cache, line.scenario_label, line.is_verified) == (found, label, found == "dropped")


@pytest.mark.parametrize(
    ("fault", "status", "samples"),
    [
        ("crash", "crashed", (1000, 1001)),
        ("error", "failed", (1000, 1001)),
        ("nan", "not_finite", ()),  # a picture that is not right has no time
    ],
)
def test_run_that_goes_wrong_is_a_line_and_the_others_are_run(
    tmp_path: Path, fault: str, status: str, samples: tuple[int, ...]
) -> None:
    wanted = request(configurations=("phase1", "phase3"))
    bad, good = bench(tmp_path, wanted, fault=fault, fault_at="2", fault_in="phase1").lines
    assert (bad.status, bad.samples_ns) == (status, samples)
    assert bad.error
    assert good.status == "ok"


def test_hang_is_a_timeout(tmp_path: Path) -> None:
    (line,) = bench(tmp_path, request(time_limit_s=4.0), fault="hang", fault_at="2").lines
    assert (line.status, line.samples_ns) == ("timeout", (1000, 1001))


def test_errors_tell_no_paths(tmp_path: Path) -> None:
    (line,) = bench(tmp_path, request(), fault="error").lines
    assert line.error == "WeightsError: the VAE's file holds no tensor 'x'"


def test_fp16_is_replaced_where_the_device_lacks_it_and_the_line_says_so(tmp_path: Path) -> None:
    (line,) = bench(tmp_path, request(cases=(HALF,))).lines
    assert line.dtype == "bf16"
    assert line.note == "the small bundled VAE; bf16 in place of fp16"


def test_stock_runs_in_its_own_python_and_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ComfyUI"
    folder.mkdir()
    host = ComfyUI(folder=folder, python="python-of-comfyui")
    stock, ours = bench(tmp_path, request(configurations=("stock", "phase1"), comfyui=host)).lines
    assert (stock.status, ours.status) == ("ok", "ok")
    runs = {run["request"]["configuration"]: run for run in asked(tmp_path)}
    assert runs["stock"]["cwd"] == str(folder)
    assert runs["stock"]["request"]["comfyui"] == str(folder)
    assert runs["phase1"]["cwd"] != str(folder)


def test_threads_and_waiting_are_set_before_torch_starts(tmp_path: Path) -> None:
    bench(tmp_path, request(threads=3))
    (run,) = asked(tmp_path)
    assert (run["environ"]["OMP_NUM_THREADS"], run["environ"]["OMP_WAIT_POLICY"]) == ("3", "passive")


def test_picture_to_compare_with_is_made_once_for_equal_latents(tmp_path: Path) -> None:
    twin = replace(IMAGE, key="twin")
    bench(tmp_path, request(cases=(IMAGE, twin), configurations=("phase1", "phase2")))
    assert len(asked(tmp_path, "reference")) == 1


def test_caches_and_work_are_gone_at_the_end(tmp_path: Path) -> None:
    bench(tmp_path, request(scenarios=("cold", "hot", "warm")))
    assert list((tmp_path / "work" / "caches").iterdir()) == []


def test_ctrl_c_keeps_whole_samples(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.line is None and 0 < progress.done < progress.total:
            seen.append(progress)
            if len(seen) == 2:
                raise KeyboardInterrupt

    seen: list[Progress] = []
    kept: list[RunLine] = []
    work = tmp_path / "work"
    work.mkdir()
    wanted = request(configurations=("phase1", "phase2"))
    outcome = run_bench(wanted, work, kept.append, report=stop, tools=fake_tools(tmp_path))
    assert outcome.cancelled
    (line,) = kept
    assert (line.status, line.configuration, line.samples_ns) == ("cancelled", "phase1", (1000, 1001))
    assert line.counts


def test_progress_grows_to_its_total(tmp_path: Path) -> None:
    seen: list[Progress] = []
    work = tmp_path / "work"
    work.mkdir()
    wanted, tools = request(scenarios=("cold", "hot")), fake_tools(tmp_path)
    run_bench(wanted, work, lambda line: None, report=seen.append, tools=tools)
    done = [p.done for p in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total
    assert sum(p.line is not None for p in seen) == 2


def test_full_disk_ends_the_benchmark_with_what_was_kept(tmp_path: Path) -> None:
    kept: list[RunLine] = []

    def keep(line: RunLine) -> None:
        if kept:
            raise BenchError("the result was not added (No space left on device)")
        kept.append(line)

    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(BenchError, match="No space"):
        run_bench(request(configurations=("phase1", "phase2")), work, keep, tools=fake_tools(tmp_path))
    assert [line.configuration for line in kept] == ["phase1"]
    assert list((work / "caches").iterdir()) == []


def test_interpreter_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    def spawn(*args: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    with pytest.raises(BenchError, match="cannot be started"):
        run_bench(request(), tmp_path, lambda line: None, tools=replace(fake_tools(tmp_path), spawn=spawn))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"runs": 0}, "--runs"), ({"warm_ups": 0}, "--warm-ups"), ({"threads": 0}, "--threads"),
        ({"time_limit_s": 0.0}, "--time-limit"), ({"time_limit_s": float("nan")}, "--time-limit"),
        ({"seed": -1}, "--seed"), ({"configurations": ("stock",)}, "--comfyui"), ({"cases": ()}, "nothing"),
        ({"lane": "nightly", "scenarios": ("frozen",)}, "nightly"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_are_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(BenchError, match=word):
        request(**changes)


def test_results_file_takes_every_line(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "results.jsonl")
    work = tmp_path / "work"
    work.mkdir()
    outcome = run_bench(request(scenarios=("cold", "hot", "warm")), work, results.append, tools=fake_tools(tmp_path))
    assert results.read().runs == outcome.lines


def test_default_is_the_eight_cases_hot() -> None:
    wanted = BenchRequest(host="here")
    assert wanted.cases == CASES
    assert wanted.scenarios == ("hot",)
    assert wanted.runs == 5


@pytest.mark.parametrize("asked_for", [False, True])
def test_own_caches_are_emptied_before_cold_runs_only_where_that_is_asked(tmp_path: Path, asked_for: bool) -> None:
    kernel = tmp_path / "triton" / "kernel"
    kernel.parent.mkdir()
    kernel.write_text("x")
    tools = fake_tools(tmp_path)
    folders = {name: str(tmp_path / "none") for name in ("HALO_VAE_CACHE_DIR", "MIOPEN_USER_DB_PATH")}
    folders |= {"MIOPEN_CUSTOM_CACHE_DIR": folders["MIOPEN_USER_DB_PATH"], "TRITON_CACHE_DIR": str(kernel.parent)}
    tools = replace(tools, environ={**tools.environ, **folders, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "none")})
    work = tmp_path / "work"
    work.mkdir()
    run_bench(request(scenarios=("cold",), purge_real_caches=asked_for), work, lambda line: None, tools=tools)
    assert kernel.exists() != asked_for
    assert kernel.parent.is_dir()
