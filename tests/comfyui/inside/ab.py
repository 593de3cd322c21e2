"""The benchmark node on real VAE objects: stock that has to tile, a side that fails, a stop."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from common import answer, fingerprint, latent, start, tiny_kl

start(sys.argv[3:])

import comfy.model_management as management  # noqa: E402
import torch  # noqa: E402
from comfy_execution.graph_utils import ExecutionBlocker  # noqa: E402

import halo_vae  # noqa: E402

facts: dict[str, Any] = {}
extension = asyncio.run(halo_vae.comfy_entrypoint())
node = next(n for n in asyncio.run(extension.get_node_list()) if n.GET_SCHEMA().node_id == "HaloVAEBenchmark")


def described(out: Any) -> dict[str, Any]:
    images, difference, report, figures, speedup, max_error, record = out.args
    return {
        "images": list(images.shape) if isinstance(images, torch.Tensor) else None,
        "difference": list(difference.shape) if isinstance(difference, torch.Tensor) else None,
        "blocked": [isinstance(result, ExecutionBlocker) for result in out.args],
        "report": report,
        "figures": json.loads(figures),
        "speedup": speedup if isinstance(speedup, float) else None,
        "max_error": max_error if isinstance(max_error, float) else None,
        "status": record.status.value,
        "shown": out.ui["text"][0] == report,
    }


samples = {"samples": latent(1, 4, 8, 8)}
with torch.inference_mode():
    vae = tiny_kl()
    before = fingerprint(vae)
    facts["plain"] = described(node.execute(samples=samples, vae=vae, runs=2))
    facts["same weights"] = fingerprint(vae) == before
    facts["tiled"] = described(node.execute(samples=samples, vae=tiny_kl(), runs=1, stock="tiled"))

    vae = tiny_kl()
    decode = vae.first_stage_model.decode

    def short(z: Any, *given: Any, **named: Any) -> Any:
        if not short.failed:  # type: ignore[attr-defined]
            short.failed = True  # type: ignore[attr-defined]
            raise management.OOM_EXCEPTION("out of memory")
        return decode(z, *given, **named)

    short.failed = False  # type: ignore[attr-defined]
    vae.first_stage_model.decode = short
    facts["had to tile"] = described(node.execute(samples=samples, vae=vae, runs=1, warm_ups=0, method="blended"))

    def broken(z: Any, *given: Any, **named: Any) -> Any:
        raise ValueError("a decoder that is broken")

    vae = tiny_kl()
    for layer in vae.first_stage_model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.padding_mode = "circular"
    facts["ours failed"] = described(node.execute(samples=samples, vae=vae, runs=1, method="exact"))

    vae = tiny_kl()
    vae.decode = broken
    facts["stock failed"] = described(node.execute(samples=samples, vae=vae, runs=1))

    management.interrupt_current_processing(True)
    try:
        node.execute(samples=samples, vae=tiny_kl(), runs=1)
    except BaseException as error:
        facts["interrupted"] = [type(error).__name__, management.processing_interrupted()]
    facts["after interrupt"] = described(node.execute(samples=samples, vae=tiny_kl(), runs=1))["max_error"]
answer(facts)
