"""Test an engine whose weights are divided over two GPUs: its tokens are one GPU's, and both GPUs stay equal."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jspec import Eagle3, Engine, SamplingParams
from tests.support import byte_pair
from tests.support.devices import check_devices_equal

PROMPTS = [f"def function_{index}(argument):\n    " for index in range(16)]
PARAMS = [SamplingParams(max_tokens=64, temperature=index % 2, seed=index) for index in range(16)]
ROUNDS = 10_000

pytestmark = pytest.mark.gpu


def engine_on(devices: int, dtype: str) -> Engine:
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    options: dict[str, Any] = dict(slots=16, max_len=1024, buckets=(16,), tokenizer="bytes", dtype=dtype)
    head = Eagle3.from_pretrained(byte_pair.HEAD, tree="chain:4", dtype=dtype)
    return Engine.from_pretrained(byte_pair.TARGET, drafter=head, tensor_parallel=devices, **options)


def test_two_gpus_emit_the_tokens_of_one() -> None:
    """In float32, in which sums of another order change no token of these requests."""
    one, two = ([done.token_ids for done in engine_on(n, "float32").generate(PROMPTS, PARAMS)] for n in (1, 2))
    assert two == one
    assert len(set(map(tuple, one))) > len(one) // 2, "control: tokens depend on the prompt and the seed"


def test_two_gpus_hold_equal_bits_after_ten_thousand_rounds() -> None:
    """In bfloat16, whose products differ most between orders of sums."""
    engine = engine_on(2, "bfloat16")
    params = [SamplingParams(max_tokens=900, temperature=index % 2, seed=index, ignore_eos=True) for index in range(16)]
    while (rounds := sum(engine.metrics.num_rounds_per_depth.values())) < ROUNDS * len(PROMPTS):
        engine.generate(PROMPTS, params)
        assert sum(engine.metrics.num_rounds_per_depth.values()) > rounds
    assert check_devices_equal(engine.core.runner.state) > 10
