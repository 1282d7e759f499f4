"""Small engines that several test files share, compiled once per process."""

from __future__ import annotations

from functools import cache

from jspec import Eagle3, Engine, Model, Tree
from tests.support import tiny

VOCAB, MAX_LEN, LENGTH = 16, 48, 3


@cache
def target() -> Model:
    return tiny.model(VOCAB, layers=1)


@cache
def eagle3(*, rounds: int, page_size: int) -> Engine:
    """Return an engine with a random EAGLE-3 head and two slots."""
    head = tiny.eagle_head(target(), draft_vocab=12, feature_layers=(0, 1))
    return Engine(
        target(),
        drafter=Eagle3(head, Tree.chain(LENGTH)),
        slots=2,
        max_len=MAX_LEN,
        page_size=page_size,
        buckets=(2,),
        prefill_buckets=(6, 16),
        rounds_per_dispatch=rounds,
    )


@cache
def plain() -> Engine:
    """Return an engine without drafter that prefills each prompt in one chunk."""
    return Engine(target(), slots=8, max_len=MAX_LEN, buckets=(8,), prefill_buckets=(MAX_LEN,))
