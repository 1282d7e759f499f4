"""Test that `check_lossless` accepts lossless drafters, such as the README's example, and raises for others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jspec import Drafter, Engine, Model, SamplingParams, Tree
from jspec.core.records import Draft
from jspec.tools.testing import Random, Scripted, check_lossless, differences
from jspec.verify import coupled
from tests.support import engines
from tests.tools.test_readmes import REPOSITORY, blocks

pytestmark = pytest.mark.once

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3]]
OPTIONS: dict[str, Any] = dict(slots=4, max_len=engines.MAX_LEN, buckets=(4,), prefill_buckets=(8,), controls=False)
TOKENS, LENGTH = 20, 2


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engines.plain()


def check(plain: Engine, drafter: Drafter, **options: Any) -> dict[float, list]:
    """Call `check_lossless` with one plain engine for all tests."""

    def make_engine(target: Model, **given: Any) -> AbstractContextManager[Engine]:
        return Engine(target, **given) if "drafter" in given else nullcontext(plain)

    merged = OPTIONS | options
    return check_lossless(drafter, engines.target(), PROMPTS, max_tokens=TOKENS, make_engine=make_engine, **merged)


def repeat(tree: Tree) -> Drafter:
    """Return the example drafter of `jspec/draft/README.md`."""
    names: dict[str, Any] = {}
    exec(blocks((REPOSITORY / "jspec/draft/README.md").read_text(), "python")[0], names)
    return names["Repeat"](tree)


def scripted(plain: Engine) -> Scripted:
    """Return a drafter that drafts the right token at every position of the compared runs."""
    params = [SamplingParams(max_tokens=TOKENS, temperature=t, seed=1000 + i) for t in (0.0, 1.0) for i in range(4)]
    return Scripted(plain.generate(PROMPTS * 2, params), params, Tree.chain(LENGTH))


@pytest.mark.parametrize("name", ["right", "README"])
def test_lossless_check_of_a_lossless_drafter_raises_nothing(plain: Engine, name: str) -> None:
    tree = Tree.chain(LENGTH)
    drafter = scripted(plain) if name == "right" else repeat(tree)
    assert check(plain, drafter) == {0.0: [], 1.0: []}


def test_lossless_check_under_rejection_compares_only_greedy_rows(plain: Engine) -> None:
    """Under "rejection" sampled rows keep the target's distribution but not the tokens of plain decoding."""
    assert check(plain, Random(Tree.chain(LENGTH)), accept="rejection", temperatures=(0.0,)) == {0.0: []}


def test_lossless_check_of_a_rule_that_accepts_every_node_raises(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the rule accepts every valid node."""
    original = coupled.longest_accepted_path

    def accept_all(matches: Array, draft: Draft, ancestor_mask: Array) -> Any:
        return original(jnp.ones_like(matches), draft, ancestor_mask)

    monkeypatch.setattr(coupled, "longest_accepted_path", accept_all)
    with pytest.raises(AssertionError, match=r"not lossless at temperature 0\.0: Difference\(prompt="):
        check(plain, Random(Tree.chain(LENGTH)), temperatures=(0.0,))


def test_lossless_difference_of_a_changed_token_has_its_position_and_logit_gap(plain: Engine) -> None:
    """The gap between the two tokens' logits is larger than at a near tie."""
    (one,) = plain.generate(PROMPTS[0], SamplingParams(max_tokens=5, temperature=0))
    changed = list(one.token_ids)
    changed[3] = (changed[3] + 1) % engines.VOCAB
    (found,) = differences(engines.target(), [one], [replace(one, token_ids=changed)], None)
    assert (found.prompt, found.position, found.plain, found.speculative) == (0, 3, one.token_ids[3], changed[3])
    assert found.gap > 1e-5 and np.isfinite(found.gap)
