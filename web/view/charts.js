/** Small charts of elements and SVG whose lengths are percentages: they follow the width of what holds them. */

import { element, svg } from "./elements.js";
import { formatCount, formatNs, isNumber } from "./format.js";
import { statusWords } from "./words.js";

/**
 * @typedef {object} Part of a stacked bar
 * @property {string} label
 * @property {number} value not negative
 * @property {string} text the value in words
 * @property {string} colour CSS
 * @property {string} [title] a longer text, shown by the pointer
 */

/**
 * A bar of parts that together fill it, and beside it the words for each part.
 *
 * @param {Part[]} parts in the order of the bar; those of no length are left out
 * @param {string} name what the bar shows
 * @returns {HTMLElement}
 */
export function stackedBar(parts, name) {
  const shown = parts.filter((part) => part.value > 0);
  const words = shown.map((part) => `${part.label} ${part.text}`).join(", ");
  return element(
    "div",
    { class: "halo-vae-stack", role: "img", "aria-label": `${name}: ${words || "nothing"}` },
    shown.map((part) =>
      element("span", {
        class: "halo-vae-stack-part",
        title: `${part.label}: ${part.text}${part.title ? ` (${part.title})` : ""}`,
        style: { "flex-grow": part.value, "background-color": part.colour },
      }),
    ),
  );
}

/**
 * The words for the parts of a bar, the largest first.
 *
 * @param {Part[]} parts
 * @param {(part: Part) => Record<string, any>} [attributes] more for each entry
 * @returns {HTMLElement}
 */
export function legend(parts, attributes = () => ({})) {
  const shown = parts.filter((part) => part.value > 0).sort((a, b) => b.value - a.value);
  return element(
    "ul",
    { class: "halo-vae-legend" },
    shown.map((part) =>
      element(
        "li",
        { title: part.title ?? null },
        element("span", { class: "halo-vae-swatch", style: { "background-color": part.colour }, "aria-hidden": "true" }),
        element("span", { class: "halo-vae-legend-label" }, part.label),
        element("span", { class: "halo-vae-legend-value", ...attributes(part) }, part.text),
      ),
    ),
  );
}

/**
 * A track on which `used` is filled and `predicted` marked; both against the larger of them.
 *
 * @param {number | null} predicted
 * @param {number | null} used
 * @param {string} label
 * @returns {HTMLElement}
 */
export function gauge(predicted, used, label) {
  const most = Math.max(predicted ?? 0, used ?? 0) * 1.04 || 1;
  const percent = (/** @type {number} */ value) => `${Math.min(100, (value / most) * 100)}%`;
  return element(
    "div",
    { class: "halo-vae-gauge", role: "img", "aria-label": label, title: label },
    isNumber(used) && element("span", { class: "halo-vae-gauge-fill", style: { width: percent(used) } }),
    isNumber(predicted) && element("span", { class: "halo-vae-gauge-mark", style: { left: percent(predicted) } }),
  );
}

/**
 * The last decodes of a node as columns, newest right: solid is warm, hollow a first run, a cross one that failed.
 *
 * @param {import("../types.js").Recent[]} recent newest last
 * @param {number | null} medianNs marked by a line
 * @returns {HTMLElement}
 */
export function sparkline(recent, medianNs) {
  const ended = recent.filter((run) => run.status === "ok");
  const most = Math.max(1, medianNs ?? 0, ...ended.map((run) => run.wall_ns));
  const newest = recent.at(-1);
  const label = newest
    ? `The last ${formatCount(recent.length, "decode")} of this node; the newest took ${formatNs(newest.wall_ns)}`
    : "No decodes of this node";
  return element(
    "div",
    { class: "halo-vae-spark", role: "img", "aria-label": label },
    recent.map((run) => sparkColumn(run, most, run === newest)),
    isNumber(medianNs) &&
      element("span", {
        class: "halo-vae-spark-median",
        title: `median ${formatNs(medianNs)}`,
        style: { bottom: `${(medianNs / most) * 100}%` },
      }),
  );
}

/**
 * @param {import("../types.js").Recent} run
 * @param {number} most
 * @param {boolean} isNewest
 * @returns {HTMLElement}
 */
function sparkColumn(run, most, isNewest) {
  const { word, sign, state } = statusWords(run.status);
  const kind = state === "ok" ? (run.cold ? "cold" : "warm") : state;
  const words = [word, run.cold ? "first run of its shapes" : null, run.same ? null : "other VAE or size"];
  return element(
    "span",
    {
      class: "halo-vae-spark-run",
      "data-kind": kind,
      "data-other": !run.same,
      "data-newest": isNewest,
      title: `${formatNs(run.wall_ns)}: ${words.filter(Boolean).join(", ")}`,
    },
    state === "ok"
      ? element("span", { class: "halo-vae-spark-bar", style: { height: `${(run.wall_ns / most) * 100}%` } })
      : element("span", { class: "halo-vae-spark-sign" }, sign),
  );
}

/**
 * @typedef {object} Point of a chart of runs
 * @property {number | null} value
 * @property {string} title
 * @property {string} status
 * @property {boolean | null} cold
 */

/**
 * Every run as a point, oldest left: a disc is warm, a ring a first run, a cross one that failed or was cancelled.
 *
 * @param {string} name
 * @param {Point[]} points oldest first
 * @param {(value: number) => string} format
 * @returns {HTMLElement}
 */
export function runChart(name, points, format) {
  const known = points.flatMap((point) => (isNumber(point.value) ? [point.value] : []));
  const most = Math.max(0, ...known);
  const label = known.length
    ? `${name} of ${formatCount(known.length, "run")}: from ${format(Math.min(...known))} to ${format(most)}`
    : `${name}: not measured`;
  const place = (/** @type {number} */ i) => `${points.length < 2 ? 50 : 1.5 + (i / (points.length - 1)) * 97}%`;
  const level = (/** @type {number} */ value) => `${94 - (most ? value / most : 0) * 88}%`;
  return element(
    "figure",
    { class: "halo-vae-chart" },
    element("figcaption", {}, name),
    element(
      "div",
      { class: "halo-vae-chart-body" },
      element("div", { class: "halo-vae-chart-scale", "aria-hidden": "true" },
        element("span", {}, known.length ? format(most) : ""), element("span", {}, known.length ? format(most / 2) : ""), element("span", {}, known.length ? "0" : ""),
      ),
      svg(
        "svg",
        { role: "img", "aria-label": label },
        [0, 0.5, 1].map((part) =>
          svg("line", { class: "halo-vae-chart-grid", x1: "0", x2: "100%", y1: level(most * part), y2: level(most * part) }),
        ),
        points.map((point, i) => (isNumber(point.value) ? mark(point, place(i), level(point.value)) : null)),
      ),
    ),
  );
}

/**
 * @param {Point} point
 * @param {string} x
 * @param {string} y
 * @returns {SVGElement}
 */
function mark(point, x, y) {
  const { state } = statusWords(point.status);
  const kind = state === "ok" ? (point.cold ? "cold" : "warm") : state;
  const title = svg("title", {}, point.title);
  if (state === "ok") return svg("circle", { "data-kind": kind, cx: x, cy: y, r: 3.5 }, title);
  return svg("text", { "data-kind": kind, x, y, "text-anchor": "middle", "dominant-baseline": "central" }, title, "×");
}
