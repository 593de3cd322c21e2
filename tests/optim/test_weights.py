"""Weight sources: a mapping, a file; what their hash sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import lower
from halo_vae.optim.weights import FileWeights, MappingWeights, TensorSpec
from halo_vae.tests.optim.helpers import PROFILE, decode_raw, latent, small_decoder, small_weights

CPU = torch.device("cpu")


def test_a_mapping_is_not_copied() -> None:
    tensors = {"a": torch.ones(3, requires_grad=True)}
    source = MappingWeights(tensors)
    got = source.get("a", torch.float32, CPU)
    assert got.data_ptr() == tensors["a"].data_ptr()
    assert not got.requires_grad
    assert source.get("a", torch.float16, CPU).dtype == torch.float16
    assert source.specs == {"a": TensorSpec(shape=(3,), dtype=torch.float32)}
    with pytest.raises(WeightsError, match="no tensor 'b'"):
        source.get("b", torch.float32, CPU)


@pytest.mark.parametrize("kind", ["mapping", "file"])
def test_the_hash_changes_with_any_weight(kind: str, tmp_path: Path) -> None:
    def hash_of(tensors: dict[str, torch.Tensor], n: list[int] = [0]) -> str:  # noqa: B006 (counts the files)
        if kind == "mapping":
            return MappingWeights(tensors).content_hash
        n[0] += 1
        save_file(tensors, str(tmp_path / f"{n[0]}.safetensors"))
        return FileWeights(tmp_path / f"{n[0]}.safetensors").content_hash

    base = small_weights()
    hashes = {hash_of(base)}
    assert hash_of({k: v.clone() for k, v in reversed(base.items())}) in hashes
    names = ["post_quant_conv.weight", "decoder.norm_out.bias", "decoder.conv_out.bias", "decoder.mid.attn_1.q.weight"]
    for name in names:
        for at in (0, -1):
            changed = dict(base) | {name: base[name].clone()}
            changed[name].view(-1)[at] += 1e-3
            hashes.add(hash_of(changed))
    hashes.add(hash_of(dict(base) | {"decoder.conv_in.weight": base["decoder.conv_in.weight"].half()}))
    hashes.add(hash_of(dict(base) | {"more": torch.zeros(1)}))
    hashes.add(hash_of({("x" + k if k == "decoder.conv_in.bias" else k): v for k, v in base.items()}))
    assert len(hashes) == 1 + 2 * len(names) + 3
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in hashes)


def test_the_hash_of_one_content_is_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    save_file(small_weights(), str(tmp_path / "w.safetensors"))
    assert FileWeights(tmp_path / "w.safetensors").content_hash == MappingWeights(small_weights()).content_hash


@pytest.mark.parametrize(
    "name",
    ["encoder.conv_in.weight", "quant_conv.bias", "first_stage_model.encoder.mid.q", "taesd_encoder.0.w", "conv1.w"],
)
def test_what_only_encodes_does_not_count(name: str, tmp_path: Path) -> None:
    base = small_weights()
    wanted = MappingWeights(base).content_hash
    for value in (0.0, float("nan")):  # what a host leaves where a file has no encoder
        more = dict(base) | {name: torch.full((3,), value)}
        save_file(more, str(tmp_path / "more.safetensors"))
        assert MappingWeights(more).content_hash == FileWeights(tmp_path / "more.safetensors").content_hash == wanted
    # what decodes counts, under names as like as these
    for kept in ("post_quant_conv.more", "decoder.conv1.w", "conv2.w"):
        assert MappingWeights(dict(base) | {kept: torch.zeros(3)}).content_hash != wanted


def test_the_hash_takes_tensors_of_every_kind() -> None:
    odd = {
        "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "half": torch.ones(9).bfloat16(),
        "eight": torch.ones(9).to(torch.float8_e4m3fn), "whole": torch.arange(4), "strided": torch.ones(4, 6).t(),
    }  # fmt: skip
    assert MappingWeights(odd).content_hash == MappingWeights(dict(odd)).content_hash
    odd["scalar"] = torch.tensor(1.25)
    first = MappingWeights(odd).content_hash
    odd["scalar"] = torch.tensor(1.0)
    assert MappingWeights(odd).content_hash != first


def test_a_file_decodes_as_its_tensors_do(tmp_path: Path) -> None:
    save_file(small_weights(), str(tmp_path / "w.safetensors"), metadata={"by": "a test"})
    source = FileWeights(tmp_path / "w.safetensors")
    assert source.metadata == {"by": "a test"}
    decoder = Decoder(weights=source, program=lower(source.specs), loaded_dtype=torch.float32)
    z = latent(1, 4, 6, 5)
    one, _ = decode_raw(Engine(profile=PROFILE), decoder, z)
    two, _ = decode_raw(Engine(profile=PROFILE), small_decoder(), z)
    assert torch.equal(one, two)
    with pytest.raises(WeightsError, match="holds no tensor 'b'"):
        source.get("b", torch.float32, CPU)


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", b"\xff" * 64, None])
def test_a_file_that_is_not_one_is_an_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"w\.safetensors (does not exist|is not a readable)"):
        FileWeights(path)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(small_weights(), str(path))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="truncated"):
        FileWeights(path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_weights_stored_in_another_dtype_are_converted(stored: torch.dtype) -> None:
    weights = {k: v.to(stored) for k, v in small_weights().items()}
    source = MappingWeights(weights)
    decoder = Decoder(weights=source, program=lower(source.specs), loaded_dtype=torch.float32)
    plain = MappingWeights({k: v.float() for k, v in weights.items()})
    same = Decoder(weights=plain, program=decoder.program, loaded_dtype=torch.float32)
    z = latent(1, 4, 6, 5)
    for mode in ("fp32", "bf16"):
        one, _ = decode_raw(Engine(profile=PROFILE), decoder, z, precision_mode=mode)
        two, _ = decode_raw(Engine(profile=PROFILE), same, z, precision_mode=mode)
        assert float((one - two).abs().max()) <= (1e-6 if mode == "fp32" else 0.05)
