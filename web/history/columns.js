/** The columns of the history's table. */

import { formatBytes, formatCount, formatMoment, formatNs, formatScore, formatShortMoment, isNumber } from "../view/format.js";
import { reasonOf, shortDtype, shortHash, sizeWords, statusWords } from "../view/words.js";

/** @typedef {import("../types.js").HistoryRow} HistoryRow */

/**
 * @typedef {object} Column
 * @property {string} id the field it shows
 * @property {string} label
 * @property {(row: HistoryRow) => number | string | null} value what it is sorted by; null comes last
 * @property {(row: HistoryRow) => string} text
 * @property {(row: HistoryRow) => string} [title]
 * @property {boolean} [isNumber]
 */

/** @type {Column[]} */
export const COLUMNS = [
  {
    id: "started_at", label: "started", value: (row) => row.started_at, text: (row) => formatShortMoment(row.started_at),
    title: (row) => formatMoment(row.started_at),
  },
  {
    id: "status", label: "outcome", value: (row) => statusWords(row.status).word,
    text: (row) => `${statusWords(row.status).sign} ${statusWords(row.status).word}`, title: (row) => reasonOf(row) ?? "",
  },
  { id: "wall_ns", label: "time", value: (row) => row.wall_ns, text: (row) => formatNs(row.wall_ns), isNumber: true },
  {
    id: "first_of_shape", label: "run", value: (row) => runWords(row), text: runWords,
    title: () => "the first run of its shapes may hold a search for kernels",
  },
  { id: "size", label: "size", value: sizeOf, text: (row) => sizeWords(row.image_shape, row.latent_shape) },
  { id: "family", label: "VAE", value: (row) => row.family, text: vaeWords, title: (row) => row.vae_hash ?? "" },
  { id: "precision", label: "precision", value: (row) => row.precision, text: (row) => shortDtype(row.precision) },
  { id: "used_bytes", label: "memory", value: (row) => row.used_bytes, text: (row) => formatBytes(row.used_bytes), isNumber: true },
  { id: "predicted_bytes", label: "predicted", value: (row) => row.predicted_bytes, text: (row) => formatBytes(row.predicted_bytes), isNumber: true },
  { id: "n_tiles", label: "tiles", value: (row) => row.n_tiles, text: (row) => formatCount(row.n_tiles), isNumber: true },
  { id: "n_fallbacks", label: "fallbacks", value: (row) => row.n_fallbacks, text: (row) => formatCount(row.n_fallbacks), isNumber: true },
  { id: "temporal_consistency", label: "consistency", value: (row) => row.temporal_consistency, text: (row) => formatScore(row.temporal_consistency), isNumber: true },
  { id: "method", label: "method", value: (row) => row.method, text: (row) => row.method ?? "n/a" },
];

/**
 * @typedef {object} Filter empty strings let everything through
 * @property {string} vae part of the family's name or of the VAE's hash
 * @property {string} size
 * @property {string} status
 */

/**
 * @param {HistoryRow[]} rows
 * @param {Filter} filter
 * @returns {HistoryRow[]}
 */
export function filtered(rows, { vae, size, status }) {
  const part = vae.trim().toLowerCase();
  return rows.filter(
    (row) =>
      (!part || row.family.toLowerCase().includes(part) || (row.vae_hash ?? "").toLowerCase().startsWith(part)) &&
      (!size || sizeWords(row.image_shape, row.latent_shape) === size) &&
      (!status || row.status === status),
  );
}

/**
 * The rows in the order of a column; unknown values last either way, equal ones as they were.
 *
 * @template T
 * @param {T[]} rows
 * @param {(row: T) => number | string | null | undefined} value
 * @param {boolean} isDescending
 * @returns {T[]}
 */
export function sorted(rows, value, isDescending) {
  const sign = isDescending ? -1 : 1;
  return rows
    .map((row) => ({ row, key: value(row) }))
    .sort((a, b) => {
      if (a.key === b.key) return 0;
      if (a.key === null || a.key === undefined) return 1;
      if (b.key === null || b.key === undefined) return -1;
      if (isNumber(a.key) && isNumber(b.key)) return sign * (a.key - b.key);
      return sign * (String(a.key) < String(b.key) ? -1 : String(a.key) > String(b.key) ? 1 : 0);
    })
    .map(({ row }) => row);
}

/**
 * @param {HistoryRow} row
 * @returns {number | null} pixels of all images
 */
function sizeOf(row) {
  return row.image_shape ? row.image_shape[0] * row.image_shape[1] * row.image_shape[2] : null;
}

/**
 * @param {HistoryRow} row
 * @returns {string}
 */
function runWords(row) {
  return row.first_of_shape === null ? "n/a" : row.first_of_shape ? "first" : "warm";
}

/**
 * @param {HistoryRow} row
 * @returns {string}
 */
function vaeWords(row) {
  return row.vae_hash ? `${row.family} ${shortHash(row.vae_hash)}` : row.family;
}
