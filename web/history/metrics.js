/** The aggregate of the server's decodes. */

import { figure, figures, section } from "../panel/figures.js";
import { formatCount, formatSeconds, formatShare } from "../view/format.js";

/** @typedef {(value: number | null) => string} Format */

/** @type {[string, [string, string, Format][]][]} */
const GROUPS = [
  ["Decodes since ComfyUI started", [
    ["ended well", "total_executions", formatCount],
    ["cancelled", "interrupted_executions", formatCount],
    ["failed", "failed_executions", formatCount],
    ["average time", "average_execution_time", formatSeconds],
    ["first runs", "first_of_shape_executions", formatCount],
    ["average of first runs", "average_execution_time_first_of_shape", formatSeconds],
    ["average of warm runs", "average_execution_time_repeated", formatSeconds],
  ]],
  ["Rates", [
    ["cache hits", "cache_hit_rate", formatShare],
    ["memory from the pool", "memory_efficiency", formatShare],
    ["narrow precision kept", "precision_efficiency", formatShare],
    ["batch slots filled", "batch_efficiency", formatShare],
    ["prefetched in time", "prefetch_efficiency", formatShare],
  ]],
  ["Totals", [
    ["allocations avoided", "total_memory_saves", formatCount],
    ["ops in narrower precision", "total_precision_optimizations", formatCount],
    ["batched decodes", "total_batch_optimizations", formatCount],
    ["prefetch hits", "total_prefetch_hits", formatCount],
  ]],
];

/**
 * @param {Record<string, number | null>} metrics
 * @returns {HTMLElement[]}
 */
export function metricsSections(metrics) {
  return GROUPS.map(([title, rows]) =>
    section(title, figures(...rows.map(([label, name, format]) => figure(label, `metrics.${name}`, metrics[name] ?? null, format(metrics[name] ?? null))))),
  );
}
