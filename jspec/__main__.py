"""The command line: ``jspec COMMAND`` is ``python -m jspec COMMAND``.

This file imports nothing slow, so that Ctrl-C is handled while all other modules are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from jspec.tools import interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of the command line.

    Args:
        argv: command-line arguments without the program's name; None: the arguments of the process, which Ctrl-C then
            ends with one line and exit status 130.

    Returns:
        The exit status: 0 on success; 1 if `demo` finds a difference, `info` cannot load a folder, or nobody reads the
        output any more; 2 if arguments or files are wrong, after an error message of one line. `bench` may return
        further values.
    """
    if argv is not None:
        return _load(argv)()
    return interrupt.guard(lambda: _load(sys.argv[1:]))


def _load(words: Sequence[str]) -> Callable[[], int]:
    """Import the command line; return a function that runs the command in ``words``."""
    from jspec.tools import command_line

    return lambda: command_line.run(words)


if __name__ == "__main__":
    sys.exit(main())
