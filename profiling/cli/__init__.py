"""The command line, one file per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from .app import main

__all__ = ["main"]
