"""What is staged for every tile is the window of the normalised, activated, zero-padded input it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from halo_vae.optim import staging
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.kernels.eager import activate
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.staging import Stager
from halo_vae.optim.tiling import Tile
from halo_vae.tests.optim.helpers import decode_raw, golden_decoder, latent, profile, small_decoder


def rubbish(nbytes: int, device: torch.device) -> Tensor:
    """Fresh memory as it may come: NaN in every float dtype."""
    return torch.full((nbytes,), 255, dtype=torch.uint8, device=device)


def naive_window(stager: Stager, source: Tensor, tile: Tile) -> Tensor:
    """Out of a copy of the whole source, taken before anything was written over it."""
    op, step = stager._op, stager._step
    x = source.float()
    if op.norm is not None:
        scale, shift = stager._affine
        x = x * scale + shift
    x = activate(x, op.act)
    if op.upsample == 2 and not step.fold:
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    h = op.halo
    x = functional.pad(x, (h, h, h, h))[tile.images.start : tile.images.stop]
    return x[:, :, tile.rows.start : tile.rows.stop + 2 * h, tile.cols.start : tile.cols.stop + 2 * h]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Compares every staged tile; gives (op, whether rows were carried) of each."""
    seen: list[tuple[str, bool]] = []
    sources: dict[int, Tensor] = {}
    real_init, real_stage, real_carried = Stager.__init__, Stager.stage, Stager._carried
    carried = [False]

    def init(self: Stager, *args: object) -> None:
        real_init(self, *args)
        sources[id(self)] = self._src.clone()

    def look(self: Stager, tile: Tile, halo: int) -> Tensor | None:
        rows = real_carried(self, tile, halo)
        carried[0] = rows is not None
        return rows

    def stage(self: Stager, tile: Tile) -> Tensor:
        carried[0] = False
        out = real_stage(self, tile)
        assert tuple(out.shape) == self.shape(tile)
        wanted, rounding = naive_window(self, sources[id(self)], tile), 1e-6 if out.dtype == torch.float32 else 1e-2
        # a tile that slid back over an overwritten input shows anything where it computes nothing new
        top, left = tile.new_rows.start - tile.rows.start, tile.new_cols.start - tile.cols.start
        if self._op.halo == 0:
            out_new, wanted = out[:, :, top:, left:], wanted[:, :, top:, left:]
        else:
            out_new = out
        assert torch.allclose(out_new.float(), wanted, rtol=rounding, atol=rounding), (self._op.name, tile)
        seen.append((self._op.name, carried[0]))
        return out

    monkeypatch.setattr(staging.Stager, "__init__", init)
    monkeypatch.setattr(staging.Stager, "_carried", look)
    monkeypatch.setattr(staging.Stager, "stage", stage)
    return seen


DECODERS = {
    "kl": small_decoder,
    "hunyuan": lambda: golden_decoder("hunyuan_image"),
    "taesd": lambda: golden_decoder("taesd"),
}


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "mixed"])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_every_window(name: str, plan: str, mode: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder: Decoder = DECODERS[name]()
    seen = watch(monkeypatch)
    engine = Engine(profile=profile(), pool=MemoryPool(rubbish))
    size = (11, 9) if name == "kl" else (4, 3)
    tile = max(16, 2 * decoder.program.scale[1])
    raw, heard = decode_raw(
        engine, decoder, latent(2, decoder.program.latent_channels, *size), plan=plan, tile_size=tile,
        precision_mode=mode, tensor_layout_optimization=channels_last,
    )  # fmt: skip
    assert torch.isfinite(raw).all()
    assert len(seen) == len([t for t in heard.tiles if t[0] in {op for op, _ in seen}])
    assert {carried for _, carried in seen} == ({True, False} if plan == "strips" else {False})


def test_rows_are_carried_from_strip_to_strip_of_one_picture_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    decode_raw(Engine(profile=profile()), small_decoder(), latent(3, 4, 11, 9), plan="strips",
               tile_size=16)  # fmt: skip
    carried = [was for op, was in seen if op == "decoder.conv_out"]
    per_picture = len(carried) // 3
    assert per_picture > 1
    assert carried == ([False] + [True] * (per_picture - 1)) * 3
