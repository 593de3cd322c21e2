"""What the page is told by a real ComfyUI: panels, messages on its socket, answers of its server, settings."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from halo_vae.tests.comfyui.prompts import LATENT, decoding, sources, write_latent
from halo_vae.tests.comfyui.server import ROOT, Finished, Server

pytestmark = pytest.mark.usefixtures("calm")
PROGRESS, ENDED = "halo_vae.progress", "halo_vae.ended"


def decode(server: Server, vae: str, latent: str = LATENT, **widgets: Any) -> Finished:
    return server.run({**sources(vae, latent), **decoding("HaloVAEDecode", 4, **widgets)})


def panel_of(done: Finished, node: str = "4") -> Any:
    assert done.status == "success", str(done.messages[-1])[:1000]
    (panel,) = done.shown[node]["halo_vae"]
    return panel


def sent(
    server: Server, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """A request with exactly these headers, and the answer's."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def newest(server: Server) -> Any:
    return json.loads((server.base / "halo" / "history.jsonl").read_text("utf-8").splitlines()[-1])


@pytest.fixture
def settings(server: Server) -> Iterator[Any]:
    """Sets the user's settings over ComfyUI's own API, and takes them back."""
    used: set[str] = set()

    def put(**values: Any) -> None:
        chosen = {f"HaloVAE.{name}": value for name, value in values.items()}
        used.update(chosen)
        server.post("/settings", chosen)

    yield put
    server.post("/settings", dict.fromkeys(used))


def test_panel_and_text_come_with_the_picture(server: Server, vae: str) -> None:
    prompt = {**sources(vae), **decoding("HaloVAEDecode", 4, tile_size=384)}
    prompt["5"] = {"class_type": "HaloVAEStats", "inputs": {"stats": ["4", 1]}}
    done = server.run(prompt)
    panel = panel_of(done)
    assert done.text("4").startswith("Halo VAE · kl on cpu")
    assert panel["record"]["status"] == "ok"
    assert panel["record_id"] == newest(server)["record_id"]
    assert panel["recent"][-1]["record_id"] == panel["record_id"]
    assert panel["summary"]["free_bytes"] > 0
    assert panel_of(done, "5")["record_id"] == panel["record_id"]
    assert server.get("/halo_vae/panels/4") == panel == server.get("/api/halo_vae/panels/4")


def test_a_cached_decode_is_not_counted_again(server: Server, vae: str) -> None:
    prompt = {**sources(vae), **decoding("HaloVAEDecode", 4, tile_size=416)}
    panel = panel_of(server.run(prompt))
    server.run(prompt)
    assert server.get("/halo_vae/panels/4") == panel
    again = panel_of(decode(server, vae, tile_size=448))
    assert [entry["record_id"] for entry in again["recent"]][:-1] == [e["record_id"] for e in panel["recent"]][-31:]
    assert again["n_median"] >= 1


def test_progress_and_end_are_told_on_the_socket(server: Server, vae: str) -> None:
    done = decode(server, vae, "medium.latent", tile_size=64)
    told, (ended,) = done.of(PROGRESS), done.of(ENDED)
    prompt_id = done.of("executing")[0]["prompt_id"]
    assert all((data["node"], data["prompt_id"]) == ("4", prompt_id) for data in (*told, ended))
    assert (told[0]["stage"], told[0]["done"], told[0]["total"]) == ("start", 0, None)
    assert told[-1]["done"] == told[-1]["total"]
    assert [data["done"] for data in told] == sorted(data["done"] for data in told)
    assert "decode" in {data["stage"] for data in told}
    assert any(data["op"] for data in told)
    assert all(data["memory_bytes"] > 0 for data in told)
    assert ended["panel"] == panel_of(done)
    kinds = [message["type"] for message in done.messages]
    assert len(kinds) - kinds[::-1].index(PROGRESS) <= kinds.index(ENDED) < kinds.index("execution_success")


def test_no_more_than_ten_messages_a_second(server: Server) -> None:
    write_latent(server.base, "large.latent", (1, 4, 48, 48))
    done = decode(server, "full.safetensors", "large.latent", tile_size=64)
    times = [data["elapsed_ns"] for data in done.of(PROGRESS)]
    assert max(sum(0 <= t - start < 1_000_000_000 for t in times) for start in times) <= 10
    assert len(times) >= 3


def test_cp_1_the_end_of_a_cancelled_decode_is_told(server: Server) -> None:
    write_latent(server.base, "large.latent", (1, 4, 128, 128))
    asked: list[bool] = []

    def stop(message: dict[str, Any]) -> None:
        if message["type"] == PROGRESS and message["data"]["stage"] == "decode" and not asked:
            asked.append(True)
            server.post("/interrupt")

    prompt = {**sources("full.safetensors", "large.latent"), **decoding("HaloVAEDecode", 4, precision_mode="fp32")}
    done = server.run(prompt, on_message=stop)
    assert done.status == "interrupted"
    (ended,) = done.of(ENDED)
    assert ended["panel"]["record"]["status"] == ended["panel"]["recent"][-1]["status"] == "interrupted"
    assert server.get("/halo_vae/panels/4")["record_id"] == ended["panel"]["record_id"] == newest(server)["record_id"]


def test_history_records_and_exports(server: Server, vae: str) -> None:
    panel = panel_of(decode(server, vae, tile_size=480))
    page = server.get("/halo_vae/history?limit=2")
    assert page["rows"][0]["record_id"] == panel["record_id"]
    older = server.get(f"/halo_vae/history?limit=2&before={page['next']}") if page["next"] else {"rows": []}
    assert panel["record_id"] not in [row["record_id"] for row in older["rows"]]
    record = server.get(f"/halo_vae/records/{panel['record_id']}")
    assert record == newest(server)
    assert server.get("/halo_vae/metrics")["metrics"]["total_executions"] >= 1
    for form, kind in (("json", "application/json"), ("csv", "text/csv"), ("trace", "application/json")):
        status, headers, body = sent(server, "GET", f"/halo_vae/export?format={form}&id={panel['record_id']}")
        assert status == 200
        assert headers["content-type"].startswith(kind)
        assert headers["content-disposition"].startswith("attachment; filename=")
        assert headers["cache-control"] == "no-store"
        assert panel["record_id"] in body.decode()


def test_the_doctor_tells_no_paths(server: Server) -> None:
    text = json.dumps(server.get("/halo_vae/doctor"))
    assert '"kind": "doctor"' in text
    for private in (str(server.base), str(ROOT)):
        assert private not in text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("history?limit=0", 400), ("history?before=nowhere", 400), ("records/1", 400), (f"records/{'f' * 32}", 404),
        ("records/..%2f..%2fhistory.jsonl", 400), ("export?format=exe", 400), ("panels/nobody", 404),
    ],
)  # fmt: skip
def test_errors_are_sentences(server: Server, path: str, status: int) -> None:
    found, _, body = sent(server, "GET", f"/halo_vae/{path}")
    assert found == status
    assert list(json.loads(body)) == ["error"]


def test_foreign_pages_cannot_clear_the_history(server: Server, vae: str) -> None:
    decode(server, vae, tile_size=512)
    own, json_type = f"127.0.0.1:{server.port}", "application/json"
    refused = [
        {"Content_Type": json_type, "Origin": "http://evil.example"},
        {"Content_Type": json_type, "Origin": "null"},
        {"Content_Type": json_type, "Origin": f"http://{own}", "Sec_Fetch_Site": "cross-site"},
        {"Content_Type": "text/plain", "Origin": f"http://{own}"},
    ]
    for headers in refused:
        status, _, _ = sent(server, "POST", "/halo_vae/clear", b"{}", **headers)
        assert status in (403, 415), headers
    assert sent(server, "GET", "/halo_vae/clear")[0] in (404, 405)
    status, _, _ = sent(server, "POST", "/halo_vae/clear", b" " * 100_000, Content_Type=json_type)
    assert status == 413
    assert server.get("/halo_vae/history")["rows"]
    headers = {"Content_Type": json_type, "Origin": f"http://{own}", "Sec_Fetch_Site": "same-origin"}
    status, _, body = sent(server, "POST", "/api/halo_vae/clear", b"{}", **headers)
    assert status == 200
    assert json.loads(body)["removed"] >= 1
    assert server.get("/halo_vae/history")["rows"] == []


def test_the_server_answers_while_a_decode_runs(server: Server) -> None:
    write_latent(server.base, "large.latent", (1, 4, 48, 48))
    took: list[float] = []

    def look(message: dict[str, Any]) -> None:
        if message["type"] == PROGRESS and len(took) < 3:
            began = time.monotonic()
            server.get("/halo_vae/history?limit=1")
            took.append(time.monotonic() - began)

    prompt = {**sources("full.safetensors", "large.latent"), **decoding("HaloVAEDecode", 4, tile_size=96)}
    assert server.run(prompt, on_message=look).status == "success"
    assert len(took) == 3


def test_settings_hold_from_the_next_decode(server: Server, vae: str, settings: Any) -> None:
    assert panel_of(decode(server, vae, tile_size=544))["record"]["level"] == "summary"
    settings(Profile="per_op", Units="decimal")
    done = decode(server, vae, tile_size=576)
    panel = panel_of(done)
    assert panel["record"]["level"] == "per_op"
    assert panel["left_out"]["stages"] > 0
    assert newest(server)["stages"]
    assert "KiB" not in done.text("4")
    assert re.search(r"\d (kB|MB)\b", done.text("4"))
    settings(Profile="off", Panel=False)
    done = decode(server, vae, tile_size=608)
    assert panel_of(done)["record"]["level"] == "off"
    assert done.of(PROGRESS) == []
    assert len(done.of(ENDED)) == 1
    settings(Profile="nonsense", HistorySize=0)
    for tile_size in (640, 672):
        assert panel_of(decode(server, vae, tile_size=tile_size))["record"]["level"] == "summary"
    assert server.log.count("HaloVAE.Profile is 'nonsense'") == 1
    assert server.log.count("HaloVAE.HistorySize is 0") == 1


def test_scripts_of_the_pack_are_served(server: Server) -> None:
    ours = sorted((ROOT / "web").rglob("*.js"))
    listed = [path for path in server.get("/extensions") if "ComfyUI-HaloVAE" in path]
    assert len(listed) == len(ours)
    for path in [*listed, "/extensions/ComfyUI-HaloVAE/docs/HaloVAEDecode.md"]:
        assert sent(server, "GET", path)[0] == 200
