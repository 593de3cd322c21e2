/** Figures that follow from a full record, as the server works them out for a panel. */

/** Dtypes by the names that panels have for them. */
const SHARES = { fp16: "float16", bf16: "bfloat16", fp32: "float32" };

/**
 * @param {import("../types.js").DecodeRecord} record
 * @returns {import("../types.js").Summary}
 */
export function summaryOf(record) {
  const { caches, memory, plan, pool, precision } = record;
  const moved = plan?.bytes_moved || null;
  const used = usedBytes(record);
  const planned = memory?.planned;
  const predicted = planned ? planned.pool + planned.scratch + planned.packed + planned.output + (planned.host ?? 0) : null;
  const rate = record.status === "ok" && moved !== null ? share(moved * 1e9, record.wall_ns) : null;
  const copy = /** @type {any} */ (record).copy_bytes_per_s ?? null;
  return {
    used_bytes: used,
    prediction_ratio: share(predicted, used),
    conversion_share: precision ? share(precision.converted_bytes, moved) : null,
    bytes_per_s: rate,
    bandwidth_share: share(rate, copy),
    parallel_efficiency: record.identity.device.startsWith("cpu") ? share(record.cpu_time_ns, record.wall_ns * record.environment.threads) : null,
    temporal_consistency: record.boundaries.length ? Math.min(...record.boundaries.map((b) => b.smoothness)) : null,
    fragmentation_bytes: difference(memory?.reserved.peak_bytes, memory?.allocated.peak_bytes),
    free_bytes: null,
    cache_hit_rate: caches ? share(sum(caches.map((c) => c.hits)), sum(caches.map((c) => c.lookups))) : null,
    cache_hit_rates: Object.fromEntries((caches ?? []).map((c) => [c.name, share(c.hits, c.lookups)])),
    pool_hit_rate: pool ? share(pool.hits, pool.requests) : null,
    mac_shares: macShares(precision?.kept ?? []),
  };
}

/**
 * The measured peak above the start, and what the decode used of the memory that the pool held before.
 *
 * @param {import("../types.js").DecodeRecord} record
 * @returns {number | null}
 */
function usedBytes({ memory, pool }) {
  const measured = memory?.allocated.above_start_bytes ?? memory?.process.above_start_bytes ?? null;
  if (measured === null) return null;
  return measured + Math.min(pool?.held_start_bytes ?? 0, memory?.planned?.pool ?? 0);
}

/**
 * @param {import("../types.js").Macs[]} kept
 * @returns {Record<string, number> | null}
 */
function macShares(kept) {
  const total = sum(kept.map(({ macs }) => macs));
  if (!total) return null;
  const of = (/** @type {string} */ name) => sum(kept.filter(({ dtype }) => dtype === name).map(({ macs }) => macs)) / total;
  return Object.fromEntries(Object.entries(SHARES).map(([short, name]) => [short, of(name)]));
}

/**
 * @param {number | null | undefined} part
 * @param {number | null | undefined} whole
 * @returns {number | null} null where either is unknown or there is no whole
 */
function share(part, whole) {
  return part === null || part === undefined || !whole ? null : part / whole;
}

/**
 * @param {number | null | undefined} more
 * @param {number | null | undefined} less
 * @returns {number | null}
 */
function difference(more, less) {
  return more === null || more === undefined || less === null || less === undefined ? null : more - less;
}

/**
 * @param {number[]} values
 * @returns {number}
 */
function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
