/**
 * Halo VAE in ComfyUI's page: the only module that imports anything of ComfyUI's.
 *
 * ComfyUI imports every module under this folder as an extension of its own; the others only define things.
 */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { HistoryTab } from "./history/tab.js";
import { listen } from "./host/events.js";
import { NodePanels } from "./host/nodes.js";
import { Routes } from "./host/routes.js";
import { settings } from "./host/settings.js";
import { element } from "./view/elements.js";
import { setByteUnits } from "./view/format.js";

const TAB = "halo-vae";
const routes = new Routes(api);
const history = new HistoryTab(routes);
const panels = new NodePanels(app, routes, openRecord);

/** @param {string} recordId */
function openRecord(recordId) {
  const manager = app.extensionManager;
  if (!history.element.isConnected) manager.command?.execute(`Workspace.ToggleSidebarTab.${TAB}`);
  history.openRecord(recordId);
}

function addStyles() {
  document.head.append(element("link", { rel: "stylesheet", href: new URL("./halo_vae.css", import.meta.url).href }));
}

/** @param {string} units */
function changeUnits(units) {
  setByteUnits(units);
  panels.redraw();
  history.redraw();
}

app.registerExtension({
  name: "halo_vae.profiler",
  settings: settings({ onPanel: (isOn) => panels.turn(isOn !== false), onUnits: changeUnits }),
  init() {
    addStyles();
    // an event without a listener is told in the browser's console, so these listen with the panels off too
    listen(api, panels, () => history.changed());
  },
  setup() {
    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-chart-bar",
      title: "Halo VAE",
      tooltip: "Halo VAE: history of decodes",
      type: "custom",
      render(/** @type {HTMLElement} */ container) {
        if (container.firstChild !== history.element) container.replaceChildren(history.element);
        history.open();
      },
    });
  },
  nodeCreated(/** @type {any} */ node) {
    panels.attach(node);
  },
  afterConfigureGraph() {
    panels.restore();
  },
});
