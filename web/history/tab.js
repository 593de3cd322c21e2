/** The sidebar's tab: history, charts, totals, one record in full, and files to take away. Knows nothing of ComfyUI. */

import { runChart } from "../view/charts.js";
import { button, element, fill, setText } from "../view/elements.js";
import { formatBytes, formatCount, formatMoment, formatNs } from "../view/format.js";
import { SortedTable } from "../view/table.js";
import { sizeWords, STATUS_NAMES, statusWords } from "../view/words.js";
import { COLUMNS, filtered, sorted } from "./columns.js";
import { detail } from "./detail.js";
import { metricsSections } from "./metrics.js";

/** @typedef {import("../types.js").HistoryRow} HistoryRow */

/** Most runs in a chart; more would lie on each other. */
const CHART_RUNS = 200;

export class HistoryTab {
  /** Newest first. @type {HistoryRow[]} */
  #rows = [];
  /** @type {string | null} */
  #next = null;
  #skipped = 0;
  #isStale = true;
  #isReading = false;
  /** The record shown in full, to draw it again in other units. @type {import("../types.js").DecodeRecord | null} */
  #record = null;
  /** @type {Record<string, number | null> | null} */
  #metrics = null;

  /**
   * @param {import("../host/routes.js").Routes} routes
   * @param {(blob: Blob, name: string) => void} [save]
   */
  constructor(routes, save = saveFile) {
    this.routes = routes;
    this.save = save;
    this.filter = { vae: "", size: "", status: "" };
    this.message = element("div", { class: "halo-vae-message", role: "status" });
    this.charts = element("div", { class: "halo-vae-charts" });
    this.table = new SortedTable({
      name: "Decodes", columns: COLUMNS, sort: sorted, by: "started_at", isDescending: true, noun: "decode",
      onOpen: (row) => this.openRecord(row.record_id),
      attributes: (row) => ({ "data-record": row.record_id, "data-state": statusWords(row.status).state }),
    });
    this.older = button("Older decodes", () => this.#readOlder(), { "data-action": "older", hidden: true });
    this.sizes = /** @type {HTMLSelectElement} */ (this.#choice("size", "any size"));
    this.totals = element("div", { class: "halo-vae-totals" });
    this.question = element("div", { class: "halo-vae-question", role: "alertdialog", "aria-label": "Clear the history?", hidden: true,
      on: { keydown: (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && this.#closeQuestion() } });
    this.clearButton = button("Clear…", () => this.#askToClear(), { "data-action": "clear" });
    this.list = element("div", { class: "halo-vae-list-view" }, this.#toolbar(), this.question, this.#filters(), this.message,
      this.charts, this.table.element, this.older, this.totals);
    this.recordView = element("div", { class: "halo-vae-record-view", hidden: true });
    this.element = element("div", { class: "halo-vae halo-vae-history" }, this.list, this.recordView);
  }

  /** The tab has come into view. */
  open() {
    if (this.#isStale) this.refresh();
  }

  /** A decode has ended: read again, at once if the tab is in view. */
  changed() {
    this.#isStale = true;
    if (this.element.isConnected) this.refresh();
  }

  /** Draw again in other units. */
  redraw() {
    this.#draw();
    if (this.#metrics) fill(this.totals, metricsSections(this.#metrics));
    if (this.#record) this.#showRecord(this.#record);
  }

  /** Read the newest decodes and the totals. */
  async refresh() {
    if (this.#isReading) return;
    this.#isReading = true;
    this.#isStale = false;
    await this.#tell(async () => {
      const [page, metrics] = await Promise.all([this.routes.history(), this.routes.metrics()]);
      this.#take(page);
      this.#metrics = metrics;
      fill(this.totals, metricsSections(metrics));
      this.#draw();
      return page.problems[0] ?? "";
    });
    this.#isReading = false;
    // a decode that ended while the page was read
    if (this.#isStale && this.element.isConnected) this.refresh();
  }

  /**
   * Put the newest rows before those that are known, so that older ones that were asked for stay.
   *
   * @param {import("../types.js").HistoryPage} page
   */
  #take(page) {
    const ids = new Set(page.rows.map((row) => row.record_id));
    const older = this.#rows.filter((row) => !ids.has(row.record_id));
    if (older.length === this.#rows.length || ids.has("")) {
      this.#rows = page.rows;
      this.#next = page.next;
      this.#skipped = page.skipped;
    } else {
      this.#rows = [...page.rows, ...older];
    }
  }

  /**
   * Show one record in full.
   *
   * @param {string} recordId
   */
  async openRecord(recordId) {
    await this.#tell(async () => {
      this.#showRecord(await this.routes.record(recordId));
      this.recordView.querySelector("button")?.focus();
      return "";
    });
  }

  /** @param {import("../types.js").DecodeRecord} record */
  #showRecord(record) {
    const id = record.record_id ?? "";
    this.#record = record;
    fill(
      this.recordView,
      element("div", { class: "halo-vae-toolbar" },
        button("← History", () => this.#closeRecord(), { "data-action": "back" }),
        element("span", { class: "halo-vae-grow" }),
        id && [this.#exportButton("JSON", "json", id), this.#exportButton("CSV", "csv", id), this.#exportButton("Trace", "trace", id)]),
      detail(record),
    );
    this.list.hidden = true;
    this.recordView.hidden = false;
    this.element.scrollTop = 0;
  }

  #closeRecord() {
    const id = this.#record?.record_id;
    this.#record = null;
    this.recordView.hidden = true;
    this.list.hidden = false;
    fill(this.recordView);
    if (id) this.table.focusRow(id);
  }

  async #readOlder() {
    await this.#tell(async () => {
      const page = await this.routes.history(this.#next);
      const known = new Set(this.#rows.map((row) => row.record_id));
      this.#rows = [...this.#rows, ...page.rows.filter((row) => !row.record_id || !known.has(row.record_id))];
      this.#next = page.next;
      this.#skipped += page.skipped;
      this.#draw();
      return page.problems[0] ?? "";
    });
  }

  #draw() {
    this.#drawSizes();
    const rows = filtered(this.#rows, this.filter);
    this.table.show(rows);
    this.older.hidden = this.#next === null;
    const runs = rows.slice(0, CHART_RUNS).reverse();
    fill(
      this.charts,
      runs.length
        ? [
            runChart("Time", runs.map((row) => point(row, row.wall_ns, formatNs(row.wall_ns))), formatNs),
            runChart("Peak memory", runs.map((row) => point(row, row.used_bytes, formatBytes(row.used_bytes))), formatBytes),
            element("div", { class: "halo-vae-note" }, "● warm  ○ first run of its shapes  × failed or cancelled; oldest left"),
          ]
        : element("div", { class: "halo-vae-idle" }, this.#rows.length ? "No decode matches the filter." : "Nothing decoded yet. Each decode of a Halo VAE node appears here."),
    );
  }

  #drawSizes() {
    const known = [...new Set(this.#rows.map((row) => sizeWords(row.image_shape, row.latent_shape)))].sort();
    if (this.filter.size && !known.includes(this.filter.size)) this.filter.size = "";
    fill(this.sizes, element("option", { value: "" }, "any size"), known.map((size) => element("option", { value: size }, size)));
    this.sizes.value = this.filter.size;
  }

  #toolbar() {
    return element("div", { class: "halo-vae-toolbar" },
      button("Refresh", () => this.refresh(), { "data-action": "refresh" }),
      element("span", { class: "halo-vae-grow" }),
      this.#exportButton("JSON", "json", null), this.#exportButton("CSV", "csv", null), this.#exportButton("Trace", "trace", null),
      this.clearButton,
    );
  }

  #filters() {
    const search = element("input", {
      type: "search", class: "halo-vae-input", "data-filter": "vae", "aria-label": "VAE: part of its name or hash", placeholder: "VAE",
      on: { input: (/** @type {any} */ event) => this.#setFilter("vae", event.target.value) },
    });
    const outcomes = this.#choice("status", "any outcome");
    outcomes.append(...STATUS_NAMES.map((status) => element("option", { value: status }, statusWords(status).word)));
    return element("div", { class: "halo-vae-filters", role: "search", "aria-label": "Filter" }, search, this.sizes, outcomes);
  }

  /**
   * @param {"size" | "status"} name
   * @param {string} any
   * @returns {HTMLElement}
   */
  #choice(name, any) {
    const on = { change: (/** @type {any} */ event) => this.#setFilter(name, event.target.value) };
    const label = name === "size" ? "Size" : "Outcome";
    return element("select", { class: "halo-vae-input", "data-filter": name === "size" ? "size" : "outcome", "aria-label": label, on }, element("option", { value: "" }, any));
  }

  /**
   * @param {"vae" | "size" | "status"} name
   * @param {string} value
   */
  #setFilter(name, value) {
    this.filter[name] = value;
    this.#draw();
  }

  /**
   * @param {string} label
   * @param {"json" | "csv" | "trace"} format
   * @param {string | null} recordId
   */
  #exportButton(label, format, recordId) {
    const what = { json: "JSON", csv: "CSV, for a spreadsheet", trace: "Chrome trace, for chrome://tracing or Perfetto" }[format];
    const title = `Save ${recordId ? "this decode" : format === "trace" ? "the last decode" : "the history"} as ${what}`;
    return button(label, () => this.#export(format, recordId), { "data-export": format, title, "aria-label": title });
  }

  /**
   * @param {"json" | "csv" | "trace"} format
   * @param {string | null} recordId
   */
  async #export(format, recordId) {
    await this.#tell(async () => {
      const { blob, name } = await this.routes.export(format, recordId);
      this.save(blob, name);
      return `Saved ${name}.`;
    });
  }

  #askToClear() {
    const no = button("Keep it", () => this.#closeQuestion(), { "data-action": "clear-cancel" });
    const yes = button("Clear the history", () => this.#clear(), { "data-action": "clear-confirm", class: "halo-vae-button halo-vae-danger" });
    const words = "Remove every recorded decode, of the command line too? This cannot be undone.";
    fill(this.question, element("p", {}, words), element("div", { class: "halo-vae-toolbar" }, yes, no));
    this.question.hidden = false;
    no.focus();
  }

  #closeQuestion() {
    this.question.hidden = true;
    this.clearButton.focus();
  }

  async #clear() {
    this.#closeQuestion();
    await this.#tell(async () => {
      const removed = await this.routes.clear();
      await this.refresh();
      return `Removed ${formatCount(removed, "decode")}.`;
    });
  }

  /**
   * Do something and say how it went.
   *
   * @param {() => Promise<string>} act gives what there is to say
   */
  async #tell(act) {
    let text;
    try {
      text = await act();
      if (!text && this.#skipped) text = `${formatCount(this.#skipped, "line")} of the history could not be read and ${this.#skipped === 1 ? "is" : "are"} left out.`;
      this.message.removeAttribute("data-state");
    } catch (error) {
      text = error instanceof Error ? error.message : String(error);
      this.message.dataset.state = "error";
    }
    setText(this.message, text);
    // seen above a record too
    const view = this.recordView.hidden ? this.list : this.recordView;
    view.insertBefore(this.message, view === this.list ? this.charts : view.lastElementChild);
  }
}

/**
 * @param {HistoryRow} row
 * @param {number | null} value
 * @param {string} text
 * @returns {import("../view/charts.js").Point}
 */
function point(row, value, text) {
  const cold = row.first_of_shape ? ", first run of its shapes" : "";
  const title = `${text}, ${statusWords(row.status).word}${cold}: ${sizeWords(row.image_shape, row.latent_shape)}, ${formatMoment(row.started_at)}`;
  return { value, title, status: row.status, cold: row.first_of_shape };
}

/**
 * Hand a file to the browser's downloads.
 *
 * @param {Blob} blob
 * @param {string} name
 */
function saveFile(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = element("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
