/** Numbers as words, as the server's own texts have them. Everything takes null and gives "n/a" for it. */

/** Unknown, not measured, or no denominator. */
export const NA = "n/a";

/** @typedef {"binary" | "decimal"} ByteUnits */

/** @type {Record<ByteUnits, {base: number, names: string[]}>} */
const BYTE_UNITS = {
  binary: { base: 1024, names: ["B", "KiB", "MiB", "GiB", "TiB"] },
  decimal: { base: 1000, names: ["B", "kB", "MB", "GB", "TB"] },
};
const TIME_UNITS = /** @type {const} */ ([["s", 1e9], ["ms", 1e6], ["µs", 1e3]]);
const MAC_UNITS = /** @type {const} */ ([["TMAC", 1e12], ["GMAC", 1e9], ["MMAC", 1e6]]);

/** @type {ByteUnits} */
let byteUnits = "binary";

/**
 * Write bytes in these units from now on; what is no unit is taken as binary.
 *
 * @param {unknown} units
 */
export function setByteUnits(units) {
  byteUnits = units === "decimal" ? "decimal" : "binary";
}

/**
 * A duration with three figures: "850 ns", "12.3 µs", "1.48 s", "2 min 05 s".
 *
 * @param {number | null | undefined} ns
 * @returns {string}
 */
export function formatNs(ns) {
  if (!isNumber(ns)) return NA;
  const seconds = Number(fixed(ns / 1e9, 0));
  if (seconds >= 60) return `${Math.floor(seconds / 60)} min ${String(seconds % 60).padStart(2, "0")} s`;
  for (const [unit, size] of TIME_UNITS) {
    if (ns >= size * 0.9995) return `${three(ns / size)} ${unit}`;
  }
  return `${fixed(ns, 0)} ns`;
}

/**
 * @param {number | null | undefined} seconds
 * @returns {string}
 */
export function formatSeconds(seconds) {
  return formatNs(isNumber(seconds) ? seconds * 1e9 : null);
}

/**
 * Bytes with three figures, in the units that are set: "512 B", "1.50 KiB", "412 MiB"; or "1.54 kB", "432 MB".
 *
 * @param {number | null | undefined} bytes
 * @returns {string}
 */
export function formatBytes(bytes) {
  if (!isNumber(bytes)) return NA;
  if (bytes < 0) return `-${formatBytes(-bytes)}`;
  const { base, names } = BYTE_UNITS[byteUnits];
  let size = bytes;
  let unit = 0;
  while (size >= 999.5 && unit < names.length - 1) {
    size /= base;
    unit += 1;
  }
  return unit === 0 ? `${fixed(bytes, 0)} B` : `${three(size)} ${names[unit]}`;
}

/**
 * Bytes per second in decimal units, as memory is sold: "12.4 GB/s".
 *
 * @param {number | null | undefined} bytesPerS
 * @returns {string}
 */
export function formatRate(bytesPerS) {
  return isNumber(bytesPerS) ? `${three(bytesPerS / 1e9)} GB/s` : NA;
}

/**
 * A fraction as per cent: "83.1 %"; 100 % only when nothing is missing, 0 % only when there is nothing.
 *
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function formatShare(value) {
  if (!isNumber(value)) return NA;
  const percent = value * 100;
  if (percent === 0 || percent === 100) return `${percent} %`;
  const text = fixed(percent, 1);
  if (text === "0.0") return "< 0.1 %";
  return text === "100.0" && percent < 100 ? "> 99.9 %" : `${text} %`;
}

/**
 * A whole number in groups, and its noun: "1 tile", "12 345 tiles".
 *
 * @param {number | null | undefined} n
 * @param {string} [one]
 * @param {string} [many]
 * @returns {string}
 */
export function formatCount(n, one = "", many = `${one}s`) {
  if (!isNumber(n)) return NA;
  const digits = String(n).replace(/\B(?=(\d{3})+$)/g, " ");
  return one ? `${digits} ${n === 1 ? one : many}` : digits;
}

/**
 * Multiply-accumulates: "1.24 TMAC".
 *
 * @param {number | null | undefined} n
 * @returns {string}
 */
export function formatMacs(n) {
  if (!isNumber(n)) return NA;
  for (const [unit, size] of MAC_UNITS) {
    if (n >= size * 0.9995) return `${three(n / size)} ${unit}`;
  }
  return `${n} MAC`;
}

/**
 * A ratio: "1.04 ×".
 *
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function formatRatio(value) {
  return isNumber(value) ? `${three(value)} ×` : NA;
}

/**
 * A shape: "1×4×64×64".
 *
 * @param {number[] | null | undefined} shape
 * @returns {string}
 */
export function formatShape(shape) {
  return Array.isArray(shape) ? shape.join("×") : NA;
}

/**
 * A score between 0 and 1: "0.970".
 *
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function formatScore(value) {
  return isNumber(value) ? fixed(value, 3) : NA;
}

/**
 * A moment in the reader's own time zone: "2026-03-01 14:05:09"; a text that is no moment stays as it is.
 *
 * @param {string} moment ISO 8601
 * @returns {string}
 */
export function formatMoment(moment) {
  const date = new Date(moment);
  if (Number.isNaN(date.getTime())) return moment;
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/**
 * A moment without its year, where room is scarce: "03-01 14:05:09".
 *
 * @param {string} moment ISO 8601
 * @returns {string}
 */
export function formatShortMoment(moment) {
  return formatMoment(moment).replace(/^\d{4}-(?=\d\d-\d\d )/, "");
}

/**
 * @param {unknown} value
 * @returns {value is number}
 */
export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/**
 * Three figures, or all of a larger whole part.
 *
 * @param {number} value
 * @returns {string}
 */
function three(value) {
  if (value >= 99.95) return fixed(value, 0);
  return value >= 9.995 ? fixed(value, 1) : fixed(value, 2);
}

/**
 * Like toFixed, but a tie goes to the even digit as it does on the server, so that both write the same text.
 *
 * @param {number} value not negative
 * @param {number} digits
 * @returns {string}
 */
function fixed(value, digits) {
  const scale = 10 ** digits;
  const scaled = value * scale;
  const floor = Math.floor(scaled);
  const isTie = scaled - floor === 0.5 && scaled / scale === value && isDyadic(value);
  return isTie ? ((floor % 2 === 0 ? floor : floor + 1) / scale).toFixed(digits) : value.toFixed(digits);
}

/**
 * Whether a number has few binary digits after the point: only such a one can lie exactly between two decimals.
 *
 * @param {number} value
 * @returns {boolean}
 */
function isDyadic(value) {
  return Number.isInteger(value * 16);
}
