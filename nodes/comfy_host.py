"""ComfyUI as the host of the nodes: the only file that touches it. Made for 0.3.64 to 0.20.1.

What newer versions add is used where it is there and left out where it is not.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import comfy.utils
import torch
from comfy_api.latest import ComfyExtension, io, ui
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.utils import get_executing_context
from torch import Tensor, nn

from ..optim.weights import WeightSource
from .host import ShowProgress
from .module_weights import ModuleWeights
from .panel_data import Panel
from .routes import MAX_BODY_BYTES, ROUTES, Asked, Route, answer
from .session import Session
from .specs import CATEGORY, Link, NodeSpec, Socket, Widget

__all__ = ["ComfyExtension", "ComfyHost", "add_routes", "io", "known", "node_of", "panel", "schema_of"]

log = logging.getLogger("halo_vae")

_QUANTIZED: Any = getattr(comfy.ops, "QuantizedTensor", ())
_SOCKETS: dict[str, Any] = {
    "LATENT": io.Latent, "VAE": io.Vae, "IMAGE": io.Image, "STRING": io.String, "INT": io.Int,
    "FLOAT": io.Float,
}  # fmt: skip


# -- schema


def schema_of(spec: NodeSpec) -> Any:
    """The node's schema in the form this version of ComfyUI knows."""
    return _made(
        io.Schema,
        {"search_aliases": list(spec.aliases), "has_intermediate_output": not spec.is_output},
        node_id=spec.id,
        display_name=spec.title,
        category=CATEGORY,
        description=spec.description,
        inputs=[*map(_link, spec.links), *map(_widget, spec.widgets)],
        outputs=[*map(_socket, spec.outputs)],
        hidden=[io.Hidden.unique_id],
        is_output_node=spec.is_output,
    )


def panel(*results: Any, text: str, data: Panel | None = None) -> Any:
    """A node's results, with a text for ComfyUI's own preview and data for our panel."""
    shown: dict[str, Any] = dict(ui.PreviewText(text).as_dict())
    return io.NodeOutput(*results, ui=shown if data is None else {**shown, "halo_vae": [data]})


def known(result: Any) -> Any:
    """A node's result; for None, which is unknown, what keeps the nodes that hang on it from running."""
    return ExecutionBlocker(None) if result is None else result


def node_of(cls: Any) -> str | None:
    """The id of the node that runs as the class `cls`; None where it is called from a script."""
    found = getattr(getattr(cls, "hidden", None), "unique_id", None)
    return None if found is None else str(found)


def _made(make: Callable[..., Any], newer: dict[str, Any], **given: Any) -> Any:
    """`make(**given)`, with those of the `newer` options that this ComfyUI's `make` takes."""
    known = inspect.signature(make).parameters
    return make(**given, **{name: value for name, value in newer.items() if name in known})


def _type(name: str) -> Any:
    return _SOCKETS.get(name) or io.Custom(name)


def _link(link: Link) -> Any:
    return _type(link.type).Input(link.id, optional=link.optional, tooltip=link.tooltip)


def _socket(socket: Socket) -> Any:
    return _type(socket.type).Output(id=socket.id, display_name=socket.id, tooltip=socket.tooltip)


def _widget(widget: Widget) -> Any:
    given: dict[str, Any] = {"id": widget.id, "default": widget.default, "tooltip": widget.tooltip}
    newer = {"advanced": True} if widget.advanced else {}
    if widget.kind == "choice":
        return _made(io.Combo.Input, newer, options=list(widget.options), **given)
    if widget.kind == "bool":
        return _made(io.Boolean.Input, newer, **given)
    if widget.id == "noise_seed":  # for this name the frontend adds a widget that changes it after each run
        newer["control_after_generate"] = False
    return _made(io.Int.Input, newer, min=widget.minimum, max=widget.maximum, step=widget.step, **given)


# -- host


class ComfyHost:
    """See Host."""

    def __init__(self) -> None:
        """Touches no device."""
        self.name = f"ComfyUI {_version()}"
        self.cancel_types: tuple[type[BaseException], ...] = (management.InterruptProcessingException,)
        self._lent: _LentMemory | None = None
        self._settings = _SettingsFile()

    def weights(self, vae: Any) -> WeightSource:
        """See Host."""
        return ModuleWeights(vae.first_stage_model, fetch_weight, patched=_is_patched(vae))

    def patch_id(self, vae: Any) -> Hashable:
        """See Host."""
        identifier: Hashable = getattr(getattr(vae, "patcher", None), "patches_uuid", None)
        return identifier

    def load(self, vae: Any, needed_bytes: int) -> None:
        """See Host."""
        if self._lent is not None and self._lent not in management.loaded_models():
            management.load_models_gpu([self._lent])
        management.load_models_gpu(
            [vae.patcher], memory_required=needed_bytes, force_full_load=getattr(vae, "disable_offload", False)
        )

    def free_bytes(self, device: torch.device) -> int | None:
        """See Host."""
        return int(management.get_free_memory(device))

    def total_bytes(self, device: torch.device) -> int | None:
        """See Host. Without what ComfyUI keeps back for other programs."""
        total = int(management.get_total_memory(device))
        return total if device.type == "cpu" else max(0, total - int(management.extra_reserved_memory()))

    def loaded_bytes(self, device: torch.device) -> int:
        """See Host."""
        return sum(int(m.model_loaded_memory()) for m in management.current_loaded_models if m.device == device)

    def make_room(self, needed_bytes: int, device: torch.device) -> None:
        """See Host. The VAE itself may go too: it is loaded anew for the next plan.

        On top of what ComfyUI counts as free: an allocation has failed in spite of it.
        """
        management.free_memory(management.get_free_memory(device) + needed_bytes, device)
        management.soft_empty_cache()

    def main_device(self) -> torch.device:
        """See Host."""
        device: torch.device = management.get_torch_device()
        return device

    def output_dtype(self, vae: Any) -> torch.dtype:
        """See Host. float32 on versions without a choice."""
        ask = getattr(vae, "vae_output_dtype", None)
        dtype: torch.dtype = torch.float32 if ask is None else ask()
        return dtype

    def check_interrupt(self) -> None:
        """See Host."""
        management.throw_exception_if_processing_interrupted()

    def progress_bar(self, total: int) -> ShowProgress:
        """See Host."""
        bar = comfy.utils.ProgressBar(total)
        return lambda done, total: bar.update_absolute(done, total)

    def prompt_id(self) -> str | None:
        """See Host."""
        context = get_executing_context()
        found = getattr(context, "prompt_id", None) or getattr(_server(), "last_prompt_id", None)
        return None if found is None else str(found)

    def send(self, event: str, data: Mapping[str, Any]) -> None:
        """See Host. To the client that queued the prompt, as ComfyUI's own progress goes; from any thread."""
        server = _server()
        if server is not None:
            server.send_sync(event, dict(data), server.client_id)

    def user_settings(self) -> Mapping[str, Any]:
        """See Host."""
        return self._settings.read()

    def lend(
        self, held_bytes: Callable[[], int], device: Callable[[], torch.device], release: Callable[[], None]
    ) -> None:
        """See Host. Made known to ComfyUI as a model of its own at the first load."""
        self._lent = _LentMemory(held_bytes, device, release)


class _AnyUser:
    """A request by no user in particular: ComfyUI takes it for the one user it has, unless it has several."""

    headers: Mapping[str, str] = {}


class _SettingsFile:
    """ComfyUI's settings file of the user, read again when it has changed.

    Which of several users queued a prompt cannot be told here, so with --multi-user there are no settings.
    """

    def __init__(self) -> None:
        self._state: tuple[Path, int, int] | None = None
        self._values: Mapping[str, Any] = {}

    def read(self) -> Mapping[str, Any]:
        """The settings by id. ValueError for a file that is damaged, OSError for one that cannot be read."""
        manager = getattr(_server(), "user_manager", None)
        if manager is None:
            return {}
        try:
            found = manager.get_request_user_filepath(_AnyUser(), "comfy.settings.json", create_dir=False)
        except KeyError:  # no such user
            return {}
        if found is None:
            return {}
        path = Path(found)
        try:
            now = path.stat()
        except FileNotFoundError:
            return {}
        state = (path, now.st_mtime_ns, now.st_size)
        if state != self._state:
            values = json.loads(path.read_text("utf-8"))
            if not isinstance(values, dict):
                raise ValueError("the settings file holds no JSON object")
            self._values, self._state = values, state
        return self._values


class HaloVaePool(nn.Module):
    """The name under which ComfyUI's log knows the memory that is kept between decodes."""


class _LentMemory(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """Memory kept between decodes, as a model that ComfyUI may unload.

    So it goes whenever ComfyUI wants room: for another model, on "free memory", on "unload models". ComfyUI counts it
    as loaded at its present size, and unloads small models before large ones.
    """

    def __init__(
        self, held_bytes: Callable[[], int], device: Callable[[], torch.device], release: Callable[[], None]
    ) -> None:
        self._held_bytes, self._device, self._release = held_bytes, device, release
        # "unload all models" means those of the main device, so that is where this one is said to be
        self._main: torch.device = management.get_torch_device()
        super().__init__(HaloVaePool(), load_device=self._main, offload_device=self._main)

    def model_size(self) -> int:
        return self._held_bytes() if self._device().type == self._main.type else 0

    def loaded_size(self) -> int:
        return self.model_size()

    def is_dynamic(self) -> bool:
        return False

    def partially_load(self, device_to: Any, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        return 0

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, force_patch_weights: bool = False) -> int:
        before = self.model_size()
        self._release()
        return before

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:  # otherwise it is only looked at anew
            self._release()
        return self.model


def fetch_weight(layer: nn.Module, leaf: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A layer's tensor as ComfyUI's own layers would compute with it: moved, widened, patched."""
    if hasattr(layer, "_v") and leaf in ("weight", "bias"):
        return _fetch_dynamic(layer, leaf, dtype, device)
    stored: Tensor = getattr(layer, leaf)
    functions = getattr(layer, f"{leaf}_function", None) or ()
    if isinstance(stored, _QUANTIZED):
        stored = stored.dequantize()
    tensor: Tensor = management.cast_to(stored, dtype, device, copy=bool(functions))
    for function in functions:
        tensor = function(tensor)
    return tensor


def _fetch_dynamic(layer: nn.Module, leaf: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy of a weight that ComfyUI brings to the device for the time of one use."""
    weight, bias, stream = comfy.ops.cast_bias_weight(
        layer, dtype=dtype, device=device, bias_dtype=dtype, offloadable=True
    )
    kept: Tensor = (weight if leaf == "weight" else bias).clone()
    comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return kept


def _is_patched(vae: Any) -> bool:
    patcher = getattr(vae, "patcher", None)
    return bool(getattr(patcher, "patches", None) or getattr(patcher, "weight_wrapper_patches", None))


def _version() -> str:
    try:
        from comfyui_version import __version__
    except ImportError:
        return "of an unknown version"
    return str(__version__)


# -- server


def _server() -> Any:
    """ComfyUI's server; None in a script, which has not imported it."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def add_routes(session: Callable[[], Session]) -> None:
    """Have ComfyUI's server answer our addresses. Without a server, or a second time, it only says so in the log."""
    server = _server()
    if server is None:
        log.debug("Halo VAE: there is no server here, so there are no pages")
        return
    taken = {(getattr(r, "method", ""), getattr(r, "path", "")) for r in server.routes}
    if any((route.method, route.path) in taken for route in ROUTES):
        log.warning("Halo VAE is loaded twice; its pages are answered by the copy that came first. Remove one of them.")
        return
    workers = ThreadPoolExecutor(2, thread_name_prefix="halo_vae-http")
    for route in ROUTES:
        server.routes.route(route.method, route.path)(_handler(route, session, workers))


def _handler(route: Route, session: Callable[[], Session], workers: ThreadPoolExecutor) -> Callable[[Any], Any]:
    """The route as a handler of aiohttp. The answer is made on a thread: it reads files, and the loop must not wait."""

    async def handle(request: Any) -> Any:
        from aiohttp import web

        body = b""
        while route.method == "POST" and len(body) <= MAX_BODY_BYTES:
            part = await request.content.readany()
            if not part:
                break
            body += part
        asked = Asked(
            query=dict(request.query),
            name=request.match_info.get("name", ""),
            headers={name.lower(): value for name, value in request.headers.items()},
            body=body,
        )
        given = await asyncio.get_running_loop().run_in_executor(workers, answer, route, session, asked)
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **given.headers}
        return web.Response(
            status=given.status, text=given.text, content_type=given.content_type, charset="utf-8", headers=headers
        )

    return handle
