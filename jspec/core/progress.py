"""Shows the progress of slow work as a bar on a terminal or in a notebook."""

from __future__ import annotations

import sys

from tqdm import tqdm


def progress_bar(total: int, what: str, unit: str) -> tqdm:
    """Make a progress bar on stderr that disappears when it is complete.

    It is hidden if stderr is neither a terminal nor a notebook, or if the environment variable TQDM_DISABLE is 1.

    Args:
        total: number of units.
        what: the work, in words.
        unit: noun for the units, in the plural.
    """
    is_watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    hidden = {} if is_watched else {"disable": True}
    return tqdm(total=total, desc=f"jspec: {what}", unit=f" {unit}", leave=False, **hidden)
