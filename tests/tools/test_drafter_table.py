"""Test the README's table of drafters by trying what each cell says, and each drafter with what all of them can do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import jspec
from jspec import Completion, Drafter, Engine, Model, NGram, SamplingParams, Tree
from jspec.train.methods import METHODS
from tests.support import tiny

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CHAIN, STATIC, DYNAMIC = Tree.chain(3), Tree.static([(0,), (1,), (0, 0)]), Tree.topk(6, 2, 2)
STATES = (0, 1, 2)
MAKERS: dict[str, Callable[[Model, Tree], Drafter]] = {
    "Eagle3": lambda t, tree: jspec.Eagle3(tiny.eagle_head(t, draft_vocab=200, feature_layers=STATES), tree),
    "Eagle": lambda t, tree: jspec.Eagle(tiny.eagle1_head(t), tree),
    "PEagle": lambda t, tree: jspec.PEagle(tiny.peagle_head(t, draft_vocab=200, feature_layers=STATES), tree),
    "MTP": lambda t, tree: jspec.MTP(tiny.mtp_head(t), tree),
    "DFlash": lambda t, tree: jspec.DFlash(tiny.dflash_head(t, block_size=6, feature_layers=STATES), tree),
    "DFlash2": lambda t, tree: jspec.DFlash2(tiny.dflash2_head(t, block_size=6, feature_layers=STATES), tree),
    "DSpark": lambda t, tree: jspec.DSpark(tiny.dspark_head(t, block_size=5, feature_layers=STATES), tree),
    "Gemma4Assistant": lambda t, tree: jspec.Gemma4Assistant(tiny.assistant_head(t), tree),
    "UNO": lambda t, tree: jspec.UNO(tiny.uno_adapter(t), tree),
    "Medusa": lambda t, tree: jspec.Medusa(tiny.medusa_heads(t, heads=5), tree),
    "DraftModel": lambda t, tree: jspec.DraftModel(t, tree),  # is right, but for what a request's controls change
    "NGram": lambda t, tree: jspec.NGram(tree),
    "Suffix": lambda t, tree: jspec.Suffix(tree, scope="engine", corpus_tokens=1024),
}
TEXT = list(b"one two three one two three one two ")  # two pages and a half
EVERYTHING = [
    SamplingParams(max_tokens=20, temperature=0.5, seed=3, top_k=30, top_p=0.95, frequency_penalty=0.3, logprobs=2),
    SamplingParams(max_tokens=20, temperature=0, regex="[a-z ]*", repetition_penalty=1.5, logprobs=1),
    SamplingParams(
        max_tokens=20, temperature=0.7, seed=5, grammar='start: "ab" start | "c" start | "d"', bad_words=["cc"]
    ),
    *(
        SamplingParams(max_tokens=40, temperature=0, frequency_penalty=each / 20, logprobs=1)
        for each in range(1, 20, 3)
    ),
]


@cache
def target() -> Model:
    return tiny.model(256, layers=3, sharpness=4)


def table() -> dict[str, dict[str, str]]:
    """Return the cells of the README's table by drafter and column."""
    (block,) = re.findall(r"^\| drafter .*\n(?:\|.*\n)+", (REPOSITORY / "README.md").read_text(), re.M)
    names, _, *rows = ([cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in block.splitlines())
    return {row[0]: dict(zip(names[2:], row[2:], strict=True)) for row in rows}


def tried(name: str) -> dict[str, str]:
    """Return what the drafter does in each column."""
    chain = MAKERS[name](target(), CHAIN)
    return {
        "chain": "yes",
        "static tree": works(lambda: MAKERS[name](target(), STATIC)),
        "dynamic tree": works(lambda: MAKERS[name](target(), DYNAMIC)),
        "window": works(lambda: chain.with_window(40)),
        "beside a look-up": works(lambda: jspec.Beside(chain, NGram(CHAIN))),
        "trained here": "yes" if getattr(chain, "method", None) in METHODS else "no",
    }


def works(make: Callable[[], object]) -> str:
    try:
        make()
    except (ValueError, TypeError, NotImplementedError):
        return "no"
    return "yes"


def test_table_of_drafters_has_every_exported_one_and_joins_all_of_them() -> None:
    exported = {name for name in jspec.__all__ if isinstance(getattr(jspec, name), type)}
    drafters = {name for name in exported if issubclass(getattr(jspec, name), Drafter)}
    assert set(table()) == set(MAKERS) == drafters - {"Drafter", "Beside"}


@pytest.mark.parametrize("name", MAKERS)
def test_cells_of_each_drafter_say_what_it_does_when_tried(name: str) -> None:
    assert table()[name] == tried(name)


def answers(drafter: Drafter | None, **options: Any) -> list[Completion]:
    """Return the answers to requests with many controls, twice, so that the second time prompts are prefix hits."""
    sizes: dict[str, Any] = dict(slots=4, max_len=96, page_size=16, buckets=(4,), prefill_buckets=(64,))
    with Engine(target(), drafter=drafter, tokenizer="bytes", eos_ids=(0,), **sizes, **options) as engine:
        first = engine.generate([TEXT] * len(EVERYTHING), EVERYTHING)
        second = engine.generate([TEXT] * len(EVERYTHING), EVERYTHING)
        assert engine.metrics.prefix_hit_rate > 0.3
    return [*first, *second]


@cache
def plain() -> list[Completion]:
    return answers(None)


ADAPTIVE: dict[str, Any] = dict(adaptive=True, draft_depths=(0, 3))
CASES = [pytest.param(name, ADAPTIVE, marks=pytest.mark.long, id=name) for name in MAKERS]


@pytest.mark.parametrize(("name", "options"), [pytest.param("DraftModel", {}, id="one depth"), *CASES])
def test_drafter_with_controls_grammars_prefix_hits_and_two_devices_gives_the_tokens_of_plain_decoding(
    name: str, options: dict[str, Any]
) -> None:
    drafted = answers(MAKERS[name](target(), CHAIN), tensor_parallel=2, **options)
    for got, expected in zip(drafted, plain(), strict=True):
        assert (got.token_ids, got.finish_reason) == (expected.token_ids, expected.finish_reason)
        logprobs = [[entry.logprob for entry in each.logprobs or ()] for each in (got, expected)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    counts = [(done.metrics.num_draft_tokens, done.metrics.num_accepted_tokens) for done in drafted]
    assert all(drafts for drafts, _ in counts)
    assert name != "DraftModel" or any(accepted for _, accepted in counts), "drafts that are right"
