"""Clips through the nodes: known decoders exactly, frames in the right order, and VAE objects that say otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halo_vae.nodes import actions
from halo_vae.nodes.hints import UnclearModelError, hints_of
from halo_vae.optim.errors import LatentError
from halo_vae.tests.cases.support import max_diff
from halo_vae.tests.fixtures import latent, to_image
from halo_vae.tests.goldens import golden
from halo_vae.tests.nodes.fake_host import FakeHost, Interrupted
from halo_vae.tests.nodes.support import ClipModel, clip_vae, kl_vae, new_session

SMALL = (1, 16, 3, 4, 5)


def expected(name: str, z: Tensor) -> Tensor:
    """What the golden's own decode gives, frames one after another."""
    return to_image(ClipModel(name).decode(z).movedim(1, 2).flatten(0, 1))


@pytest.mark.parametrize("shape", [SMALL, (2, *SMALL[1:]), (1, 16, 1, 4, 5)])
@pytest.mark.parametrize("method", ["auto", "exact"])
def test_known_clips_are_decoded_exactly(shape: tuple[int, ...], method: str) -> None:
    z, vae = latent(shape), clip_vae()
    done = actions.decode_video(new_session(), {"samples": z}, vae, method=method)
    assert max_diff(done.images, expected("wan21", z)) <= 1e-4
    assert vae.first_stage_model.calls == []
    assert (done.record.identity.family, done.record.plan.method) == ("wan21", "exact")
    assert done.record.request.latent_shape == shape


@pytest.mark.parametrize("run", [actions.decode, actions.decode_tiled, actions.decode_video])
def test_every_decode_node_takes_clips(run: Any) -> None:
    z = latent(SMALL)
    done = run(new_session(), {"samples": z}, clip_vae())
    assert done.record.plan.method == "exact"
    assert max_diff(done.images, expected("wan21", z)) <= 1e-4


def test_the_video_node_takes_pictures() -> None:
    done = actions.decode_video(new_session(), {"samples": latent((2, 4, 6, 6))}, kl_vae())
    assert done.images.shape == (2, 24, 24, 3)
    assert done.record.plan.chunk_frames == 0


def test_a_picture_latent_is_a_clip_of_one_frame() -> None:
    z = latent((2, 16, 4, 5))
    done = actions.decode_video(new_session(), {"samples": z}, clip_vae())
    assert max_diff(done.images, expected("wan21", z.unsqueeze(2))) <= 1e-4


def test_chunks_are_recorded_and_shown() -> None:
    z, session = latent((1, 16, 4, 4, 5)), new_session()
    done = actions.decode_video(session, {"samples": z}, clip_vae(), chunk_frames=4)
    record = done.record
    assert (record.plan.n_chunks, record.plan.boundaries) == (4, (1, 5, 9))
    assert [b.frame for b in record.boundaries] == [1, 5, 9]
    assert 0 < record.temporal_consistency <= 1
    text = actions.show_stats(session, record)
    for words in ("4 chunks of at most 4 frames", "temporal consistency", "carried state", "the least of 3 boundaries"):
        assert words in text


def test_frames_in_the_batch_are_one_clip_where_the_family_has_it_so() -> None:
    z, vae = latent((5, 4, 4, 5)), clip_vae("svd")
    done = actions.decode_video(new_session(), {"samples": z}, vae)
    assert done.record.plan.method == "exact"
    assert done.images.shape == (5, 32, 40, 3)
    assert max_diff(done.images, to_image(ClipModel("svd").decode(z))) <= 1e-4
    # neighbouring frames take part in each other
    alone = actions.decode_video(new_session(), {"samples": z[2:3]}, clip_vae("svd")).images
    assert max_diff(done.images[2:3], alone) > 1e-3


CONFIG = {"config": json.loads(golden("ltx_plain").metadata["config"])}


def test_what_a_model_was_built_from_is_a_hint() -> None:
    z = latent((1, 128, 2, 3, 3))
    done = actions.decode_video(new_session(), {"samples": z}, clip_vae("ltx_plain", attributes=CONFIG))
    assert done.record.plan.method == "exact"
    assert max_diff(done.images, expected("ltx_plain", z)) <= 1e-4


def test_a_config_that_is_no_json_is_left_out() -> None:
    model = nn.Module()
    model.config = {"layer": nn.Identity()}  # type: ignore[assignment]
    assert hints_of(model, 4) == {}
    model.config = {"patch_size": 4, "blocks": [("res_x", 1)]}  # type: ignore[assignment]
    assert hints_of(model, 4) == {"config": '{"vae": {"patch_size": 4, "blocks": [["res_x", 1]]}}'}


@pytest.mark.parametrize("factor", [1.0, 0.476986])
def test_a_models_own_scale_of_latents_is_a_hint(factor: float) -> None:
    # loaded, its weights are float32 whatever the file held: only the model knows
    def process_in(z: Tensor) -> Tensor:
        return z * factor

    z = latent((1, 16, 3, 4, 5))
    vae = clip_vae("taehv", attributes={"process_in": process_in})
    vae.process_output = lambda x: x  # as the host has it for this decoder
    done = actions.decode_video(new_session(), {"samples": z}, vae)
    assert done.record.plan.method == "exact"
    wanted = ClipModel("taehv").decode(z * factor / 0.476986)  # this golden is of the kind that scales
    assert max_diff(done.images, wanted.movedim(1, -1)[0]) <= 1e-4


@pytest.mark.parametrize("process_in", [lambda z: z * 2 + 1, lambda z: z.abs(), lambda z: z[:, :1] * 2, lambda: None])
def test_a_scale_that_is_none_is_not_decoded_exactly(process_in: Any) -> None:
    with pytest.raises(UnclearModelError, match="its process_in"):
        hints_of(type("Model", (), {"process_in": staticmethod(process_in)})(), 16)
    vae = clip_vae("taehv", attributes={"process_in": process_in})
    opened = new_session().decoders.of(vae)
    assert opened.decoder is None
    assert "process_in" in opened.reason


def test_a_scale_that_the_family_does_not_have_is_not_ignored() -> None:
    vae = clip_vae(attributes={"process_in": lambda z: z * 2})
    assert "scales its latents" in new_session().decoders.of(vae).reason
    unscaled = clip_vae(attributes={"process_in": lambda z: z})
    assert new_session().decoders.of(unscaled).decoder is not None


# Each row: what the VAE object says, and the reason.
CONTRADICTIONS = [
    ({"ratio": 16}, "its weights make x8 pictures of 3 channels, but the VAE says x16 and 3"),
    ({"out": 4}, "but the VAE says x8 and 4"),
    ({"t_ratio": 8}, "its weights make 9 frames of 3, but the VAE says 17"),
    ({"dim": 2}, "its weights make videos, but ClipModel decodes pictures"),
    ({"channels": 32}, "its weights take 16 channels, but the VAE says 32"),
]


@pytest.mark.parametrize(("options", "reason"), CONTRADICTIONS)
def test_a_vae_that_contradicts_its_weights_is_not_decoded_exactly(options: dict[str, Any], reason: str) -> None:
    opened = new_session().decoders.of(clip_vae(**options))
    assert opened.decoder is None
    assert reason in opened.reason


def test_pictures_do_not_pass_for_videos() -> None:
    opened = new_session().decoders.of(kl_vae(dim=3, t_ratio=4))
    assert opened.decoder is None
    assert "its weights make pictures" in opened.reason


def test_even_lengths_may_differ_from_what_the_vae_says() -> None:
    opened = new_session().decoders.of(clip_vae("cogvideox"))
    assert opened.decoder is not None, opened.reason


@pytest.mark.parametrize(("length", "frames"), [(1, 1), (3, 12)])
def test_a_refiner_makes_more_frames_than_its_vae_says(length: int, frames: int) -> None:
    z, vae = latent((1, 32, length, 2, 3)), clip_vae("hunyuan_refiner")
    done = actions.decode(new_session(), {"samples": z}, vae)
    assert done.record.plan.method == "exact"
    assert done.images.shape[0] == frames
    assert max_diff(done.images, expected("hunyuan_refiner", z)) <= 1e-4


def test_the_familys_own_border_is_no_change() -> None:
    vae = clip_vae("ltx_plain", attributes=CONFIG)
    conv = vae.first_stage_model.decoder.conv_in.conv
    conv.padding_mode = "reflect"
    assert new_session().decoders.of(vae).decoder is not None
    conv.padding_mode = "circular"
    assert "pads its borders by circular" in new_session().decoders.of(vae).reason
    wan = clip_vae()
    wan.first_stage_model.decoder.conv1.padding_mode = "reflect"
    assert "pads its borders by reflect" in new_session().decoders.of(wan).reason


def test_a_border_of_zeros_where_the_family_has_another_is_a_change() -> None:
    vae = clip_vae("ltx_plain", attributes=CONFIG)
    conv = vae.first_stage_model.decoder.conv_in.conv
    conv.padding_mode, conv.padding = "zeros", (0, 0, 0)  # the host puts the border on before
    assert new_session().decoders.of(vae).decoder is not None
    conv.padding = (0, 1, 1)
    assert "decoder.conv_in.conv pads its borders by zeros" in new_session().decoders.of(vae).reason


@pytest.mark.parametrize(("name", "causal"), [("ltx_plain", False), ("ltx_causal", True)])
def test_a_model_that_was_built_for_another_order_in_time_is_not_decoded_exactly(name: str, causal: bool) -> None:
    vae = clip_vae(name, attributes={"config": json.loads(golden(name).metadata["config"])})
    vae.first_stage_model.decoder.causal = causal
    assert new_session().decoders.of(vae).decoder is not None
    vae.first_stage_model.decoder.causal = not causal
    assert "in time" in new_session().decoders.of(vae).reason


def test_sound_beside_a_video_is_left_aside() -> None:
    z = latent(SMALL)
    nested = type("Nested", (), {"is_nested": True, "unbind": lambda self: (z, latent((1, 8, 20, 16)))})()
    done = actions.decode_video(new_session(), {"samples": nested}, clip_vae())
    assert max_diff(done.images, expected("wan21", z)) <= 1e-4


def test_wrong_channels_are_told_before_any_load() -> None:
    host = FakeHost()
    with pytest.raises(LatentError, match="4 channels"):
        actions.decode_video(new_session(host), {"samples": latent((1, 4, 3, 4, 4))}, clip_vae())
    assert host.loads == []


def test_interrupt_stops_a_clip_and_the_next_decode_is_right() -> None:
    host = FakeHost(interrupt_after=5)
    session, vae, z = new_session(host), clip_vae(), latent(SMALL)
    with pytest.raises(Interrupted):
        actions.decode_video(session, {"samples": z}, vae, chunk_frames=4)
    host.interrupt_after = None
    assert max_diff(actions.decode_video(session, {"samples": z}, vae).images, expected("wan21", z)) <= 1e-4


def test_host_is_asked_for_the_planned_peak_of_a_clip() -> None:
    host = FakeHost()
    record = actions.decode_video(new_session(host), {"samples": latent(SMALL)}, clip_vae()).record
    assert host.loads == [record.plan.predicted.total]


def test_noise_follows_its_seed() -> None:
    name = "ltx_timestep"
    attributes = {"config": json.loads(golden(name).metadata["config"])}
    z = latent((1, 128, 2, 3, 3))
    session, vae = new_session(), clip_vae(name, attributes=attributes)

    def decode(**seed: int) -> Tensor:
        return actions.decode_video(session, {"samples": z}, vae, **seed).images

    assert torch.equal(decode(noise_seed=3), decode(noise_seed=3))
    assert not torch.equal(decode(noise_seed=3), decode(noise_seed=4))
    torch.manual_seed(5)
    first = decode()
    torch.manual_seed(6)
    assert not torch.equal(decode(), first)  # -1 draws from torch's own generator
    torch.manual_seed(5)
    assert torch.equal(decode(), first)


def test_monitor_plans_a_clip() -> None:
    session, vae = new_session(), clip_vae()
    text = actions.monitor(session, vae, {"samples": latent((1, 16, 4, 4, 5))})
    for words in ("wan21", "Plan for 1×16×4×4×5", "1 chunk of at most 13 frames", "exact"):
        assert words in text
    assert "Plan for 1×16×21×60×104 (480×832 px)" in actions.monitor(session, vae)
    assert "Plan for 1×4×64×64" in actions.monitor(session, clip_vae("svd"))
