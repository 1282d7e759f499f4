"""Test that a request whose logits become NaN ends with an error, while other requests continue."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Completion, DraftModel, Eagle3, Engine, NGram, SamplingParams, Tree
from jspec.core.config import ACCEPT_RULES
from jspec.sampling.logits_processor import LogitsContext
from tests.support import engines, tiny
from tests.support.arrays import on_device

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:accept=.typical")]

PROMPT, MOST = [3, 1, 4, 1, 5], 14


def poison(logits: jax.Array, context: LogitsContext) -> jax.Array:
    """Make all logits, or only that of token ``args[1]``, NaN once a request has ``args[0]`` tokens; 0: never."""
    first, only = context.args[:, 0, None], context.args[:, 1, None, None]
    is_due = (first > 0) & (context.generated + 1 >= first)
    vocab = on_device(np.arange(logits.shape[-1]))
    return jnp.where(is_due[..., None] & ((only < 0) | (vocab == only)), jnp.nan, logits)


@cache
def engine(accept: str, kind: str) -> Engine:
    sampled = DraftModel(tiny.model(engines.VOCAB, layers=1, seed=2), Tree.chain(3))
    head = tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1))
    drafters: dict[str, Any] = {
        "none": None,
        "model": sampled,
        "branching": DraftModel(sampled.model, Tree.static([(0,), (1,), (0, 0), (1, 0)])),
        "tree": Eagle3(head, Tree.topk(6, 2, 3)),
        "ngram": NGram(Tree.chain(3)),
    }
    return Engine(
        engines.target(),
        drafter=drafters[kind],
        accept=accept,
        slots=3,
        max_len=engines.MAX_LEN,
        buckets=(3,),
        prefill_buckets=(engines.MAX_LEN,),
        logits_processor=poison,
        processor_args=2,
    )


CASES = [
    ("coupled", "tree"),
    ("rejection", "model"),
    pytest.param("coupled", "none", marks=pytest.mark.long),
    pytest.param("coupled", "model", marks=pytest.mark.long),
    pytest.param("block", "model", marks=pytest.mark.long),
    pytest.param("traversal", "branching", marks=pytest.mark.long),
    pytest.param("multi_candidate", "ngram", marks=pytest.mark.long),
    pytest.param("typical", "model", marks=pytest.mark.long),
]


def of_nan_after(one: Engine, count: int, only: int, **params: Any) -> tuple[Completion, Completion]:
    """Return the completions of a request whose logits are NaN from token ``count`` on, and of a request beside it.

    With top_k the second request is sampled, so that a batch has a greedy and a sampled row.
    """
    wanted = SamplingParams(max_tokens=MOST, processor_args=(count, only), **params)
    other = replace(wanted, processor_args=(0, -1), temperature=0.7 if params.get("top_k") else wanted.temperature)
    poisoned, beside = one.generate([PROMPT, PROMPT], [wanted, other])
    return poisoned, beside


@pytest.mark.parametrize(("accept", "kind"), CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engine_with_nan_logits_ends_the_request_with_an_error(accept: str, kind: str, temperature: float) -> None:
    one = engine(accept, kind)
    params: dict[str, Any] = dict(temperature=temperature, seed=1)
    (clean,) = one.generate([PROMPT], SamplingParams(max_tokens=MOST, **params))
    assert len(clean.token_ids) == MOST
    for count, only, more in [(1, -1, {}), (5, -1, {}), (6, 2, {}), (6, 2, dict(top_k=3)), (5, -1, dict(top_p=0.5))]:
        poisoned, beside = of_nan_after(one, count, only, **params, **more)
        assert poisoned.finish_reason == "error" and len(poisoned.token_ids) < count
        if not more and (accept == "coupled" or temperature == 0):
            assert poisoned.token_ids == clean.token_ids[: len(poisoned.token_ids)]
            assert beside.token_ids == clean.token_ids
        assert beside.finish_reason == "length" and min(beside.token_ids) >= 0
        with pytest.raises(FloatingPointError, match="expected logits that are numbers, got NaN"):
            poisoned.raise_for_error()
    one.scheduler.pages.check()
    assert one.pages_in_use == 0
    assert one.generate([PROMPT], SamplingParams(max_tokens=MOST, **params))[0].token_ids == clean.token_ids


def test_nan_tests_cover_every_accept_rule() -> None:
    tested = {getattr(case, "values", case)[0] for case in CASES}
    assert tested == set(ACCEPT_RULES)


def test_engine_with_nan_weights_ends_every_request_with_an_error() -> None:
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, engines.target())
    with Engine(broken, slots=1, max_len=engines.MAX_LEN, prefill_buckets=(engines.MAX_LEN,)) as one:
        (done,) = one.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0))
    assert done.finish_reason == "error" and done.token_ids == []
    assert "look for NaN or infinity in the weights" in str(done.error)
