"""Halo VAE: exact, planned and recorded VAE decoding for ComfyUI and for plain torch.

Nothing is imported here: test runners and ComfyUI load this file under names of their own.
"""

__version__ = "0.1.0"
WEB_DIRECTORY = "./web"
"""Where ComfyUI finds the nodes' help pages."""


async def comfy_entrypoint():  # type: ignore[no-untyped-def] # its result is a class of ComfyUI's
    """The nodes, for ComfyUI 0.3.64 and newer. What goes wrong is logged in full and passed on."""
    import logging

    log = logging.getLogger("halo_vae")
    try:
        from .nodes.extension import extension
    except (ImportError, AttributeError):
        log.exception("Halo VAE %s has no nodes here: it needs ComfyUI 0.3.64 or newer, so update ComfyUI", __version__)
        raise
    try:
        return extension(__version__)
    except Exception:
        log.exception("Halo VAE %s could not make its nodes; please report this with the lines below", __version__)
        raise
