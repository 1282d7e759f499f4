"""Runs `python -m convert SRC DST`, another name of the command `jspec convert SRC DST`."""

import sys

from jspec.tools.convert import main

if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")  # conversion needs no accelerator
    sys.exit(main())
