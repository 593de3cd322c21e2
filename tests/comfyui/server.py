"""A real ComfyUI server in a process of its own, with this checkout as its only extension."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from halo_vae.tests.comfyui.installs import Install
from halo_vae.tests.comfyui.websocket import WebSocket

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "profiling" / "demo_data"
START_S, PROMPT_S = 180.0, 300.0
Prompt = dict[str, dict[str, Any]]


class PromptRefusedError(Exception):
    """The server did not take a prompt."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(json.dumps(answer)[:2000])
        self.answer = answer


@dataclass
class Finished:
    """How a prompt ended and what its nodes showed."""

    status: str
    """`success`, `error` or `interrupted`."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    shown: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each node sent to its panel, by node id."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [m["data"] for m in self.messages if m["type"] == kind]

    @property
    def error(self) -> dict[str, Any]:
        return self.of("execution_error")[-1]

    def text(self, node: str) -> str:
        return "\n".join(self.shown[node]["text"])


class Server:
    """A running server and a client of it."""

    def __init__(self, port: int, base: Path, log: Path) -> None:
        self.port, self.base, self._log = port, base, log
        self.client = uuid.uuid4().hex
        self.socket = WebSocket(port, f"/ws?clientId={self.client}", PROMPT_S)

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PROMPT_S)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, body = self.request("GET", path)
        assert status == 200, (path, status, body[:500])
        return json.loads(body)

    def post(self, path: str, body: Any = None) -> None:
        status, answer = self.request("POST", path, {} if body is None else body)
        assert status == 200, (path, status, answer[:500])

    def view(self, image: dict[str, str]) -> bytes:
        status, body = self.request("GET", "/view?" + urlencode(image, quote_via=quote))
        assert status == 200, image
        return body

    def queue(self, prompt: Prompt) -> str:
        status, body = self.request("POST", "/prompt", {"prompt": prompt, "client_id": self.client})
        answer = json.loads(body)
        if status != 200 or answer.get("node_errors"):
            raise PromptRefusedError(answer)
        return str(answer["prompt_id"])

    def run(self, prompt: Prompt, on_message: Callable[[dict[str, Any]], None] = lambda message: None) -> Finished:
        """Queue a prompt and listen until it has ended."""
        prompt_id, done = self.queue(prompt), Finished("")
        ends = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}
        while not done.status:
            message = json.loads(self.socket.receive())
            if message["data"].get("prompt_id", prompt_id) != prompt_id:
                continue
            done.messages.append(message)
            on_message(message)
            done.status = ends.get(message["type"], "")
            if message["type"] == "executed" and message["data"]["output"]:
                done.shown[message["data"]["node"]] = message["data"]["output"]
        self._settle()
        return done

    def _settle(self) -> None:
        """Wait until the queue is empty: the worker tidies up after it has told the end."""
        deadline = time.monotonic() + PROMPT_S
        while self.get("/queue")["queue_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def prepare_base(folder: Path) -> Path:
    """A folder with models, inputs and this checkout as an extension: nothing of the ComfyUI checkout is touched."""
    for name in ("custom_nodes", "models/vae", "input", "output", "temp", "user"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "custom_nodes" / "ComfyUI-HaloVAE").symlink_to(ROOT, target_is_directory=True)
    shutil.copy(DEMO / "tiny_kl_vae.safetensors", folder / "models" / "vae")
    for latent in DEMO.glob("*.latent"):
        shutil.copy(latent, folder / "input")
    return folder


@contextmanager
def running(install: Install, base: Path, *flags: str, **variables: str) -> Iterator[Server]:
    """A server on the CPU with these flags, stopped at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HALO_VAE_"))}
    env |= {"HALO_VAE_DATA_DIR": str(base / "halo"), "HALO_VAE_CACHE_DIR": str(base / "halo"), **variables}
    env |= {"OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1"}
    log = base / f"server-{port}.log"
    command = [
        str(install.python), "main.py", "--cpu", "--port", str(port), "--base-directory", str(base),
        "--database-url", f"sqlite:///{base}/user/comfyui.db", "--disable-api-nodes", *flags,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=install.folder, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        _wait_until_up(process, port, log)
        server = Server(port, base, log)
        yield server
        server.socket.close()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text("utf-8", "replace")[-4000:]
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/system_stats")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
        finally:
            connection.close()
    raise TimeoutError(log.read_text("utf-8", "replace")[-4000:])
