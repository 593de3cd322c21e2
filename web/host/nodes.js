/** Panels on ComfyUI's nodes. Nothing measured is kept in a node: no property, no widget value, no saved workflow. */

import { NodePanel } from "../panel/panel.js";

/** Nodes that have a panel. */
const CLASSES = new Set(["HaloVAEDecode", "HaloVAEDecodeTiled", "HaloVAEDecodeVideo", "HaloVAEStats"]);
/** Names the widget; unlike every type of ComfyUI's own, so that no other widget is made of it. */
const WIDGET = "halo_vae_panel";
/** Heights of the widget. Two fixed ones, so that a node's size in a saved workflow tells nothing measured. */
const IDLE_HEIGHT = 76;
const FULL_HEIGHT = 420;
const MIN_WIDTH = 350;

/**
 * Nodes, graphs and the app are ComfyUI's own objects, which have no types here.
 *
 * @typedef {any} GraphNode
 * @typedef {any} Graph
 * @typedef {any} App
 */

export class NodePanels {
  /** @type {Map<GraphNode, NodePanel>} */
  #panels = new Map();
  #isOn = true;
  #isFirstGraph = true;

  /**
   * @param {App} app
   * @param {import("./routes.js").Routes} routes
   * @param {(recordId: string) => void} onOpen shows a record in full
   */
  constructor(app, routes, onOpen) {
    this.app = app;
    this.routes = routes;
    this.onOpen = onOpen;
  }

  /** @returns {NodePanel[]} */
  all() {
    return [...this.#panels.values()];
  }

  /**
   * Give a node that ComfyUI has just made its panel, if it is one of ours.
   *
   * @param {GraphNode} node
   */
  attach(node) {
    if (!CLASSES.has(node.comfyClass)) return;
    const panel = new NodePanel({ onOpen: this.onOpen, onFill: () => grow(node) });
    const widget = node.addDOMWidget(WIDGET, WIDGET, panel.element, {
      serialize: false, // not into the prompt
      hideOnZoom: false,
      getMinHeight: () => (!this.#isOn ? 0 : panel.state === "idle" ? IDLE_HEIGHT : FULL_HEIGHT),
      getValue: () => "",
      setValue: () => {},
    });
    widget.serialize = false; // not into the saved workflow
    this.#panels.set(node, panel);
    this.#switch(node);
    after(node, "onAdded", () => this.#panels.set(node, panel));
    after(node, "onRemoved", () => this.#panels.delete(node));
    after(node, "onConfigure", () => grow(node));
    after(node, "onExecuted", (output) => {
      panel.element.dataset.node = String(node.id);
      panel.show(output?.halo_vae?.[0]);
    });
    grow(node);
  }

  /**
   * Show or hide every panel.
   *
   * @param {boolean} isOn
   */
  turn(isOn) {
    if (this.#isOn === isOn) return;
    this.#isOn = isOn;
    for (const node of this.#panels.keys()) {
      this.#switch(node);
      node.setSize?.([node.size[0], node.computeSize()[1]]);
      node.setDirtyCanvas?.(true, true);
    }
  }

  /** Draw every panel again, in other units. */
  redraw() {
    for (const panel of this.#panels.values()) panel.redraw();
  }

  /**
   * The panel of the node that a message names; inside a subgraph the id is a path such as "7:12".
   *
   * @param {unknown} executionId
   * @returns {NodePanel | undefined}
   */
  of(executionId) {
    const node = nodeOf(rootOf(this.app), executionId);
    const panel = this.#panels.get(node);
    if (panel) panel.element.dataset.node = String(executionId);
    return panel;
  }

  /** A workflow has been loaded: show what is known of its nodes' last decodes. */
  restore() {
    // Ids are a workflow's own: only the first workflow after a reload is taken for the one that the server ran.
    const asksServer = this.#isFirstGraph;
    this.#isFirstGraph = false;
    for (const [node, panel] of this.#panels) {
      const id = executionIdOf(rootOf(this.app), node);
      if (id === null) continue;
      panel.element.dataset.node = id;
      const known = this.app.nodeOutputs?.[id]?.halo_vae?.[0];
      if (known) panel.show(known, { isRestored: true });
      else if (asksServer) this.#ask(id, panel);
    }
  }

  /**
   * @param {string} id
   * @param {NodePanel} panel
   */
  async #ask(id, panel) {
    try {
      panel.show(await this.routes.panel(id), { isRestored: true });
    } catch {
      // a server that does not answer has nothing to show
    }
  }

  /** @param {GraphNode} node */
  #switch(node) {
    const panel = this.#panels.get(node);
    const widget = node.widgets?.find((/** @type {any} */ w) => w.name === WIDGET);
    if (!panel || !widget) return;
    widget.hidden = !this.#isOn;
    widget.options.hidden = !this.#isOn;
    panel.element.hidden = !this.#isOn;
  }
}

/**
 * @param {App} app
 * @returns {Graph}
 */
function rootOf(app) {
  return app.rootGraph ?? app.graph;
}

/**
 * @param {Graph} root
 * @param {unknown} executionId
 * @returns {GraphNode}
 */
function nodeOf(root, executionId) {
  if (executionId === null || executionId === undefined) return undefined;
  const path = String(executionId).split(":");
  const last = path.pop();
  let graph = root;
  for (const id of path) graph = byId(graph, id)?.subgraph;
  return byId(graph, last);
}

/**
 * @param {Graph} graph
 * @param {string | undefined} id
 * @returns {GraphNode}
 */
function byId(graph, id) {
  return graph?.getNodeById(Number(id)) ?? graph?.getNodeById(id) ?? undefined;
}

/**
 * The id by which the server knows a node; null where the node is in no graph.
 *
 * @param {Graph} graph
 * @param {GraphNode} node
 * @returns {string | null}
 */
function executionIdOf(graph, node) {
  const nodes = graph?._nodes ?? graph?.nodes ?? [];
  if (nodes.includes(node)) return String(node.id);
  for (const outer of nodes) {
    const inner = outer.subgraph ? executionIdOf(outer.subgraph, node) : null;
    if (inner !== null) return `${outer.id}:${inner}`;
  }
  return null;
}

/**
 * Make room for the panel; a workflow saved without it has a smaller node. Never makes a node smaller.
 *
 * @param {GraphNode} node
 */
function grow(node) {
  const [width, height] = node.computeSize();
  const wanted = [Math.max(node.size[0], width, MIN_WIDTH), Math.max(node.size[1], height)];
  if (wanted[0] === node.size[0] && wanted[1] === node.size[1]) return;
  node.setSize(wanted);
  node.setDirtyCanvas?.(true, true);
}

/**
 * Call `then` after whatever a node does in one of its methods.
 *
 * @param {GraphNode} node
 * @param {string} method
 * @param {(...given: any[]) => void} then
 */
function after(node, method, then) {
  const before = node[method];
  node[method] = function (/** @type {any[]} */ ...given) {
    const result = before?.apply(this, given);
    then(...given);
    return result;
  };
}
