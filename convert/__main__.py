"""The command `python -m convert SRC DST`, the same as `jspec convert SRC DST`."""

import sys

from jspec.tools.convert import main

if __name__ == "__main__":
    import jax

    jax.config.update("jax_platforms", "cpu")  # weights pass through the host only
    sys.exit(main())
