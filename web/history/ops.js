/** The table of a record's ops. */

import { element } from "../view/elements.js";
import { formatBytes, formatCount, formatMacs, formatNs, formatShare } from "../view/format.js";
import { SortedTable } from "../view/table.js";
import { shortDtype } from "../view/words.js";
import { sorted } from "./columns.js";

/**
 * @typedef {import("../types.js").Stage & {number: number, share: number | null}} Op
 */

/** @type {import("../view/table.js").TableColumn<Op>[]} */
const COLUMNS = [
  { id: "op", label: "op", value: (op) => op.op, text: (op) => op.op },
  { id: "number", label: "no.", value: (op) => op.number, text: (op) => formatCount(op.number), isNumber: true },
  { id: "host_ns", label: "time", value: timeOf, text: (op) => formatNs(timeOf(op)), isNumber: true },
  { id: "share", label: "share", value: (op) => op.share, text: (op) => formatShare(op.share), isNumber: true },
  { id: "kind", label: "kind", value: (op) => op.kind, text: (op) => op.kind },
  { id: "dtype", label: "dtype", value: (op) => op.dtype, text: (op) => shortDtype(op.dtype) },
  { id: "backend", label: "backend", value: (op) => op.backend, text: (op) => op.backend },
  { id: "n_tiles", label: "tiles", value: (op) => op.n_tiles, text: (op) => formatCount(op.n_tiles), isNumber: true },
  { id: "macs", label: "work", value: (op) => op.macs, text: (op) => (op.macs ? formatMacs(op.macs) : "n/a"), isNumber: true },
  { id: "memory_bytes", label: "memory", value: (op) => op.memory_bytes, text: (op) => formatBytes(op.memory_bytes), isNumber: true },
];

/**
 * @param {import("../types.js").DecodeRecord} record
 * @returns {HTMLElement | null} null where no ops were recorded
 */
export function opsTable(record) {
  const stages = record.stages ?? [];
  if (!stages.length) return null;
  const total = stages.reduce((sum, stage) => sum + timeOf(stage), 0);
  const ops = stages.map((stage, i) => ({ ...stage, number: i + 1, share: total ? timeOf(stage) / total : null }));
  const table = new SortedTable({ name: "Ops of this decode", columns: COLUMNS, sort: sorted, by: "host_ns", isDescending: true, noun: "op" });
  table.show(ops);
  const all = record.n_stages ?? stages.length;
  const left = all > stages.length ? `; the first ${formatCount(stages.length)} are recorded` : "";
  const onDevice = stages.some((stage) => stage.device_ns !== null) ? ", times on the device" : "";
  return element("section", { class: "halo-vae-section" }, element("h4", {}, `${formatCount(all, "op")}${left}${onDevice}`), table.element);
}

/**
 * @param {import("../types.js").Stage} stage
 * @returns {number} on the device where that was timed, else on the host
 */
function timeOf(stage) {
  return stage.device_ns ?? stage.host_ns;
}
