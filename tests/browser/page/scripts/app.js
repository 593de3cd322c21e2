/** Stand-in for ComfyUI's app: extensions, nodes with DOM widgets, settings, a sidebar; just what the tests need. */

import { api } from "./api.js";

class Graph {
  _nodes = [];

  getNodeById(id) {
    return this._nodes.find((node) => node.id === id);
  }

  add(node) {
    this._nodes.push(node);
    node.graph = this;
    node.onAdded?.(this);
  }

  remove(node) {
    this._nodes = this._nodes.filter((other) => other !== node);
    node.frame.remove();
    node.onRemoved?.();
  }
}

class Node {
  id = -1;
  properties = {};
  widgets = [];
  size = [220, 80];

  constructor(comfyClass, title) {
    this.comfyClass = comfyClass;
    this.title = title;
    this.frame = document.createElement("div");
    this.frame.className = "node";
    const heading = document.createElement("h3");
    heading.textContent = title;
    this.frame.append(heading);
  }

  addWidget(name, value) {
    this.widgets.push({ name, value, options: {} });
  }

  addDOMWidget(name, type, element, options) {
    const mount = document.createElement("div");
    mount.className = "dom-widget";
    mount.append(element);
    this.frame.append(mount);
    const widget = { name, type, element, options, mount, get value() { return options.getValue?.() ?? ""; } };
    this.widgets.push(widget);
    return widget;
  }

  computeSize() {
    const heights = this.widgets.map((widget) => (widget.hidden ? 0 : (widget.options.getMinHeight?.() ?? 24)));
    return [210, 60 + heights.reduce((sum, height) => sum + height, 0)];
  }

  setSize(size) {
    this.size = [...size];
    this.frame.style.width = `${size[0]}px`;
    const others = this.widgets.filter((widget) => !widget.mount).length * 24 + 60;
    for (const widget of this.widgets) {
      if (widget.mount) widget.mount.style.height = `${Math.max(0, size[1] - others)}px`;
    }
    this.onResize?.(size);
  }

  setDirtyCanvas() {}

  configure(saved) {
    this.id = saved.id;
    this.setSize(saved.size);
    this.onConfigure?.(saved);
  }

  /** As a saved workflow has it. */
  serialize() {
    const kept = this.widgets.filter((widget) => widget.serialize !== false);
    return { id: this.id, type: this.comfyClass, size: this.size, properties: this.properties, widgets_values: kept.map((widget) => widget.value) };
  }
}

const extensions = [];
const stored = new Map();
const tabs = new Map();

export const app = {
  rootGraph: new Graph(),
  nodeOutputs: {},
  extensions,
  registerExtension: (extension) => extensions.push(extension),
  extensionManager: {
    registerSidebarTab: (tab) => tabs.set(tab.id, tab),
    command: { execute: (command) => toggle(command.split(".").pop()) },
    setting: {
      get: (id) => stored.get(id),
      set(id, value) {
        const before = stored.get(id);
        stored.set(id, value);
        definitions().find((setting) => setting.id === id)?.onChange?.(value, before);
      },
    },
  },
};

function definitions() {
  return extensions.flatMap((extension) => extension.settings ?? []);
}

/** Show a tab, or hide it. */
function toggle(id) {
  const sidebar = document.getElementById("sidebar");
  sidebar.hidden = !sidebar.hidden;
  if (sidebar.hidden) sidebar.replaceChildren();
  else tabs.get(id).render(sidebar);
}

/** Make a node as when a user puts one into the graph. */
function addNode(comfyClass, id, title = "VAE Decode (Halo)", graph = app.rootGraph) {
  const node = new Node(comfyClass, title);
  node.addWidget("method", "auto");
  for (const extension of extensions) extension.nodeCreated?.(node, app);
  node.id = id;
  document.getElementById("nodes").append(node.frame);
  graph.add(node);
  node.setSize(node.size);
  return node;
}

/** Load a workflow of these nodes: [class, id, title]. */
function load(nodes) {
  for (const node of [...app.rootGraph._nodes]) app.rootGraph.remove(node);
  for (const [comfyClass, id, title] of nodes) addNode(comfyClass, id, title).configure({ id, size: [220, 80] });
  for (const extension of extensions) extension.afterConfigureGraph?.([], app);
}

/** What ComfyUI does when a node has run or was cached: hand its output to the node. */
function executed(id, output) {
  app.nodeOutputs[id] = output;
  app.rootGraph.getNodeById(id)?.onExecuted?.(output);
}

export async function start() {
  for (const setting of definitions()) {
    if (!stored.has(setting.id)) stored.set(setting.id, setting.defaultValue);
    setting.onChange?.(stored.get(setting.id), undefined);
  }
  for (const extension of extensions) await extension.init?.(app);
  for (const extension of extensions) await extension.setup?.(app);
  window.comfy = { app, api, addNode, load, executed, toggle, Graph, tabs };
}
