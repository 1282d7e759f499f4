"""Short texts of arbitrary values, for error messages."""

from __future__ import annotations

import reprlib


def short(value: object, limit: int = 100) -> str:
    """Return a value's repr in one line of at most ``limit`` characters; long or deep values are cut in the middle."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = limit
    brief.maxlevel, brief.maxlist, brief.maxtuple, brief.maxset, brief.maxdict = 3, 12, 12, 8, 6
    try:
        text = " ".join(brief.repr(value).split("\n"))
    except Exception:  # a repr may raise anything, and an int may have too many digits to print
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - limit // 3 - 5]} ... {text[-(limit // 3) :]}"
