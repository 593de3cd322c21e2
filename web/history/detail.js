/** One record in full. */

import { counts, headline, memory, phases, precision, section } from "../panel/figures.js";
import { element } from "../view/elements.js";
import { formatBytes, formatCount, formatMacs, formatMoment, formatNs, formatRate, formatScore, formatShape, formatShare, isNumber, NA } from "../view/format.js";
import { reasonOf, shortDtype, statusWords } from "../view/words.js";
import { opsTable } from "./ops.js";
import { summaryOf } from "./summary.js";

/** Most entries of a list that are shown. */
const SHOWN = 64;

/** @typedef {import("../types.js").DecodeRecord} DecodeRecord */

/**
 * @param {DecodeRecord} record
 * @returns {HTMLElement}
 */
export function detail(record) {
  const panel = {
    schema_version: 1, record_id: record.record_id ?? "", record, summary: summaryOf(record), recent: [], median_ns: null, n_median: 0,
  };
  const reason = reasonOf(record);
  return element(
    "article",
    { class: "halo-vae-detail", "data-record": record.record_id ?? "" },
    headline(panel),
    reason === null ? null : element("div", { class: "halo-vae-sentence", "data-state": statusWords(record.status).state }, reason),
    phases(record), memory(panel), precision(panel), counts(panel), opsTable(record),
    list("Plan", planRows(record)), list("Memory counters", memoryRows(record)), list("Work", workRows(record, panel.summary)),
    list("Fallbacks", record.fallbacks.slice(0, SHOWN).map((f) => [f.kind.replaceAll("_", " "), `${f.given} → ${f.used}`, `${f.where}: ${f.reason}`])),
    list("Where parts of the video meet", boundaryRows(record)),
    list("Tile shapes", (record.tiles?.shapes ?? []).map((t) => [formatShape(t.shape), shortDtype(t.dtype), formatCount(t.count, "tile")])),
    list("Where and when", placeRows(record)),
  );
}

/**
 * @param {string} title
 * @param {(string | null)[][]} rows name, value, and what more there is to say
 * @returns {HTMLElement | null}
 */
function list(title, rows) {
  if (!rows.length) return null;
  return section(
    title,
    element("table", { class: "halo-vae-list" }, element("tbody", {},
      rows.map(([label, value, note]) =>
        element("tr", {}, element("th", { scope: "row" }, label), element("td", {}, value, note ? element("span", { class: "halo-vae-note" }, note) : null)),
      ),
    )),
  );
}

/**
 * @param {DecodeRecord} record
 * @returns {(string | null)[][]}
 */
function planRows(record) {
  const { plan } = record;
  if (!plan) return [];
  const overlap = plan.overlap_px ? `, overlapping ${plan.overlap_px} px` : "";
  const rows = [
    ["method", plan.method, plan.approximate ? "approximate" : "equal to an untiled decode"],
    ["tiles", `${formatShape(plan.tile_grid)} of at most ${formatShape(plan.tile_px)} px${overlap}`, `${plan.strategy}, ${plan.layout}`],
    ["batch", `${formatCount(plan.n_passes, "pass", "passes")} of ${formatCount(plan.images_per_pass, "image")}`, null],
    ["work", plan.macs ? formatMacs(plan.macs) : NA, null],
  ];
  if (plan.chunk_frames) rows.push(["clip", `${formatCount(plan.n_chunks, "chunk")} of at most ${formatCount(plan.chunk_frames, "frame")}`, null]);
  return [...rows, ...plan.choices.map((/** @type {any} */ choice) => [choice.name, choice.value, choice.reason])];
}

/**
 * @param {DecodeRecord} record
 * @returns {(string | null)[][]}
 */
function memoryRows(record) {
  const { memory: peaks, plan } = record;
  const rows = [];
  const names = { pool: "pool", scratch: "scratch", packed: "packed weights", output: "output", host: "host memory" };
  for (const [name, label] of Object.entries(names)) {
    const bytes = plan?.predicted?.[name];
    if (bytes) rows.push([`predicted ${label}`, formatBytes(bytes), null]);
  }
  if (!peaks) return rows;
  for (const name of /** @type {const} */ (["allocated", "reserved", "process"])) {
    const { above_start_bytes: above, peak_bytes: peak, since_process_start: old } = peaks[name];
    if (peak !== null) rows.push([`${name}, peak`, formatBytes(peak), `${formatBytes(above)} above the start${old ? ", peak since process start" : ""}`]);
  }
  rows.push(["system, available at the start", formatBytes(peaks.available_bytes), null]);
  return rows;
}

/**
 * @param {DecodeRecord} record
 * @param {import("../types.js").Summary} summary
 * @returns {(string | null)[][]}
 */
function workRows(record, summary) {
  const { batch, energy_uj: energy, pool, precision: used, prefetch } = record;
  const rows = [];
  if (batch) rows.push(["images", formatCount(batch.images), `${formatCount(batch.n_passes, "pass", "passes")} with ${formatCount(batch.slots, "slot")}`]);
  if (pool) rows.push(["buffers from the pool", `${formatCount(pool.hits)} of ${formatCount(pool.requests)}`, `holds ${formatBytes(pool.held_bytes)}, lent at most ${formatBytes(pool.high_water_bytes)}`]);
  if (prefetch?.asked) rows.push(["prefetched in time", `${formatCount(prefetch.ready)} of ${formatCount(prefetch.asked)}`, null]);
  if (used) rows.push(["conversions", formatBytes(used.converted_bytes), `${formatShare(summary.conversion_share)} of the bytes moved`]);
  for (const { dtype, macs } of used?.redone ?? []) rows.push([`redone, ${shortDtype(dtype)}`, formatMacs(macs), null]);
  if (isNumber(summary.bytes_per_s)) rows.push(["memory bandwidth", formatRate(summary.bytes_per_s), isNumber(summary.bandwidth_share) ? `${formatShare(summary.bandwidth_share)} of a plain copy` : null]);
  if (isNumber(summary.parallel_efficiency)) rows.push(["threads busy", formatShare(summary.parallel_efficiency), "CPU time ÷ (time × threads)"]);
  if (isNumber(energy)) rows.push(["energy", `${(energy / 1e6).toFixed(1)} J`, null]);
  return rows;
}

/**
 * @param {DecodeRecord} record
 * @returns {(string | null)[][]}
 */
function boundaryRows(record) {
  const worst = [...record.boundaries].sort((a, b) => a.smoothness - b.smoothness).slice(0, SHOWN);
  const isBatch = worst.some(({ clip }) => clip > 0);
  return worst.map(({ clip, frame, smoothness }) => [isBatch ? `clip ${clip}, frame ${frame}` : `frame ${frame}`, formatScore(smoothness), null]);
}

/**
 * @param {DecodeRecord} record
 * @returns {(string | null)[][]}
 */
function placeRows(record) {
  const { environment: place, identity, request } = record;
  return [
    ["started", formatMoment(record.started_at), `profile level ${record.level}`],
    ["VAE", identity.family, identity.vae_hash ?? "without a hash"],
    ["latent", formatShape(request.latent_shape), request.latent_dtype],
    ["device", String(place.device ?? identity.device), place.device_arch ?? null],
    ["CPU", place.cpu ?? NA, isNumber(place.threads) ? formatCount(place.threads, "thread") : null],
    ["torch", place.torch ?? NA, ["cuda", "hip", "rocm", "miopen"].flatMap((n) => (place[n] ? [`${n} ${place[n]}`] : [])).join(", ") || null],
    ["environment", record.environment_id, "equal for records that may be compared directly"],
    ["record", record.record_id || NA, formatNs(record.wall_ns)],
  ];
}
