"""Test new weights in a running engine: tokens of a fresh engine, requests under way, prefixes, and refused updates."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jspec import DraftModel, Eagle3, Engine, Model, MTP, NGram, Suffix, Tree
from jspec.core.config import EngineConfig
from jspec.draft.base import Drafter
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.schedule.scheduler import Scheduler
from tests.support import tiny
from tests.support.engines import make

VOCAB = 16
OPTIONS: dict[str, Any] = dict(slots=4, max_len=64, page_size=4, buckets=(4,), prefill_buckets=(16,))
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1, 2], [5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]]
SAMPLED: dict[str, Any] = dict(temperature=1.0, seed=5, max_tokens=12)


def old_target() -> Model:
    return tiny.model(VOCAB, layers=1)


def new_target() -> Model:
    return tiny.model(VOCAB, layers=1, seed=7)


def eagle3(seed: int = 1) -> Drafter:
    return Eagle3(tiny.eagle_head(old_target(), draft_vocab=12, feature_layers=(0, 1), seed=seed), Tree.chain(3))


def tokens(engine: Engine, **params: Any) -> list[list[int]]:
    """Return the tokens of all prompts, greedy ones and drawn ones."""
    fields = {"max_tokens": 12, "temperature": 0.0, **params}
    greedy = engine.generate(PROMPTS, **fields)
    return [c.token_ids for c in [*greedy, *engine.generate(PROMPTS, **(SAMPLED | params))]]


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "eagle3": eagle3,
    "mtp": lambda: MTP(tiny.mtp_head(old_target()), Tree.chain(2)),
    "suffix": lambda: Suffix(Tree.chain(3), scope="engine"),
    "draft model": lambda: DraftModel(tiny.model(VOCAB, layers=1, seed=3), Tree.chain(2)),
}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "int8": {"quantize": "int8"}, "2 devices": {"tensor_parallel": 2}}


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [*itertools.product(("plain",), DRAFTERS), ("int8", "eagle3"), ("2 devices", "none"), ("2 devices", "eagle3")],
)
def test_updated_engine_has_the_tokens_of_a_fresh_engine_and_compiles_nothing(
    kind: str, drafter: str, compilations: Any
) -> None:
    options, make_drafter = OPTIONS | KINDS[kind], DRAFTERS[drafter]
    with (
        make(old_target(), make_drafter(), **options) as engine,
        make(new_target(), make_drafter(), **options) as fresh,
    ):
        before, wanted = tokens(engine), tokens(fresh)
        programs = dict(engine.core.runner.programs.compiled)
        update = engine.update_weights(new_target(), drafter="keep")
        assert tokens(engine) == wanted
        assert engine.core.runner.programs.compiled == programs, "no program was compiled"
        assert update.version == engine.weight_version == 1
        assert before != wanted, "control"
        engine.scheduler.pages.check()
