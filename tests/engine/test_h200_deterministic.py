"""Test deterministic=True with an 8B model on a GPU: drafting changes none of 256 tokens after 64 prompts."""

from __future__ import annotations

import gc
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Completion, Eagle3, Engine, Model, SamplingParams, Tree
from jspec.draft.eagle_head import EagleHead
from jspec.tools.bench import random_models as shapes
from jspec.tools.testing import Scripted

SHAPE, DTYPE, PROMPTS, TOKENS = "llama3-8b", "bfloat16", 64, 256
PULL = 12.0  # norm of an embedding: the row it points at gets a logit near the largest of 128256 normal numbers
SHARPER = 4.0  # factor of the queries: with 1, attention is uniform and after many layers all texts look alike
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def target() -> Model:
    """Return random weights with peaked distributions: each token's embedding points at one row of the output head."""
    target = shapes.random_target(SHAPE, DTYPE)
    queries = slice(target.config.num_heads * target.config.head_dim)
    layers = [layer.replace(qkv=layer.qkv.at[queries].multiply(SHARPER)) for layer in target.layers]
    head = jnp.roll(target.embed, 1, axis=0)
    return target.replace(embed=target.embed * PULL, head=head, layers=type(target.layers)(layers))


@pytest.fixture(scope="module")
def head() -> EagleHead:
    return shapes.random_head(SHAPE, DTYPE)


def decode(target: Model, drafter: Any, *, deterministic: bool = True, **options: Any) -> list[Completion]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, target.config.vocab_size, int(size)).tolist() for size in rng.integers(4, 400, PROMPTS)]
    options = {"slots": 64, "max_len": 768, "buckets": (64,), "prefill_buckets": (512,), **options}
    engine = Engine(target, drafter=drafter, deterministic=deterministic, controls=False, **options)
    done = engine.generate(prompts, GREEDY)
    engine.close()
    del engine
    gc.collect()  # the engine's pools take most of the device's memory
    return done


def differing(ours: list[Completion], others: list[Completion]) -> int:
    return sum(one.token_ids != other.token_ids for one, other in zip(ours, others, strict=True))


@pytest.fixture(scope="module")
def plain(target: Model) -> list[Completion]:
    return decode(target, None, slots=16, buckets=(1, 4, 16))


@pytest.mark.h200
def test_h200_plain_decoding_of_different_prompts_emits_varied_texts(plain: list[Completion]) -> None:
    assert all(len(set(done.token_ids)) > TOKENS // 8 for done in plain)
    assert len({tuple(done.token_ids) for done in plain}) == PROMPTS


@pytest.mark.h200
@pytest.mark.parametrize("tree", ["chain:4", "chain:1", "topk:60,8,10"])
def test_h200_deterministic_engine_with_eagle3_emits_tokens_of_plain_decoding(
    tree: str, target: Model, head: EagleHead, plain: Any
) -> None:
    batch = 16 if tree.startswith("topk") else 64
    drafted = decode(target, Eagle3(head, Tree.parse(tree)), slots=batch, buckets=(batch,), prefill_buckets=(128,))
    assert differing(drafted, plain) == 0


@pytest.mark.h200
@pytest.mark.parametrize("shift", [0, 1])
def test_h200_deterministic_engine_with_right_or_wrong_drafts_emits_plain_tokens(
    shift: int, target: Model, plain: Any
) -> None:
    drafter = Scripted(plain, [GREEDY] * PROMPTS, Tree.chain(5), shift=shift)
    drafted = decode(target, drafter, page_size=32, rounds_per_dispatch=2)
    assert differing(drafted, plain) == 0
    accepted = np.mean([done.metrics.mean_acceptance_length for done in drafted])
    assert accepted > 5 if shift == 0 else accepted < 1.1


@pytest.mark.h200
def test_h200_ordinary_engine_with_eagle3_emits_some_other_texts(target: Model, head: EagleHead) -> None:
    ordinary = decode(target, None, slots=16, buckets=(1, 4, 16), deterministic=False)
    drafted = decode(target, Eagle3(head, Tree.chain(4)), deterministic=False)
    print(f"without the flag {differing(drafted, ordinary)} of {PROMPTS} texts differ")
    assert differing(drafted, ordinary) > 0
