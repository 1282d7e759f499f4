"""Shows the progress of slow work as a bar on a terminal or in a notebook."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from tqdm import tqdm

_hiding = 0  # number of open contexts in which no bar is shown


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Hide all progress bars that are made while the context is open, in any thread.

    A bar erases the line that it is drawn on, and with it the beginning of a text that ends in this line.
    """
    global _hiding
    _hiding += 1
    try:
        yield
    finally:
        _hiding -= 1


def progress_bar(total: int, what: str, unit: str) -> tqdm:
    """Make a progress bar on stderr that disappears when it is complete.

    It is hidden if stderr is neither a terminal nor a notebook, within `no_bars`, or if the environment variable
    TQDM_DISABLE is 1.

    Args:
        total: number of units.
        what: the work, in words.
        unit: noun for the units, in the plural.
    """
    is_watched = not _hiding and (sys.stderr.isatty() or "ipykernel" in sys.modules)
    hidden = {} if is_watched else {"disable": True}
    return tqdm(total=total, desc=f"jspec: {what}", unit=f" {unit}", leave=False, **hidden)
