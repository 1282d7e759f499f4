"""The command line: ``jspec COMMAND`` is ``python -m jspec COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jspec.bench import cli as bench


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors a user can mend are one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="jspec", description="Lossless speculative decoding in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_arguments(commands.add_parser("bench", help="measure"))
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
