/** The figures of a panel: elements made from what the server sent. */

import { gauge, legend, sparkline, stackedBar } from "../view/charts.js";
import { element } from "../view/elements.js";
import { formatBytes, formatCount, formatNs, formatRatio, formatScore, formatShape, formatShare, isNumber } from "../view/format.js";
import { dtypeColour, PHASE_TITLES, phaseColour, PHASES, shortDtype, sizeWords, statusWords } from "../view/words.js";

/** Changes smaller than this share of the median are called none. */
const SAME_WITHIN = 0.01;

/** @typedef {import("../types.js").PanelData} PanelData */

/**
 * The lines on top: how the decode ended, how long it took, and how that compares.
 *
 * @param {PanelData} panel
 * @param {HTMLElement | null} [action] a button at the end of the first line
 * @returns {HTMLElement}
 */
export function headline(panel, action = null) {
  const { record } = panel;
  const { word, sign, state } = statusWords(record.status);
  const size = sizeWords(record.image_shape, record.request.latent_shape);
  return element(
    "div",
    { class: "halo-vae-headline" },
    element(
      "div",
      { class: "halo-vae-total" },
      element("span", { class: "halo-vae-time", "data-figure": "wall_ns", "data-value": record.wall_ns }, formatNs(record.wall_ns)),
      element("span", { class: "halo-vae-badge", "data-state": state }, element("span", { "aria-hidden": "true" }, sign), ` ${word}`),
      record.first_of_shape === true &&
        element("span", { class: "halo-vae-badge", "data-state": "cold", title: "It may hold a search for kernels" }, "first run of these shapes"),
      action && element("span", { class: "halo-vae-action" }, action),
    ),
    state === "ok" && panel.recent.length > 0 && change(panel),
    element("div", { class: "halo-vae-what" }, `${record.identity.family}, ${size}`),
  );
}

/**
 * @param {PanelData} panel
 * @returns {HTMLElement}
 */
function change(panel) {
  const { median_ns: median, n_median: n } = panel;
  if (!isNumber(median) || median <= 0) {
    return element("div", { class: "halo-vae-change", "data-figure": "change", "data-value": "" }, "no earlier run like it to compare with");
  }
  const part = panel.record.wall_ns / median - 1;
  const against = `the median ${formatNs(median)} of ${formatCount(n, "run")}`;
  const same = Math.abs(part) < SAME_WITHIN;
  const text = same
    ? `= as fast as ${against}`
    : part > 0
      ? `▲ ${formatShare(part)} slower than ${against}`
      : `▼ ${formatShare(-part)} faster than ${against}`;
  const kind = same ? "same" : part > 0 ? "slower" : "faster";
  return element("div", { class: "halo-vae-change", "data-change": kind, "data-figure": "change", "data-value": part }, text);
}

/**
 * Where the time went.
 *
 * @param {import("../types.js").DecodeRecord} record
 * @returns {HTMLElement | null}
 */
export function phases(record) {
  const times = record.phases;
  if (!times) return null;
  const total = PHASES.reduce((sum, phase) => sum + (times[`${phase}_ns`] ?? 0), 0);
  const parts = PHASES.map((phase) => {
    const ns = times[`${phase}_ns`] ?? 0;
    const text = formatShare(total ? ns / total : null);
    return { label: phase, value: ns, text, colour: phaseColour(phase), title: `${PHASE_TITLES[phase]}: ${formatNs(ns)}` };
  });
  return section(
    null,
    stackedBar(parts, "Time by phase"),
    legend(parts, (part) => ({ "data-figure": `phases.${part.label}_ns`, "data-value": part.value })),
  );
}

/**
 * Peak memory, promised and measured.
 *
 * @param {PanelData} panel
 * @returns {HTMLElement | null}
 */
export function memory(panel) {
  const { record, summary } = panel;
  const planned = record.memory?.planned ?? record.plan?.predicted ?? null;
  const predicted = planned ? planned.pool + planned.scratch + planned.packed + planned.output + (planned.host ?? 0) : null;
  const used = summary.used_bytes;
  if (predicted === null && !isNumber(used) && !isNumber(summary.free_bytes)) return null;
  const label = `Peak memory: used ${formatBytes(used)}, predicted ${formatBytes(predicted)}`;
  return section(
    headed("Memory",
      figure("used", "used_bytes", used, isNumber(used) ? formatBytes(used) : "not measured"),
      figure("predicted", "predicted_bytes", predicted, formatBytes(predicted)),
      isNumber(summary.free_bytes) && figure("free", "free_bytes", summary.free_bytes, formatBytes(summary.free_bytes), "what the device could still give after the decode"),
    ),
    predicted !== null || isNumber(used) ? gauge(predicted, used, label) : null,
  );
}

/**
 * Which dtype did the arithmetic.
 *
 * @param {PanelData} panel
 * @returns {HTMLElement | null}
 */
export function precision(panel) {
  const kept = panel.record.precision?.kept ?? [];
  if (!kept.length) return null;
  const total = kept.reduce((sum, part) => sum + part.macs, 0);
  const parts = kept.map(({ dtype, macs }) => {
    const short = shortDtype(dtype);
    return { label: short, value: macs, text: formatShare(total ? macs / total : null), colour: dtypeColour(short) };
  });
  if (!total) {
    const names = kept.map(({ dtype }) => shortDtype(dtype)).join(", ");
    return section(headed("Precision", element("div", { class: "halo-vae-note" }, `${names}, work not countable`)));
  }
  return section(
    headed("Precision", legend(parts, (part) => ({ "data-figure": `mac_shares.${part.label}`, "data-value": part.value / total }))),
    stackedBar(parts, "Work by precision"),
  );
}

/**
 * Reuse, tiles, shapes, fallbacks, and for a video how smoothly its parts meet.
 *
 * @param {PanelData} panel
 * @returns {HTMLElement | null}
 */
export function counts(panel) {
  const { record, summary } = panel;
  const { convs, tiles } = record;
  const made = [
    record.pool && figure("pool hits", "pool_hit_rate", summary.pool_hit_rate, formatShare(summary.pool_hit_rate), "buffers that needed no new memory"),
    record.caches && figure("cache hits", "cache_hit_rate", summary.cache_hit_rate, formatShare(summary.cache_hit_rate), cacheWords(summary)),
    tiles && figure("tiles", "tiles", tiles.count, formatCount(tiles.count), tiles.grid ? `grid ${formatShape(tiles.grid)}` : ""),
    convs && figure("new shapes", "convs.new", convs.new, `${formatCount(convs.new)} of ${formatCount(convs.distinct)}`, `convolution shapes: ${formatCount(convs.new)} new, ${formatCount(convs.distinct - convs.new)} seen before; a new one may cost a search for kernels`),
    record.n_fallbacks !== null && figure("fallbacks", "n_fallbacks", record.n_fallbacks, record.n_fallbacks ? formatCount(record.n_fallbacks) : "none", fallbackWords(record)),
    isNumber(summary.prediction_ratio) && figure("prediction", "prediction_ratio", summary.prediction_ratio, formatRatio(summary.prediction_ratio), "predicted peak memory ÷ used"),
    isNumber(summary.temporal_consistency) && figure("consistency", "temporal_consistency", summary.temporal_consistency, formatScore(summary.temporal_consistency), "temporal consistency: the least smooth place where parts of the video meet; 1 is as smooth as the frames around"),
  ];
  const shown = made.filter(Boolean);
  return shown.length ? section(null, figures(...shown)) : null;
}

/**
 * The node's last decodes.
 *
 * @param {PanelData} panel
 * @returns {HTMLElement | null}
 */
export function recent(panel) {
  const runs = panel.recent;
  if (!runs.length) return null;
  const states = runs.map((run) => statusWords(run.status).state);
  const key = [
    runs.some((run, i) => states[i] === "ok" && !run.cold) && "▮ warm",
    runs.some((run, i) => states[i] === "ok" && run.cold) && "▯ first",
    states.includes("error") && "✕ failed",
    states.includes("interrupted") && "■ cancelled",
    runs.some((run) => !run.same) && "▒ other input",
    isNumber(panel.median_ns) && "┄ median",
  ];
  return section(
    headed(`Last ${formatCount(runs.length, "decode")}`, element("div", { class: "halo-vae-note" }, key.filter(Boolean).join("  "))),
    sparkline(runs, panel.median_ns),
  );
}

/**
 * @param {import("../types.js").Summary} summary
 * @returns {string}
 */
function cacheWords(summary) {
  return Object.entries(summary.cache_hit_rates ?? {}).map(([name, rate]) => `${name} ${formatShare(rate)}`).join(", ");
}

/**
 * @param {import("../types.js").DecodeRecord} record
 * @returns {string}
 */
function fallbackWords(record) {
  return record.fallbacks.slice(0, 6).map((f) => `${f.where}: ${f.given} → ${f.used} (${f.reason})`).join("\n");
}

/**
 * @param {string | HTMLElement | null} title
 * @param {...import("../view/elements.js").Child} children
 * @returns {HTMLElement}
 */
export function section(title, ...children) {
  const head = typeof title === "string" ? element("h4", {}, title) : title;
  return element("section", { class: "halo-vae-section" }, head, ...children);
}

/**
 * A title with what belongs to it on the same line.
 *
 * @param {string} title
 * @param {...import("../view/elements.js").Child} children a list, or figures
 * @returns {HTMLElement}
 */
function headed(title, ...children) {
  const isFigures = children.some((child) => child instanceof Element && child.matches("[data-pair]"));
  return element("div", { class: "halo-vae-headed" }, element("h4", {}, title), isFigures ? element("dl", {}, ...children) : children);
}

/**
 * @param {...import("../view/elements.js").Child} children made by `figure`
 * @returns {HTMLElement}
 */
export function figures(...children) {
  return element("dl", { class: "halo-vae-figures" }, ...children);
}

/**
 * A figure with its name.
 *
 * @param {string} label
 * @param {string} name of the field
 * @param {number | string | null} value as it was sent
 * @param {string} text the value in words
 * @param {string} [title]
 * @returns {HTMLElement}
 */
export function figure(label, name, value, text, title = "") {
  return element(
    "div",
    { title: title || null, "data-pair": true },
    element("dt", {}, label),
    element("dd", { "data-figure": name, "data-value": value ?? "" }, text),
  );
}
