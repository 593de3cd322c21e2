"""Loads the extension as ComfyUI does, without optional packages, and in a ComfyUI that lacks what the nodes need."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import types
from typing import Any

from common import answer, start

start(sys.argv[3:])

import comfy.sd  # noqa: E402, F401 (with all that ComfyUI itself needs, before it is hidden)
import comfy_api.latest  # noqa: E402

import halo_vae  # noqa: E402

OPTIONAL = ("psutil", "triton", "amdsmi", "pynvml", "gguf", "einops", "matplotlib", "tqdm", "platformdirs")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()} {'traceback' if record.exc_info else ''}".strip())


heard = Lines()
logging.getLogger("halo_vae").addHandler(heard)
facts: dict[str, Any] = {}
kept = {name: sys.modules.get(name) for name in (*OPTIONAL, "comfy_api.latest")}

sys.modules["comfy_api.latest"] = None  # type: ignore[assignment]
try:
    asyncio.run(halo_vae.comfy_entrypoint())
except ImportError as error:
    facts["too old"] = type(error).__name__
facts["too old said"], heard.lines = heard.lines, []
sys.modules["comfy_api.latest"] = comfy_api.latest

for name in OPTIONAL:
    sys.modules[name] = None  # type: ignore[assignment]
extension = asyncio.run(halo_vae.comfy_entrypoint())
nodes = asyncio.run(extension.get_node_list())
facts["nodes"] = [node.GET_SCHEMA().node_id for node in nodes]
facts["same schema twice"] = all(node.GET_NODE_INFO_V1() == node.GET_NODE_INFO_V1() for node in nodes)
facts["said"], heard.lines = heard.lines, []


class Server:
    """As much of ComfyUI's server as its extensions see while they load: its routes, as aiohttp has them."""

    def __init__(self) -> None:
        from aiohttp import web

        self.routes = web.RouteTableDef()


without_server, threads = sys.modules.get("server"), threading.active_count()
sys.modules["server"] = types.SimpleNamespace(PromptServer=types.SimpleNamespace())  # type: ignore[assignment]
asyncio.run(halo_vae.comfy_entrypoint())  # its class is there, and no server yet
facts["routes"] = []
sys.modules["server"].PromptServer.instance = Server()
for _ in range(2):
    asyncio.run(halo_vae.comfy_entrypoint())
    facts["routes"].append(sorted(f"{r.method} {r.path}" for r in sys.modules["server"].PromptServer.instance.routes))
facts["threads"] = threading.active_count() - threads
facts["twice said"] = [line for line in heard.lines if not line.startswith("INFO")]
del sys.modules["server"]
if without_server is not None:
    sys.modules["server"] = without_server

for name, module in kept.items():
    if module is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module
from common import latent, tiny_kl  # noqa: E402

samples, vae = {"samples": latent(1, 4, 4, 4)}, tiny_kl()
outputs = [node.execute(samples=samples, vae=vae) for node in nodes[:3]] + [
    nodes[0].execute(samples, vae, tile_size=64)
]
facts["frames"] = outputs[2].args[2]
facts["called"] = [[list(out.args[0].shape), type(out.args[1]).__name__, list(out.ui)] for out in outputs]
answer(facts)
