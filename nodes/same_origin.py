"""Whether a request comes from the host's own page or from a program: pages of other sites may not change anything."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def foreign(headers: Mapping[str, str]) -> str | None:
    """Why a request is refused, in one sentence; None where it may pass. Names of `headers` are in lower case.

    Browsers send `Origin` with every request that changes something, and most send `Sec-Fetch-Site`; a page can forge
    neither. Programs such as curl send neither and pass. Source: Fetch Standard; Fetch Metadata Request Headers.
    """
    site = headers.get("sec-fetch-site")
    if site is not None and site.strip().lower() != "same-origin":
        return "the request comes from another site's page; only ComfyUI's own page may do this"
    origin = headers.get("origin")
    if origin is None:
        return None
    if not _is_same(origin, headers.get("host", "")):
        return "the request's Origin is not the address of this server; open ComfyUI's page at the address it is for"
    return None


def _is_same(origin: str, host: str) -> bool:
    """True if the page's origin ("http://name:8188") is the server's address ("name:8188")."""
    try:
        page, server = urlsplit(origin.strip()), urlsplit(f"//{host.strip()}")
        port = _PORTS.get(page.scheme)
        named = page.hostname is not None and page.hostname == server.hostname
        return named and port is not None and (page.port or port) == (server.port or port)
    except ValueError:  # no address at all
        return False
