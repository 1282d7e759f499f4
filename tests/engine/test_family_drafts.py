"""Targets of every model family emit the greedy tokens of transformers with every drafter and kind of tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jspec import (
    DFlash,
    Drafter,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    Medusa,
    NGram,
    PEagle,
    SamplingParams,
    Suffix,
    Tree,
)
from jspec.models.decoder import Model
from tests.support import engines, tiny
from tests.support.recordings import recording

pytestmark = pytest.mark.once

FOLDERS = Path(__file__).parents[1] / "data" / "golden" / "families"
# Draft models are refused for these.
HYBRID = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h")
FAMILIES = sorted({path.parent.name for path in FOLDERS.glob("*/config.json")} - set(HYBRID))
CHAIN, DYNAMIC = Tree.chain(4), Tree.topk(12, 3, 4)
STATIC = Tree.static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)])


def eagle(target: Model, tree: Tree) -> Drafter:
    layers, vocab = (1, 2, max(target.config.num_layers, 3)), min(100, target.config.vocab_size)
    return Eagle3(tiny.eagle_head(target, draft_vocab=vocab, feature_layers=layers), tree)


def two_layers(target: Model, tree: Tree) -> Drafter:
    """Return a draft model of the same family: the target's first two layers, whose tokens are often rejected."""
    config = replace(target.config, layers=target.config.layers[:2])
    return DraftModel(replace(target, layers=target.layers[:2], config=config), tree)


def itself(target: Model, tree: Tree) -> Drafter:
    """Return the target as its own draft model, whose tokens are all accepted."""
    return DraftModel(target, tree)


def ngram(target: Model, tree: Tree) -> Drafter:
    return NGram(STATIC if tree is DYNAMIC else tree)


def suffix(target: Model, tree: Tree) -> Drafter:
    return Suffix(tree)


def eagle1(target: Model, tree: Tree) -> Drafter:
    return Eagle(tiny.eagle1_head(target), tree)


def dflash(target: Model, tree: Tree) -> Drafter:
    return DFlash(tiny.dflash_head(target, block_size=5, feature_layers=(1, 2, 3)), tree)


def dspark(target: Model, tree: Tree) -> Drafter:
    return DSpark(tiny.dspark_head(target, block_size=5, feature_layers=(1, 2, 3)), tree)


def medusa(target: Model, tree: Tree) -> Drafter:
    return Medusa(tiny.medusa_heads(target, 4), tree)


def peagle(target: Model, tree: Tree) -> Drafter:
    return PEagle(tiny.peagle_head(target, draft_vocab=100, feature_layers=(1, 2, 3)), tree)


DRAFTERS: list[Callable[[Model, Tree], Drafter]] = [itself, eagle, two_layers, ngram]
EVERY = list(itertools.product(FAMILIES, DRAFTERS, (DYNAMIC, CHAIN)))
PAIRS = list(itertools.product((DYNAMIC, CHAIN), DRAFTERS))
ROTATION = [(family, *PAIRS[index % len(PAIRS)][::-1]) for index, family in enumerate(FAMILIES)]
HYBRIDS = [
    ("lfm2", eagle, DYNAMIC),
    ("qwen3_5_text", dflash, DYNAMIC),
    ("qwen3_5_moe_text", ngram, DYNAMIC),
    ("qwen3_next", dspark, CHAIN),
    ("nemotron_h", dflash, DYNAMIC),
    *(
        pytest.param(case, marks=pytest.mark.long)
        for case in [
            ("lfm2", medusa, STATIC),
            ("lfm2_moe", suffix, CHAIN),
            ("qwen3_5_text", eagle1, DYNAMIC),
            ("qwen3_next", peagle, CHAIN),
            ("nemotron_h", eagle, CHAIN),
            ("nemotron_h", ngram, DYNAMIC),
            ("nemotron_h", dspark, CHAIN),
            ("nemotron_h", medusa, STATIC),
        ]
    ),
]
# Latent caches, windows, shared rows of the cache, experts beside a dense path.
DEFAULT = ("deepseek_v2", "gemma2", "gemma4_text", "gemma4_26b_a4b")


def greedy(target: Model, drafter: Drafter | None, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Return 64 greedy tokens after each prompt, and the mean acceptance length."""
    options = dict(slots=3, max_len=176, page_size=16, buckets=(3,), prefill_buckets=(80,))
    with engines.make(target, drafter=drafter, prefix_cache=False, controls=False, **options) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0))
        return [one.raise_for_error().token_ids for one in done], engine.metrics.mean_acceptance_length


def recorded(golden: Path, family: str) -> tuple[Model, list[list[int]], list[list[int]]]:
    """Return a target, three prompts, and the greedy tokens after each that transformers computes."""
    folder = golden / "families" / family
    arrays = recording(folder / "expect.npz")
    prompts, tokens = ([arrays[f"{name}{i}"].tolist() for i in range(3)] for name in ("prompt", "greedy"))
    return tiny.load_target(folder), prompts, tokens


def check(golden: Path, family: str, make: Callable[[Model, Tree], Drafter], tree: Tree) -> None:
    target, prompts, expected = recorded(golden, family)
    tokens, length = greedy(target, make(target, tree), prompts)
    assert tokens == expected
    if make is itself:
        assert length > tree.depth - 0.5  # most nodes of the tree's deepest path are accepted, so their masks matter


def named(case: tuple[str, Callable[[Model, Tree], Drafter], Tree]) -> str:
    return f"{case[0]}, {case[1].__name__}, {case[2]}"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case[0] in DEFAULT else pytest.mark.long, id=named(case)) for case in ROTATION],
)
def test_engine_of_each_family_with_a_drafter_emits_the_greedy_tokens_of_transformers(
    golden: Path, case: tuple[str, Callable[[Model, Tree], Drafter], Tree]
) -> None:
    check(golden, *case)


@pytest.mark.parametrize("case", HYBRIDS, ids=named)
def test_engine_of_a_hybrid_family_with_each_kind_of_drafter_emits_the_greedy_tokens_of_transformers(
    golden: Path, case: tuple[str, Callable[[Model, Tree], Drafter], Tree]
) -> None:
    check(golden, *case)


@pytest.mark.parametrize(
    ("family", "mixer"),
    [("lfm2", "short convolution"), ("qwen3_next", "gated delta net"), ("nemotron_h", "Mamba 2 mixer")],
)
def test_draft_model_with_layers_without_attention_is_refused_with_the_way_out(
    family: str, mixer: str, golden: Path
) -> None:
    folder, expected = golden / "families" / family, f"expected .* all have attention, got one with a {mixer}; take"
    for make in (lambda: DraftModel(tiny.load_target(folder)), lambda: DraftModel.from_pretrained(folder)):
        with pytest.raises(NotImplementedError, match=f"DraftModel: {expected} another draft model, .*MTP.*NGram"):
            make()


@pytest.mark.matrix
@pytest.mark.parametrize("case", [case for case in EVERY if case not in ROTATION], ids=named)
def test_engine_of_each_family_with_every_drafter_emits_the_greedy_tokens_of_transformers(
    golden: Path, case: tuple[str, Callable[[Model, Tree], Drafter], Tree]
) -> None:
    check(golden, *case)


def test_engine_with_a_window_one_token_too_small_emits_other_tokens(golden: Path) -> None:
    """The negative control: the comparison notices a wrong window of the target under a tree."""
    target, prompts, expected = recorded(golden, "mistral")
    layers = [
        replace(layer, mixer=replace(layer.attention, window=layer.attention.window - 1))
        for layer in target.config.layers
    ]
    wrong = replace(target, config=replace(target.config, layers=tuple(layers)))
    tokens, _ = greedy(wrong, ngram(wrong, DYNAMIC), prompts)
    assert tokens != expected


def test_engine_with_a_tree_deeper_than_the_smallest_window_raises_naming_both(golden: Path) -> None:
    plain, *_ = recorded(golden, "llama")
    target, *_ = recorded(golden, "gemma3_text")
    with pytest.raises(
        ValueError, match=r"target: sliding_window: expected at least 17, the depth of chain:16 .*got 16"
    ):
        greedy(target, NGram(Tree.chain(16)), [])
    with pytest.raises(ValueError, match=r"draft model: sliding_window: expected at least 17, .* chain:16 .*, got 16"):
        greedy(plain, DraftModel(target, Tree.chain(16)), [])
