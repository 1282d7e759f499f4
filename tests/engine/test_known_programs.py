"""Test that engines of `tests.support.engines` share programs only if all that these depend on is equal."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec import DraftModel, Eagle3, Engine, NGram, SamplingParams, Tree
from jspec.core import prompt_blocks
from jspec.step.executables import Executables
from pallas_kernels.layers.shard import AXIS
from tests.support import engines, lettered, tiny

pytestmark = pytest.mark.once

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
PROMPTS = [[3, 1, 4], [1, 5]]
CHAIN = Tree.chain(2)


def engine(seed: int = 0, **options: Any) -> Engine:
    model = tiny.model(engines.VOCAB, layers=1, seed=seed)
    return engines.make(model, **{**engines.PLAIN_OPTIONS, "drafter": NGram(CHAIN), **options})


def draft_model(seed: int, layers: int = 1) -> DraftModel:
    return DraftModel(tiny.model(engines.VOCAB, layers=layers, seed=seed), CHAIN)


def eagle3(draft_vocab: int) -> Eagle3:
    return Eagle3(tiny.eagle_head(engines.target(), draft_vocab=draft_vocab, feature_layers=(0, 1)), CHAIN)


def tokens(one: Engine) -> list[list[int]]:
    return [done.token_ids for done in one.generate(PROMPTS, GREEDY)]


def test_engine_of_other_weights_runs_known_programs_on_its_own_weights(compilations: list[str]) -> None:
    """Nothing is compiled for the second engine, and `compilations` sees that it takes programs."""
    one = engine()
    expected = tokens(one)
    other = engine(seed=1, overlap=False)
    compilations.clear()
    found = tokens(other)
    assert not any("backend_compile" in event for event in compilations)
    assert compilations.count("/jspec/compile/known") == len(other.compile_seconds) >= 3
    plain = Engine(tiny.model(engines.VOCAB, layers=1, seed=1), **engines.PLAIN_OPTIONS)
    assert found == tokens(plain) != expected
    assert one.core.runner.programs.compiled is not other.core.runner.programs.compiled


def settings(**options: Any) -> Any:
    return engines.settings_of(engine(**options).core.runner.programs)


@pytest.mark.parametrize("options", [{}, dict(overlap=False), dict(eos_ids=(2,)), dict(prefill_budget=8)], ids=str)
def test_options_of_the_host_leave_the_programs_equal(options: dict[str, Any]) -> None:
    assert settings(**options) == settings()


def test_prefix_cache_makes_other_programs_for_drafters_that_read_the_text_alone() -> None:
    assert settings(prefix_cache=False) != settings()
    assert settings(drafter=None, prefix_cache=False) == settings(drafter=None)


@pytest.mark.parametrize(
    "options",
    [
        dict(drafter=None),
        dict(drafter=NGram(CHAIN, max_n=2)),
        dict(drafter=NGram(Tree.chain(3))),
        dict(drafter=draft_model(1)),
        dict(slots=4, buckets=(4,)),
        dict(max_len=32),
        dict(page_size=4),
        dict(pages=20),
        dict(rounds_per_dispatch=2),
        dict(accept="rejection"),
        dict(controls=False),
        dict(deterministic=True),
        dict(kv_dtype="bfloat16"),
        dict(logprobs_mode="processed_logprobs"),
        dict(tokenizer=lettered.tokenizer()),
        dict(quantize="int8"),
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_of_programs_make_others(options: dict[str, Any]) -> None:
    assert settings(**options) != settings()


def test_drafters_devices_and_patched_sizes_make_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a drafter are compared too, although they are arguments of its programs."""
    assert settings(drafter=eagle3(12)) == settings(drafter=eagle3(12)) != settings(drafter=eagle3(11))
    assert settings(drafter=draft_model(1)) == settings(drafter=draft_model(1))
    for other in (draft_model(2), draft_model(1, layers=2)):
        assert settings(drafter=draft_model(1)) != settings(drafter=other)
    first, second = (Mesh(np.array([device]), (AXIS,)) for device in jax.devices()[:2])
    assert settings(mesh=first) == settings(mesh=first) != settings(mesh=second)
    usual = settings()
    monkeypatch.setattr(prompt_blocks, "BLOCK", prompt_blocks.BLOCK // 2)
    assert settings() != usual


def test_executables_read_no_option_that_their_settings_lack() -> None:
    """`slots` is a size of the state, and `prefix_cache` only says which helpers an engine needs."""
    read = set(re.findall(r"\b_?config\.(\w+)", inspect.getsource(Executables))) - {"vocab_size"}
    assert read == {"rounds_per_dispatch", "logprobs_mode", "slots", "prefix_cache"}
