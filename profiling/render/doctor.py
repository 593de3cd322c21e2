"""The doctor's report as titled rows of words."""

from __future__ import annotations

from ..doctor import Finding, Report
from ..doctor_facts import Facts, FolderFacts, KitchenFacts
from .sections import Row, Section
from .text import render_sections
from .units import format_bytes, format_count

UNKNOWN = "unknown"
HIDDEN = "(not shown)"
_FP32 = {"none": "as torch decides", "ieee": "full float32", "tf32": "TF32 where the device has it"}


def render_report(report: Report) -> str:
    """The whole report as a panel, what was found wrong at its end."""
    facts = report.facts
    sections = (
        _device(facts), _memory(facts), _versions(facts), _flags(facts), _kitchen(facts.kitchen), _kept(facts),
        _variables(report), _exports(report), _findings(report),
    )  # fmt: skip
    return render_sections("Halo VAE · doctor", [s for s in sections if s.rows])


def warning_rows(report: Report) -> tuple[Row, ...]:
    """Errors and warnings in one line each."""
    return tuple(
        Row(label=f.severity, value=f"{f.title}: {f.advice}") for f in report.findings if f.severity != "note"
    )  # fmt: skip


def _device(facts: Facts) -> Section:
    d = facts.device
    rows = [Row(label="device", value=d.name, note=d.model or "")]
    if d.kind in ("hip", "cuda"):
        units = _count(d.compute_units, "compute unit")
        arch = d.gfx or (None if d.capability is None else "sm_{}{}".format(*d.capability))
        said = f"the kernel says {d.kernel_gfx}" if d.kernel_gfx not in (None, d.gfx) else ""
        rows += [
            Row(label="architecture", value=_text(arch), note=said or d.family),
            Row(label="kind", value="APU, shares the host's memory" if d.unified_memory else "card", note=units),
            Row(label="torch built for", value=_text(None if d.built_for is None else ", ".join(d.built_for))),
        ]
    rows += [
        Row(label="fast dtypes", value=", ".join(d.native_dtypes) or UNKNOWN),
        Row(label="default plan", value=d.strategy, note=d.layout),
        Row(label="batch cap", value=str(d.batch_cap)),
        Row(label="attention", value=d.attention),
        Row(label="convolutions", value=d.convolution),
        Row(label="processor", value=_text(facts.platform.cpu), note=_count(facts.platform.cpu_count, "logical CPU")),
        Row(label="GPU seen by torch", value={True: "yes", False: "no", None: UNKNOWN}[d.gpu_visible]),
    ]  # fmt: skip
    if facts.versions.hip is not None or d.kernel_gfx is not None:
        rows.append(Row(label="/dev/kfd", value=_text(facts.platform.kfd)))
    return Section(title="Device", rows=tuple(rows))


def _memory(facts: Facts) -> Section:
    m = facts.memory
    rows = [
        Row(label="host", value=_bytes(m.host_available_bytes), note=f"available of {_bytes(m.host_total_bytes)}"),
        Row(label="swap", value=_bytes(m.swap_used_bytes), note=f"used of {_bytes(m.swap_total_bytes)}"),
    ]
    if facts.device.kind == "hip":
        own = "carve-out" if facts.device.unified_memory else "card memory"
        rows += [
            Row(label=own, value=_bytes(m.carve_out_used_bytes), note=f"used of {_bytes(m.carve_out_total_bytes)}"),
            Row(label="GTT", value=_bytes(m.gtt_used_bytes), note=f"used of {_bytes(m.gtt_total_bytes)}"),
        ]
    if facts.device.kind in ("hip", "cuda"):
        rows.append(Row(label="torch", value=_bytes(m.torch_free_bytes), note=f"free of {_bytes(m.torch_total_bytes)}"))
    rows.append(Row(label="budget", value=_bytes(m.budget_bytes), note=m.budget_reason))
    rows += [Row(label="refused", value=text) for text in m.invalid_readings]
    return Section(title="Memory", rows=tuple(rows))


def _versions(facts: Facts) -> Section:
    v = facts.versions
    always = (("halo-vae", v.halo_vae), ("python", v.python), ("torch", v.torch))
    rocm = (("HIP", v.hip), ("ROCm", v.rocm), ("MIOpen", v.miopen))
    build = rocm if v.hip else (("CUDA", v.cuda), ("cuDNN", v.cudnn))
    given = () if v.hip is None and v.cuda is None else tuple((name, _text(value)) for name, value in build)
    system = ("system", f"{v.system} {v.kernel or UNKNOWN}{' (WSL)' if facts.platform.wsl else ''}")
    driver = (("driver", _text(v.driver)),) if given else ()
    rest = (("comfy-kitchen", v.comfy_kitchen or "not installed"), ("ComfyUI", v.comfyui or "not on this path"))
    pairs = (*always, *given, system, *driver, *rest)
    return Section(title="Versions", rows=tuple(Row(label=name, value=value) for name, value in pairs))


def _flags(facts: Facts) -> Section:
    f = facts.flags
    library = "MIOpen" if facts.versions.hip else "cuDNN"
    precise = {f.float32_convolution: _FP32.get(f.float32_convolution or "", UNKNOWN)}
    precise[f.float32_matmul] = _FP32.get(f.float32_matmul or "", UNKNOWN)
    pairs = (
        ("cudnn.enabled", _flag(f.cudnn_enabled), library), ("cudnn.benchmark", _flag(f.cudnn_benchmark), ""),
        ("cudnn.deterministic", _flag(f.cudnn_deterministic), ""),
        ("float32 convolutions", _text(f.float32_convolution), precise[f.float32_convolution]),
        ("float32 products", _text(f.float32_matmul), precise[f.float32_matmul]),
        ("flash attention", _flag(f.sdpa_flash), ""), ("efficient attention", _flag(f.sdpa_mem_efficient), ""),
        ("plain attention", _flag(f.sdpa_math), ""), ("cuDNN attention", _flag(f.sdpa_cudnn), ""),
        ("fp16 accumulation", _flag(f.fp16_accumulation), ""), ("fp16 reduced sums", _flag(f.fp16_reduced_sums), ""),
        ("bf16 reduced sums", _flag(f.bf16_reduced_sums), ""),
        *((("matrix products", _text(f.blas), ""),) if facts.device.kind in ("hip", "cuda") else ()),
        ("threads", _text(f.threads), f"{_text(f.interop_threads)} between operations"),
    )  # fmt: skip
    rows = tuple(Row(label=name, value=value, note=note) for name, value, note in pairs)
    return Section(title="Flags of torch in this process", rows=rows)


def _kitchen(k: KitchenFacts) -> Section:
    if not k.installed or k.importable is False:
        return Section(title="comfy-kitchen", rows=(Row(label="none", value=k.reason or HIDDEN),))
    rows = [Row(label=f.name, value={True: "there", False: "missing", None: UNKNOWN}[f.present]) for f in k.functions]
    rows += [
        Row(label=f"backend {b.name}", value="available" if b.available else "not available", note=b.reason or "")
        for b in k.backends
    ]
    if k.reason:
        rows.append(Row(label="package", value=k.reason))
    return Section(title="comfy-kitchen", rows=tuple(rows))


def _kept(facts: Facts) -> Section:
    rows = [_folder(f) for f in facts.folders]
    rows.append(Row(label="records", value=_count(facts.history_lines, "record")))
    tuned = UNKNOWN if facts.tuned_entries is None else format_count(facts.tuned_entries, "entry", "entries")
    rows.append(Row(label="tuned", value=tuned, note="`halo-vae tune --list` shows them"))
    pool = facts.pool
    held = "none: this process does not decode" if pool.held_bytes is None else format_bytes(pool.held_bytes)
    rows.append(Row(label="pool", value=held, note=f"at most {format_bytes(pool.keep_bytes)} between decodes"))
    return Section(title="Kept between decodes", rows=tuple(rows))


def _folder(f: FolderFacts) -> Row:
    size = "not there yet" if f.exists is False else UNKNOWN
    if f.bytes is not None:
        size = f"{format_bytes(f.bytes)} in {format_count(f.files, 'file')}"
    return Row(label=f.purpose, value=size, note=f.path or HIDDEN)


def _variables(report: Report) -> Section:
    rows = []
    for v in report.variables:
        shown = HIDDEN if v.value is None else v.value
        said = "not a value that it knows" if v.value_known is False else v.value_meaning
        rows.append(Row(label=v.name, value=shown, note=f"{v.meaning}; {said}" if said else v.meaning))
    for u in report.unknown_variables:
        advice = f"not known; is {u.similar} meant?" if u.similar else "not known here, which need not be wrong"
        rows.append(Row(label=u.name, value=advice))
    return Section(title="Environment variables that matter", rows=tuple(rows))


def _exports(report: Report) -> Section:
    rows = tuple(Row(label=e.line, value=e.reason) for e in report.exports)
    return Section(title="To set before starting", rows=rows)


def _findings(report: Report) -> Section:
    if not report.findings:
        return Section(title="Findings", rows=(Row(label="none", value="nothing here is known to be bad"),))
    return Section(title="Findings", rows=tuple(row for f in report.findings for row in _finding(f)))


def _finding(f: Finding) -> tuple[Row, ...]:
    seen = (Row(label="", value=f"seen: {f.seen}"),) if f.seen else ()
    advice = (Row(label="", value=f"do: {f.advice}"), Row(label="", value=f"see: {f.reference}"))
    return (Row(label=f.severity, value=f.title), *seen, *advice)


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _flag(value: bool | None) -> str:
    return UNKNOWN if value is None else "on" if value else "off"


def _bytes(n: int | None) -> str:
    return UNKNOWN if n is None else format_bytes(n)


def _count(n: int | None, one: str) -> str:
    return UNKNOWN if n is None else format_count(n, one)
