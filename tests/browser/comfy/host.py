"""ComfyUI's page as a user meets it: open, load a workflow, run, stop, reload, set, look."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halo_vae.tests.comfyui.installs import Install
from halo_vae.tests.comfyui.server import Server

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Error, Page, Response

OURS = re.compile(r"halo[-_ ]?vae", re.IGNORECASE)
LOAD_MS, RUN_MS, STEP_MS = 90_000, 240_000, 15_000
ENDS = ("execution_success", "execution_error", "execution_interrupted")
DEFAULTS = {"HaloVAE.Panel": True, "HaloVAE.Units": "binary", "HaloVAE.Profile": "summary"}
"""Our own settings, as they are before anybody changes them."""
SETTINGS = {
    **DEFAULTS,
    "Comfy.TutorialCompleted": True,
    "Comfy.UseNewMenu": "Top",
    "Comfy.Notification.ShowVersionUpdates": False,
    "Comfy.Graph.CanvasMenu": False,
    "Comfy.Minimap.Visible": False,
    "Comfy.Workflow.ConfirmDelete": False,
    "Comfy.Window.UnloadConfirmation": False,
}
"""Also: no first-steps dialogs over the canvas, and no question when the page is left."""

_LISTEN = """types => {
    const told = [];
    window.haloTold = told;
    for (const type of types)
        window.comfyAPI.api.api.addEventListener(type, (event) => told.push([type, event.detail]));
}"""
_HEARD = ("execution_start", "execution_cached", "executed", "progress", *ENDS)


class Host:
    """One page of a running ComfyUI."""

    def __init__(self, page: Page, server: Server, install: Install) -> None:
        self.page, self.server, self.install = page, server, install
        self.complaints: list[str] = []
        """Errors and warnings in the console that come from this package, failed requests for its files among them."""
        self.console: list[str] = []
        self._settings = SETTINGS
        page.set_default_timeout(STEP_MS)
        page.on("console", self._on_console)
        page.on("pageerror", self._on_error)
        page.on("response", self._on_response)

    # -- the page

    def open(self, **settings: Any) -> None:
        """A fresh page with these settings."""
        self._settings = {**SETTINGS, **settings}
        self.server.post("/settings", self._settings)
        self.page.goto(f"http://127.0.0.1:{self.server.port}/", timeout=LOAD_MS)
        self._await_ready()

    def reload(self) -> None:
        """As with F5; another page may have changed the server's settings meanwhile."""
        self.server.post("/settings", self._settings)
        self.page.reload(timeout=LOAD_MS)
        self._await_ready()

    def _await_ready(self) -> None:
        ready = "() => !!window.comfyAPI?.app?.app?.extensionManager && !!window.comfyAPI.app.app.canvas?.graph"
        self.page.wait_for_function(ready, timeout=LOAD_MS)
        self.page.wait_for_function("() => !document.querySelector('.p-blockui-mask')", timeout=LOAD_MS)
        self.page.evaluate(_LISTEN, list(_HEARD))

    # -- workflows

    def load(self, workflow: dict[str, Any], folder: Path, name: str = "tested") -> None:
        """Open a workflow's file, as with Ctrl+O."""
        path = folder / f"{name}.json"
        path.write_text(json.dumps(workflow), "utf-8")
        self.page.set_input_files("#comfy-file-input", str(path))
        expected = sorted(str(node["id"]) for node in workflow["nodes"])
        self.page.wait_for_function(
            "ids => JSON.stringify(window.comfyAPI.app.app.graph.nodes.map(n => String(n.id)).sort()) === ids",
            arg=json.dumps(expected, separators=(",", ":")),
        )

    def saved(self) -> dict[str, Any]:
        """The workflow as it would be saved."""
        return self.page.evaluate("() => window.comfyAPI.app.app.graph.serialize()")  # type: ignore[no-any-return]

    def prompt(self) -> dict[str, Any]:
        """The prompt as it would be queued."""
        found = self.page.evaluate("() => window.comfyAPI.app.app.graphToPrompt()")
        return found["output"]  # type: ignore[no-any-return]

    # -- runs

    def run(self) -> str:
        """Run the workflow to its end; gives `success`, `error` or `interrupted`."""
        self.start()
        return self.ended()

    def start(self) -> None:
        """Press the keys for Run, and wait until the server has begun."""
        self.page.evaluate("() => { window.haloTold.length = 0; document.activeElement?.blur?.(); }")
        self.page.keyboard.press("Control+Enter")
        self.wait_for("execution_start")

    def ended(self) -> str:
        self.page.wait_for_function(
            "types => window.haloTold.some(([type]) => types.includes(type))", arg=list(ENDS), timeout=RUN_MS
        )
        return next(kind for kind, _ in self.told() if kind in ENDS).removeprefix("execution_")

    def wait_for(self, kind: str, timeout_ms: int = STEP_MS) -> None:
        self.page.wait_for_function(
            "kind => window.haloTold.some(([type]) => type === kind)", arg=kind, timeout=timeout_ms
        )

    def told(self) -> list[tuple[str, Any]]:
        """What the server has told this page since the last start."""
        return [(kind, detail) for kind, detail in self.page.evaluate("() => window.haloTold")]

    def stop(self) -> None:
        """Interrupt what runs."""
        self.command("Comfy.Interrupt")

    # -- the rest of the page

    def command(self, name: str) -> None:
        self.page.evaluate("name => window.comfyAPI.app.app.extensionManager.command.execute(name)", name)

    def set(self, key: str, value: Any) -> None:
        self.page.evaluate(
            "([key, value]) => window.comfyAPI.app.app.extensionManager.setting.set(key, value)", [key, value]
        )

    def stored(self) -> dict[str, Any]:
        """The user's settings as the server keeps them."""
        return self.server.get("/settings")  # type: ignore[no-any-return]

    def show_node(self, node: int) -> None:
        """Bring a node into view, as large as it is or as the page allows."""
        self.page.evaluate(
            """id => {
                const app = window.comfyAPI.app.app, node = app.graph.getNodeById(id), ds = app.canvas.ds;
                const box = app.canvas.canvas.getBoundingClientRect();
                const scale = Math.min(1, (box.height - 130) / (node.size[1] + 40));
                ds.scale = scale;
                ds.offset[0] = box.width / scale / 2 - node.pos[0] - node.size[0] / 2;
                ds.offset[1] = (box.height + 80) / scale / 2 - node.pos[1] - node.size[1] / 2 + 10;
                app.canvas.setDirty(true, true);
            }""",
            node,
        )
        self.settle()

    def settle(self) -> None:
        """Let the page draw what it has been told to."""
        self.page.evaluate("() => new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")

    def close_dialogs(self) -> None:
        """What ComfyUI lays over the canvas, after an error for example."""
        opened = self.page.locator("[role=dialog]:not(.p-popover):visible")
        for _ in range(5):
            if (n := opened.count()) == 0:
                return
            self.page.keyboard.press("Escape")
            opened.nth(n - 1).wait_for(state="hidden")

    def tidy(self, settings: dict[str, Any]) -> None:
        """Set these, and leave nothing open over the canvas or beside it, nor anything that follows the mouse."""
        self.page.mouse.move(*self._corner())
        self.close_dialogs()
        for key, value in settings.items():
            self.set(key, value)
        self.page.evaluate("() => { window.comfyAPI.app.app.extensionManager.sidebarTab.activeSidebarTabId = null; }")

    def _corner(self) -> tuple[int, int]:
        size = self.page.viewport_size
        assert size is not None
        return size["width"] - 8, size["height"] - 8

    # -- the console

    def take_complaints(self) -> list[str]:
        """Errors and warnings of ours since the last call."""
        taken, self.complaints = self.complaints, []
        return taken

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        where = message.location.get("url", "")
        self.console.append(f"{message.type}: {message.text} ({where})")
        if OURS.search(where) or OURS.search(message.text):
            self.complaints.append(self.console[-1])

    def _on_error(self, error: Error) -> None:
        told = f"exception: {error.message} {error.stack}"
        self.console.append(told)
        if OURS.search(told):
            self.complaints.append(told)

    def _on_response(self, response: Response) -> None:
        if response.status >= 400 and OURS.search(response.url):
            self.complaints.append(f"{response.status} for {response.url}")
