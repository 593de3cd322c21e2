"""Kernels the executor calls: stage, convolve, attend, take moments."""
