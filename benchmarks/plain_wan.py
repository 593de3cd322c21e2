"""The plain Wan 2.1 decoder of the package's benchmarks, under the name that the scripts here and the tests use."""

from halo_vae.profiling.bench.plain.wan import PlainWanDecoder, random_wan_weights, wan_shapes

__all__ = ["PlainWanDecoder", "random_wan_weights", "wan_shapes"]
