"""A small trained pair: a Llama of 8 layers whose 256 tokens are bytes, and an EAGLE-3 head for it.

Both were trained on Python sources. The recordings in `tests/data/golden` are theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jspec import Eagle3, Engine, Tree

FOLDER = Path(__file__).resolve().parent.parent / "data" / "byte_pair"
TARGET, HEAD = FOLDER / "target", FOLDER / "head"
PROMPT = "class Config:\n    def _interpolate_some(self, parser, option, accum, "
OPTIONS: dict[str, Any] = dict(slots=1, max_len=512, prefill_buckets=(128,), tokenizer="bytes", dtype="float32")
OPTIONS |= dict(controls=False)  # smaller programs, which compile sooner


def engine(*, drafted: bool) -> Engine:
    """Return an engine of the target, with the head and chains of 3 if ``drafted``, else without drafter."""
    drafter = Eagle3.from_pretrained(HEAD, tree=Tree.chain(3), dtype="float32") if drafted else None
    return Engine.from_pretrained(TARGET, drafter=drafter, **OPTIONS)
