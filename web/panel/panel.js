/** The panel of one node: what it shows before, while and after the node decodes. Knows nothing of ComfyUI. */

import { button, element, fill } from "../view/elements.js";
import { reasonOf, statusWords } from "../view/words.js";
import { counts, headline, memory, phases, precision, recent } from "./figures.js";
import { LiveView } from "./live.js";

/** @typedef {import("../types.js").PanelData} PanelData */
/** @typedef {import("../types.js").Progress} Progress */
/** @typedef {"idle" | "running" | "ok" | "error" | "interrupted" | "cached"} PanelState */

/** Format of the data that this page reads. */
const SCHEMA_VERSION = 1;

export class NodePanel {
  /** @type {PanelData | null} */
  #data = null;
  /** @type {Progress | null} */
  #progress = null;
  /** What went wrong without a record of it. @type {{state: "error" | "interrupted", sentence: string} | null} */
  #trouble = null;
  #isCached = false;
  #isRestored = false;
  /** Whether this node's decode ended since the prompt began. */
  #hasEnded = false;
  #frame = 0;
  #isBodyStale = true;

  /**
   * @param {object} [options]
   * @param {((recordId: string) => void) | null} [options.onOpen] shows a record in full
   * @param {() => void} [options.onFill] the panel has something to show for the first time
   */
  constructor({ onOpen = null, onFill = () => {} } = {}) {
    this.onOpen = onOpen;
    this.onFill = onFill;
    this.live = new LiveView();
    this.top = element("div", { class: "halo-vae-top" });
    this.note = element("div", { class: "halo-vae-note", role: "status" });
    this.body = element("div", { class: "halo-vae-body" });
    /** The panel's element. It keeps its content when it is taken out of the page and put back. */
    this.element = element(
      "div",
      {
        class: "halo-vae halo-vae-panel", role: "region", "aria-label": "Halo VAE: profile of this node's decodes",
        // nodes drawn by Vue leave the wheel to a focused element that asks for it
        tabindex: 0, "data-capture-wheel": "true", "data-state": "idle",
      },
      this.top, this.note, this.body,
    );
    this.#draw();
  }

  /** @returns {PanelState} */
  get state() {
    if (this.#progress) return "running";
    if (this.#trouble) return this.#trouble.state;
    if (this.#isCached) return "cached";
    return this.#data ? statusWords(this.#data.record.status).state : "idle";
  }

  get hasData() {
    return this.#data !== null;
  }

  /**
   * Show a decode that has ended, or the one that a cached node was made by.
   *
   * @param {PanelData | null | undefined} data
   * @param {{isRestored?: boolean}} [options] `isRestored`: measured before the page was loaded
   */
  show(data, { isRestored = false } = {}) {
    if (!data || data.schema_version !== SCHEMA_VERSION || !data.record || !data.summary) {
      if (data) this.#fail("error", "This page and the server are of different versions of Halo VAE; reload the page.");
      return;
    }
    // what happened while the server was asked is newer than its answer
    if (isRestored && (this.#data || this.#progress || this.#trouble)) return;
    this.#data = data;
    this.#isRestored = isRestored;
    this.#hasEnded ||= !isRestored && !this.#isCached;
    this.#progress = null;
    this.#trouble = null;
    this.#isBodyStale = true;
    this.#schedule();
  }

  /** @param {Progress} progress */
  showProgress(progress) {
    this.#progress = progress;
    this.#trouble = null;
    this.#isCached = this.#isRestored = false;
    this.#schedule();
  }

  /** A prompt begins: what was said of the one before is over. */
  begin() {
    this.#hasEnded = this.#isCached = false;
    this.#trouble = this.#progress = null;
    this.#schedule();
  }

  /** The node is not run in this prompt: what it gave earlier is used. */
  markCached() {
    this.#isCached = true;
    this.#schedule();
  }

  /**
   * The node raised an error. A record of it says more, so it stays where there is one.
   *
   * @param {string} sentence
   */
  fail(sentence) {
    if (!this.#hasEnded) this.#fail("error", sentence);
    else this.stop();
  }

  /** The prompt was cancelled; matters to a node that was decoding. */
  cancel() {
    if (this.#progress && !this.#hasEnded) this.#fail("interrupted", "Cancelled.");
    else this.stop();
  }

  /** No decode is under way any more. */
  stop() {
    if (!this.#progress) return;
    this.#progress = null;
    this.#schedule();
  }

  /** Draw again in other units. */
  redraw() {
    this.#isBodyStale = true;
    this.#schedule();
  }

  /**
   * @param {"error" | "interrupted"} state
   * @param {string} sentence
   */
  #fail(state, sentence) {
    this.#progress = null;
    this.#trouble = { state, sentence };
    this.#schedule();
  }

  /** Draw once before the next frame, however often this is called until then. */
  #schedule() {
    if (this.#frame) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  #draw() {
    const state = this.state;
    if (this.element.dataset.state === "idle" && state !== "idle") this.onFill();
    this.element.dataset.state = state;
    this.element.dataset.record = this.#data?.record_id ?? "";
    if (this.#progress) {
      this.live.update(this.#progress);
      if (this.top.firstChild !== this.live.element) fill(this.top, this.live.element);
    } else {
      fill(this.top, this.#topChildren(state));
    }
    fill(this.note, this.#noteText(state));
    this.note.hidden = !this.note.textContent;
    if (this.#isBodyStale) {
      this.#isBodyStale = false;
      fill(this.body, this.#data && bodyOf(this.#data));
    }
    // figures of another decode than the one above them
    const isEarlier = state === "running" || this.#trouble !== null;
    this.body.toggleAttribute("data-earlier", isEarlier && this.#data !== null);
  }

  /**
   * @param {PanelState} state
   * @returns {HTMLElement[]}
   */
  #topChildren(state) {
    if (this.#trouble) return [sentence(this.#trouble.sentence, this.#trouble.state)];
    const data = this.#data;
    if (!data) {
      if (state === "cached") return [];
      return [element("div", { class: "halo-vae-idle" }, "Not run yet. Time, phases, memory and precision of each decode are shown here.")];
    }
    const reason = reasonOf(data.record);
    const top = headline(data, this.#openButton(data.record_id));
    return reason === null ? [top] : [top, sentence(reason, statusWords(data.record.status).state)];
  }

  /**
   * @param {PanelState} state
   * @returns {string}
   */
  #noteText(state) {
    if (this.#isCached) return this.#data ? "cached: shown from an earlier run" : "cached: an earlier result is used, and its figures are no longer known";
    if (state === "running" || this.#trouble) return this.#data ? "below: the decode before" : "";
    return this.#isRestored ? "shown from an earlier run" : "";
  }

  /**
   * @param {string} recordId
   * @returns {HTMLElement | null}
   */
  #openButton(recordId) {
    const open = this.onOpen;
    if (!open || !recordId) return null;
    const title = "Show this decode and the history in the sidebar";
    return button("Details", () => open(recordId), { "data-action": "open", title });
  }
}

/**
 * @param {PanelData} data
 * @returns {(HTMLElement | null)[]}
 */
function bodyOf(data) {
  const isOff = data.record.level === "off";
  return [
    isOff ? element("div", { class: "halo-vae-note" }, "Only the time is recorded: the profile level is off.") : null,
    phases(data.record), memory(data), precision(data), counts(data), recent(data),
  ];
}

/**
 * @param {string} text
 * @param {string} state
 * @returns {HTMLElement}
 */
function sentence(text, state) {
  return element("div", { class: "halo-vae-sentence", "data-state": state, role: state === "error" ? "alert" : null }, text);
}
