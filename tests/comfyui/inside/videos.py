"""Decodes clips by ComfyUI's own video VAE objects and by ours. Needs a ComfyUI that loads any width."""

from __future__ import annotations

import json
import sys
from typing import Any

from common import answer, compared, filled, here, latent, start

start(sys.argv[3:])

import comfy.sd  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402


def empty(*shape: int) -> Any:
    return torch.zeros(shape)


def ltx() -> tuple[dict[str, Any], dict[str, str]]:
    """A golden's weights, and its layout as a real file carries it."""
    with safe_open(str(here("golden") / "ltx_plain.safetensors"), framework="pt") as file:
        weights = {key[2:]: file.get_tensor(key) for key in file.keys() if key.startswith("w:")}  # noqa: SIM118
        return weights, {"config": json.dumps({"vae": json.loads(file.metadata()["config"])})}


WIDTH = 16
LTX = ltx()
KINDS: dict[str, tuple[dict[str, Any], dict[str, str] | None, tuple[int, ...]]] = {
    "wan21": (
        {
            "decoder.middle.0.residual.0.gamma": empty(4 * WIDTH, 1, 1, 1),
            "decoder.head.0.gamma": empty(WIDTH, 1, 1, 1), "encoder.conv1.weight": empty(WIDTH, 3, 3, 3, 3),
            "decoder.head.2.weight": empty(3, WIDTH, 3, 3, 3),
        },
        None, (2, 16, 3, 6, 5),
    ),
    "ltx": (*LTX, (1, 128, 3, 3, 2)),
    "taehv": ({"decoder.22.bias": empty(3), "decoder.1.weight": empty(256, 16, 3, 3).half()}, None, (1, 16, 3, 6, 5)),
    "taehv unscaled": ({"decoder.22.bias": empty(3), "decoder.1.weight": empty(256, 16, 3, 3)}, None, (1, 16, 3, 6, 5)),
    "taehv ltx2": ({"decoder.22.bias": empty(48), "decoder.1.weight": empty(256, 128, 3, 3)}, None, (1, 128, 2, 3, 2)),
    "svd": ({"decoder.mid.block_1.mix_factor": empty(1)}, None, (3, 4, 4, 3)),
}  # fmt: skip
"""The tensors by which the host tells a kind, a latent, and the file's metadata."""
facts: dict[str, Any] = {}
for name, (file, metadata, shape) in KINDS.items():

    def make(file: dict[str, Any] = file, metadata: Any = metadata) -> Any:
        vae = comfy.sd.VAE(sd={k: t.clone() for k, t in file.items()}, metadata=metadata, dtype=torch.float32)
        model = filled(vae.first_stage_model)
        with torch.no_grad():
            for part, tensor in model.named_parameters():
                if part.endswith("gamma"):
                    tensor.add_(1.0)
        return vae

    facts[name] = compared(make, latent(*shape), precision_mode="fp32")
    sys.stderr.write(f"{name}: {facts[name]}\n")
answer(facts)
