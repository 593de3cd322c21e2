"""Halo VAE: exact, planned and recorded VAE decoding for ComfyUI and for plain torch.

Nothing is imported here: test runners and ComfyUI load this file under names of their own.
"""

__version__ = "0.1.0"
