"""Decodes one VAE as the given flags have it loaded, beside the host's own decode and a float32 one.

ComfyUI does not take --gpu-only beside --cpu, so that one is set afterwards, with a device that is not plain "cpu".
"""

from __future__ import annotations

import sys

from common import answer, compared, filled, latent, start, tiny_kl

flags = sys.argv[3:]
start([flag for flag in flags if flag != "--gpu-only"])

import comfy.model_management as management  # noqa: E402
import torch  # noqa: E402
from comfy.cli_args import args  # noqa: E402

if "--gpu-only" in flags:
    args.gpu_only = True
    management.get_torch_device = lambda: torch.device("cpu:0")


def tiny() -> object:
    return tiny_kl()


z = latent(1, 4, 3, 4)
with torch.inference_mode():
    stock = tiny_kl().decode(z)
    wide = tiny_kl()
    filled(wide.first_stage_model.float())
    wide.vae_dtype = torch.float32
    truth = wide.decode(z).float()
facts = compared(tiny, z, stock=truth)
facts["stock_error"] = float((stock.float() - truth).abs().max())
facts["stock_dtype"] = str(stock.dtype)
facts["asked fp32"] = compared(tiny, z, stock=truth, precision_mode="fp32")["error"]
facts["output_device"] = str(tiny_kl().output_device)
answer(facts)
