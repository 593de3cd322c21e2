/** The words, signs and colours that stand for the values of a record, the same wherever they are shown. */

import { formatCount, formatShape, NA } from "./format.js";

/** Phases of a decode, in the order in which they usually run. */
export const PHASES = ["lower", "plan", "load", "stage", "compute", "stitch", "transfer", "sync", "other"];

/** @type {Record<string, string>} */
export const PHASE_TITLES = {
  lower: "recognising the decoder",
  plan: "planning tiles, buffers and dtypes",
  load: "fetching, casting and packing weights",
  stage: "norm, activation and upsampling into a tile's scratch",
  compute: "convolutions and attention",
  stitch: "residuals and writing tiles where they belong",
  transfer: "moving the picture to the output device and dtype",
  sync: "waiting for the device",
  other: "everything else",
};

/** @type {Record<string, {word: string, sign: string, state: "ok" | "interrupted" | "error"}>} */
const STATUSES = {
  ok: { word: "ok", sign: "✓", state: "ok" },
  interrupted: { word: "cancelled", sign: "■", state: "interrupted" },
  out_of_memory: { word: "out of memory", sign: "✕", state: "error" },
  non_finite: { word: "not finite", sign: "✕", state: "error" },
  error: { word: "failed", sign: "✕", state: "error" },
};

/** @type {Record<string, string>} */
const SHORT_DTYPES = { float16: "fp16", bfloat16: "bf16", float32: "fp32", float64: "fp64" };

/**
 * @param {string} status
 * @returns {{word: string, sign: string, state: "ok" | "interrupted" | "error"}}
 */
export function statusWords(status) {
  return Object.hasOwn(STATUSES, status) ? STATUSES[status] : { word: String(status), sign: "✕", state: "error" };
}

/**
 * Why a decode did not end well; null where there is nothing to add to its outcome. A cancelled decode has nothing: what
 * stopped it is the host's own signal, and its name tells a reader nothing.
 *
 * @param {{error: string | null, status: string}} decode
 * @returns {string | null}
 */
export function reasonOf({ error, status }) {
  return status === "interrupted" ? null : error;
}

/** Every outcome, for a choice of them. */
export const STATUS_NAMES = Object.keys(STATUSES);

/**
 * @param {string | null | undefined} dtype
 * @returns {string}
 */
export function shortDtype(dtype) {
  if (dtype === null || dtype === undefined) return NA;
  return Object.hasOwn(SHORT_DTYPES, dtype) ? SHORT_DTYPES[dtype] : String(dtype);
}

/**
 * The CSS colour of a dtype's share.
 *
 * @param {string} dtype
 * @returns {string}
 */
export function dtypeColour(dtype) {
  const known = ["fp16", "bf16", "fp32"].includes(dtype);
  return known ? `var(--halo-vae-${dtype})` : "var(--halo-vae-other)";
}

/**
 * The CSS colour of a phase.
 *
 * @param {string} phase
 * @returns {string}
 */
export function phaseColour(phase) {
  return `var(--halo-vae-${PHASES.includes(phase) ? phase : "other"})`;
}

/**
 * What a decode gave, as people call sizes: "1024×768", "1024×768, 17 images"; the latent's shape where it gave none.
 *
 * @param {number[] | null} imageShape [B, H, W, C]
 * @param {number[]} latentShape
 * @returns {string}
 */
export function sizeWords(imageShape, latentShape) {
  if (!Array.isArray(imageShape)) return `latent ${formatShape(latentShape)}`;
  const [images, height, width] = imageShape;
  return images === 1 ? `${width}×${height}` : `${width}×${height}, ${formatCount(images, "image")}`;
}

/**
 * The first digits of a VAE's hash, enough to tell a few VAEs apart.
 *
 * @param {string | null | undefined} hash
 * @returns {string}
 */
export function shortHash(hash) {
  return hash ? String(hash).slice(0, 8) : NA;
}
