"""Small engines that several test files share, compiled once per process."""

from __future__ import annotations

from functools import cache
from typing import Any

from jax.sharding import Mesh

from jspec import Eagle3, Engine, Model, Tree
from tests.support import tiny

VOCAB, MAX_LEN, LENGTH = 16, 48, 3
SLOTS = 4  # of `byte_engine`
BYTE_OPTIONS: dict[str, Any] = dict(
    slots=SLOTS, buckets=(SLOTS,), prefill_buckets=(32,), max_len=64, page_size=4, tokenizer="bytes", controls=False
)


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


def byte_engine(mesh: Mesh | None = None, **options: Any) -> Engine:
    """Make an engine of four slots that reads and writes bytes, with a random EAGLE-3 head."""
    model = tiny.model(256, layers=1)
    head = tiny.eagle_head(model, draft_vocab=200, feature_layers=(0, 1))
    return Engine(model, drafter=Eagle3(head, Tree.chain(LENGTH)), mesh=mesh, **(BYTE_OPTIONS | options))
