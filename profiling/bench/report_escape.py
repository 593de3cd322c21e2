"""Text from files as text: no markup, no control characters, no change of direction."""

from __future__ import annotations

import html


def one_line(value: str) -> str:
    """The printable characters, with single spaces between words."""
    return " ".join("".join(c if c.isprintable() else " " for c in value).split())


def html_text(value: str) -> str:
    """As HTML, in an element or a quoted attribute, that reads as `value`."""
    return html.escape(one_line(value), quote=True)
