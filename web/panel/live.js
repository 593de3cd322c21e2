/** Where a running decode stands: elements that are made once and changed in place. */

import { element, setText } from "../view/elements.js";
import { formatBytes, formatNs, formatShare, isNumber } from "../view/format.js";
import { PHASE_TITLES } from "../view/words.js";

/** @typedef {import("../types.js").Progress} Progress */

/** @type {Record<string, string>} */
const STAGE_WORDS = {
  start: "starting", lower: "recognising the decoder", plan: "planning", load: "loading weights", decode: "decoding",
  transfer: "moving the picture out", sync: "waiting for the device",
};

const FIELDS = /** @type {const} */ (["tile", "chunk", "elapsed", "left", "speed", "memory", "op"]);

export class LiveView {
  constructor() {
    /** @type {Record<string, HTMLElement>} */
    this.values = {};
    /** @type {Record<string, HTMLElement>} */
    this.rows = {};
    this.stage = element("span", { class: "halo-vae-live-stage", "data-live": "stage" });
    this.percent = element("span", { class: "halo-vae-live-percent", "data-live": "percent" });
    this.fill = element("span", { class: "halo-vae-progress-fill" });
    this.bar = element(
      "div",
      { class: "halo-vae-progress", role: "progressbar", "aria-label": "Progress of the decode", "aria-valuemin": 0, "aria-valuemax": 100 },
      this.fill,
    );
    this.element = element(
      "div",
      { class: "halo-vae-live" },
      element("div", { class: "halo-vae-live-top" }, this.stage, this.percent),
      this.bar,
      element("dl", { class: "halo-vae-figures" }, FIELDS.map((name) => this.#row(name))),
    );
  }

  /**
   * @param {string} name
   * @returns {HTMLElement}
   */
  #row(name) {
    this.values[name] = element("dd", { "data-live": name });
    this.rows[name] = element("div", { hidden: true, class: name === "op" ? "halo-vae-wide" : null }, element("dt", {}, name), this.values[name]);
    return this.rows[name];
  }

  /** @param {Progress} progress */
  update(progress) {
    const share = progress.total ? Math.min(1, progress.done / progress.total) : null;
    setText(this.stage, stageWords(progress));
    setText(this.percent, share === null ? "" : `${Math.floor(share * 100)} %`);
    this.fill.style.setProperty("width", `${(share ?? 0) * 100}%`);
    this.bar.toggleAttribute("data-unknown", share === null);
    if (share === null) this.bar.removeAttribute("aria-valuenow");
    else this.bar.setAttribute("aria-valuenow", String(Math.floor(share * 100)));
    const words = liveWords(progress);
    for (const name of FIELDS) {
      const text = words[name];
      this.rows[name].hidden = text === null;
      if (text !== null) setText(this.values[name], text);
    }
  }
}

/**
 * @param {Progress} progress
 * @returns {string}
 */
function stageWords(progress) {
  const stage = Object.hasOwn(STAGE_WORDS, progress.stage) ? STAGE_WORDS[progress.stage] : String(progress.stage);
  const isDetail = progress.stage === "decode" && progress.phase !== "other" && Object.hasOwn(PHASE_TITLES, progress.phase);
  return isDetail ? `${stage}: ${progress.phase}` : stage;
}

/**
 * @param {Progress} progress
 * @returns {Record<typeof FIELDS[number], string | null>} null where there is nothing to say
 */
function liveWords(progress) {
  const { chunk, done, elapsed_ns: elapsed, memory_bytes: bytes, op, tile, total, work_per_s: speed } = progress;
  const isKnown = isNumber(speed) && speed > 0 && isNumber(total) && total > 0;
  return {
    tile: tile ? `${tile[0]} of ${tile[1]}` : null,
    chunk: chunk ? `${chunk[0]} of ${chunk[1]}` : null,
    op: op ? `${op[0]} of ${op[1]}: ${op[2]}` : null,
    elapsed: formatNs(elapsed),
    left: isKnown ? `about ${formatNs((Math.max(0, total - done) / speed) * 1e9)}` : null,
    speed: isKnown ? `${formatShare(speed / total)} per s` : null,
    memory: isNumber(bytes) ? formatBytes(bytes) : null,
  };
}
