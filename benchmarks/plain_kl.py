"""The plain KL decoder of the package's benchmarks, under the name that the scripts here and the tests use."""

from halo_vae.profiling.bench.plain.kl import (
    NORM_EPS,
    NORM_GROUPS,
    MidAttention,
    Norm,
    PlainKLDecoder,
    ResBlock,
    Upsample,
    random_sd_weights,
    sd_shapes,
    three_pass_decode,
    tiled_decode,
)

__all__ = [
    "NORM_EPS",
    "NORM_GROUPS",
    "MidAttention",
    "Norm",
    "PlainKLDecoder",
    "ResBlock",
    "Upsample",
    "random_sd_weights",
    "sd_shapes",
    "three_pass_decode",
    "tiled_decode",
]
