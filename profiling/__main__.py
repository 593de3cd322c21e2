"""`python -m halo_vae.profiling` is the command line."""

import sys

from .cli import main

sys.exit(main())
