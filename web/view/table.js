/** A table that is sorted by its headings and shows a part of its rows at a time, so that many rows cost little. */

import { button, element, fill } from "./elements.js";
import { formatCount } from "./format.js";

/** Rows shown at first, and more at each press of the button. */
export const PAGE_ROWS = 100;

/**
 * @template T
 * @typedef {object} TableColumn
 * @property {string} id
 * @property {string} label
 * @property {(row: T) => number | string | null | undefined} value
 * @property {(row: T) => string} text
 * @property {(row: T) => string} [title]
 * @property {boolean} [isNumber]
 */

/** @template T */
export class SortedTable {
  /** @type {T[]} */
  #rows = [];
  #shown = PAGE_ROWS;

  /**
   * @param {object} options
   * @param {string} options.name what the table shows, for those who do not see it
   * @param {TableColumn<T>[]} options.columns the first one opens the row where rows can be opened
   * @param {(rows: T[], value: (row: T) => any, isDescending: boolean) => T[]} options.sort
   * @param {string | null} [options.by] column that it is sorted by at first; null: the order given
   * @param {boolean} [options.isDescending]
   * @param {((row: T) => void) | null} [options.onOpen]
   * @param {(row: T) => Record<string, any>} [options.attributes] of a row's element
   * @param {string} [options.noun] of one row
   */
  constructor({ name, columns, sort, by = null, isDescending = false, onOpen = null, attributes = () => ({}), noun = "row" }) {
    this.columns = columns;
    this.sort = sort;
    this.by = by;
    this.isDescending = isDescending;
    this.onOpen = onOpen;
    this.attributes = attributes;
    this.noun = noun;
    this.head = element("tr");
    this.body = element("tbody");
    this.more = button("", () => this.#showMore(), { "data-action": "more" });
    this.element = element(
      "div",
      { class: "halo-vae-table" },
      element("div", { class: "halo-vae-table-scroll", tabindex: 0, role: "region", "aria-label": name },
        element("table", {}, element("caption", { class: "halo-vae-hidden" }, name), element("thead", {}, this.head), this.body)),
      this.more,
    );
    fill(this.head, columns.map((column) => this.#heading(column)));
    this.#draw();
  }

  /** @param {T[]} rows */
  show(rows) {
    this.#rows = rows;
    this.#shown = Math.max(PAGE_ROWS, Math.min(this.#shown, rows.length));
    this.#draw();
  }

  /** Draw again, in other units. */
  redraw() {
    this.#draw();
  }

  #showMore() {
    const first = this.#shown;
    this.#shown += PAGE_ROWS;
    this.body.append(...this.#ordered().slice(first, this.#shown).map((row) => this.#row(row)));
    this.#tellMore();
  }

  /** @param {TableColumn<T>} column */
  #heading(column) {
    return element(
      "th",
      { scope: "col", "data-column": column.id, class: column.isNumber ? "halo-vae-number" : null },
      button(column.label, () => this.#sortBy(column.id), { class: "halo-vae-sort" }),
    );
  }

  /** @param {string} id */
  #sortBy(id) {
    this.isDescending = this.by === id ? !this.isDescending : false;
    this.by = id;
    this.#shown = PAGE_ROWS;
    this.#draw();
  }

  #ordered() {
    const column = this.columns.find(({ id }) => id === this.by);
    return column ? this.sort(this.#rows, column.value, this.isDescending) : this.#rows;
  }

  #draw() {
    for (const heading of this.head.children) {
      const isSorted = heading.getAttribute("data-column") === this.by;
      if (isSorted) heading.setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    }
    const focused = this.body.contains(document.activeElement) && document.activeElement?.closest("tr")?.dataset.record;
    fill(this.body, this.#ordered().slice(0, this.#shown).map((row) => this.#row(row)));
    if (focused) this.focusRow(focused);
    this.#tellMore();
  }

  /**
   * Put the keyboard on the button of a row.
   *
   * @param {string} record the row's `data-record`
   */
  focusRow(record) {
    const row = [...this.body.querySelectorAll("tr")].find((tr) => tr.dataset.record === record);
    row?.querySelector("button")?.focus({ preventScroll: true });
  }

  #tellMore() {
    const left = this.#rows.length - this.#shown;
    this.more.hidden = left <= 0;
    if (left > 0) this.more.textContent = `Show ${formatCount(Math.min(PAGE_ROWS, left))} more of ${formatCount(left, this.noun)}`;
  }

  /** @param {T} row */
  #row(row) {
    const { onOpen } = this;
    return element(
      "tr",
      this.attributes(row),
      this.columns.map((column, i) => {
        const text = column.text(row);
        const content = onOpen && i === 0 ? button(text, () => onOpen(row), { class: "halo-vae-open", "data-action": "open" }) : text;
        const attributes = { "data-cell": column.id, title: column.title?.(row) || null, class: column.isNumber ? "halo-vae-number" : null };
        return element(i === 0 ? "th" : "td", i === 0 ? { ...attributes, scope: "row" } : attributes, content);
      }),
    );
  }
}
