"""Halo VAE: exact, planned and recorded VAE decoding for ComfyUI and for plain torch."""
