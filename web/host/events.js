/** What the server tells over ComfyUI's socket, handed to the panels and to the history. */

/**
 * @typedef {{addEventListener: (type: string, listener: (event: CustomEvent) => void) => void}} Socket
 */

/**
 * @param {Socket} api
 * @param {import("./nodes.js").NodePanels} panels
 * @param {() => void} onEnded a decode has ended
 */
export function listen(api, panels, onEnded) {
  /** @type {Record<string, (detail: any) => void>} */
  const listeners = {
    "halo_vae.progress": (progress) => panels.of(progress.node)?.showProgress(progress),
    "halo_vae.ended": ({ node, panel }) => {
      panels.of(node)?.show(panel);
      onEnded();
    },
    execution_start: () => each((panel) => panel.begin()),
    execution_cached: ({ nodes }) => nodes?.forEach((/** @type {string} */ node) => panels.of(node)?.markCached()),
    execution_error: ({ node_id: node, exception_message: message }) => {
      const failed = panels.of(node);
      failed?.fail(firstLine(message));
      each((panel) => panel !== failed && panel.stop());
    },
    execution_interrupted: () => each((panel) => panel.cancel()),
    execution_success: () => each((panel) => panel.stop()),
    reconnected: () => each((panel) => panel.stop()),
  };
  const each = (/** @type {(panel: import("../panel/panel.js").NodePanel) => void} */ act) => panels.all().forEach(act);
  for (const [type, listener] of Object.entries(listeners)) {
    api.addEventListener(type, (event) => listener(event.detail ?? {}));
  }
}

/**
 * @param {unknown} message
 * @returns {string}
 */
function firstLine(message) {
  return String(message ?? "").trim().split("\n")[0] || "The node failed; ComfyUI's log says why.";
}
