/** What the page asks of the server, by ComfyUI's own fetch. Errors have the server's sentence. */

/** @typedef {{fetchApi: (path: string, options?: RequestInit) => Promise<Response>}} Api */

export class Routes {
  /** @param {Api} api */
  constructor(api) {
    this.api = api;
  }

  /**
   * @param {string | null} before where to go on, as an earlier page said
   * @param {number} [limit]
   * @returns {Promise<import("../types.js").HistoryPage>} newest first
   */
  history(before = null, limit = 100) {
    const query = new URLSearchParams({ limit: String(limit) });
    if (before !== null) query.set("before", before);
    return this.#json(`/halo_vae/history?${query}`);
  }

  /**
   * @param {string} recordId
   * @returns {Promise<import("../types.js").DecodeRecord>}
   */
  record(recordId) {
    return this.#json(`/halo_vae/records/${encodeURIComponent(recordId)}`);
  }

  /** @returns {Promise<Record<string, number | null>>} the aggregate over the server's decodes */
  async metrics() {
    return (await this.#json("/halo_vae/metrics")).metrics;
  }

  /**
   * @param {string} node its execution id
   * @returns {Promise<import("../types.js").PanelData | null>} null where the node has none
   */
  async panel(node) {
    const response = await this.api.fetchApi(`/halo_vae/panels/${encodeURIComponent(node)}?missing=null`);
    return response.ok ? response.json() : null;
  }

  /**
   * @param {"json" | "csv" | "trace"} format
   * @param {string | null} [recordId] one record; null for the history, or for the last trace
   * @returns {Promise<{blob: Blob, name: string}>} a file
   */
  async export(format, recordId = null) {
    const query = new URLSearchParams({ format });
    if (recordId !== null) query.set("id", recordId);
    const response = await this.#checked(`/halo_vae/export?${query}`);
    const ending = format === "trace" ? "trace.json" : format;
    return { blob: await response.blob(), name: `halo-vae-${recordId ?? "history"}.${ending}` };
  }

  /** @returns {Promise<number>} records removed */
  async clear() {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" };
    return (await (await this.#checked("/halo_vae/clear", options)).json()).removed;
  }

  /**
   * @param {string} path
   * @returns {Promise<any>}
   */
  async #json(path) {
    return (await this.#checked(path)).json();
  }

  /**
   * @param {string} path
   * @param {RequestInit} [options]
   * @returns {Promise<Response>}
   */
  async #checked(path, options) {
    const response = await this.api.fetchApi(path, options);
    if (response.ok) return response;
    const said = await response.json().catch(() => null);
    throw new Error(typeof said?.error === "string" ? said.error : `The server answered ${response.status}.`);
  }
}
