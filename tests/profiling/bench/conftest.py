"""The command line as a function, as the tests of the other commands have it."""

from __future__ import annotations

from halo_vae.tests.profiling.cli.conftest import halo

__all__ = ["halo"]
