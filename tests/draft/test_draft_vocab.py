"""Test reduced draft vocabularies: the drafted tokens, equal output, bad input, and the count of frequent tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import (
    Completion,
    DFlash,
    Drafter,
    DSpark,
    Eagle,
    Eagle3,
    Engine,
    Model,
    SamplingParams,
    Tree,
    frequent_tokens,
)
from jspec.draft import dflash_head
from jspec.draft.draft_vocab import read_draft_vocab
from jspec.draft.eagle_head import EagleHead
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.models.weights.quantize import quantize_weights
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.weights import Quantized
from tests.draft import test_borrowed_head as borrowed
from tests.draft.test_head_options import TOKENS, computed
from tests.support import engines, tiny
from tests.support.arrays import on_device
from tests.support.views import prefilled

pytestmark = pytest.mark.once

IDS = [9, 2, 4, 15, 7, 0]  # in any order
KEPT = sorted(IDS)
PROMPTS = [[15, 3, 14], [1, 2, 3, 4], [13], [12, 15, 12, 15, 2]]
PARAMS = [SamplingParams(max_tokens=24, temperature=t, seed=seed) for seed, t in enumerate((0, 0, 1.0, 1.0))]


def dflash(target: Model, tree: str, **options: Any) -> DFlash:
    return DFlash(tiny.dflash_head(target, block_size=4, feature_layers=(0, 1)), tree, **options)


def eagle3_head(target: Model) -> EagleHead:
    """Return an EAGLE-3 head without an output head."""
    head = tiny.eagle_head(target, draft_vocab=target.config.vocab_size, feature_layers=(0, 1))
    return head.replace(head=None)


DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "eagle": lambda target, tree, **options: Eagle(tiny.eagle1_head(target), tree, **options),
    "eagle3": lambda target, tree, **options: Eagle3(eagle3_head(target), tree, **options),
    "dflash": dflash,
}


def run(target: Model, drafter: Drafter, accept: str = "coupled") -> list[Completion]:
    engine = Engine(
        target, drafter=drafter, accept=accept, slots=4, max_len=engines.MAX_LEN, buckets=(4,), prefill_buckets=(6,)
    )
    return engine.generate(PROMPTS, PARAMS, trace=True)


@cache
def plain() -> list[list[int]]:
    return [done.token_ids for done in engines.plain().generate(PROMPTS, PARAMS)]


def drafted(done: list[Completion]) -> set[int]:
    """Return all ids that were drafted."""
    return {int(token) for one in done for r in one.rounds or () for token in r.tokens[1:][r.parents[1:] >= 0]}


# ---- the drafted tokens


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_logits_of_an_eagle_head_with_a_reduced_vocabulary_are_those_of_the_kept_ids(
    golden: Path, family: str, method: str
) -> None:
    """The logits are compared with the formulas in numpy, limited as the target's; other rows differ."""
    target = borrowed.target_of(golden, family)
    drafter, rng = borrowed.head_of(target, method), np.random.default_rng(3)
    width, kept = target.config.hidden_size * (1 if method == "eagle" else 3), np.array([3, 4, 17, 90, 127])
    tokens, features = rng.integers(0, 128, TOKENS), 2 * rng.normal(size=(TOKENS, width)).astype(np.float32)
    bound = type(drafter)(drafter.head, "chain:2", draft_vocab=kept).bind(target)
    assert bound.draft_to_target is not None and bound.draft_to_target.tolist() == kept.tolist()
    found = computed(bound, np.asarray(target.embed), tokens, features)
    right = borrowed.formula(drafter.head, target, tokens, features)
    size = np.abs(right).max()
    np.testing.assert_allclose(found, right[:, kept], atol=borrowed.TOLERANCE * size)
    assert np.abs(found - right[:, kept - 1]).max() > 50 * borrowed.TOLERANCE * size


def draft_of(drafter: DFlash, target: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that a DFlash head drafts after a random context, and the logits at each depth."""
    features = np.random.default_rng(7).normal(size=(9, 2 * target.config.hidden_size))

    @jax.jit
    def run(*given: Any) -> Any:
        logits = reduce_partials(drafter.run_block(*given)[0].logits, jnp.float32)
        return drafter.draft(*given)[0].tokens[0], logits[0]

    tokens, logits = run(*prefilled(drafter, target, features, root=7))
    return np.asarray(tokens), np.asarray(logits)


STATIC = "static:0,1,2,0.0,0.2,1.1,1.1.0"


def best_kept(logits: np.ndarray) -> list[int]:
    """Return the tokens of the tree `STATIC` that the ids `KEPT` allow, from logits of the whole vocabulary."""
    paths = Tree.parse(STATIC).paths
    assert paths is not None
    order = np.array(KEPT)[np.argsort(-logits[:, KEPT], axis=1, kind="stable")]
    return [int(order[len(path) - 1, path[-1]]) for path in paths]


def test_dflash_head_with_a_reduced_vocabulary_drafts_the_likeliest_of_the_kept_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: a map that is shifted by one gives other tokens."""
    target = tiny.model(engines.VOCAB)
    _, whole = draft_of(dflash(target, STATIC), target)
    found, logits = draft_of(dflash(target, STATIC, draft_vocab=IDS), target)
    assert logits.shape[1] == len(IDS) < whole.shape[1]
    assert found[1:].tolist() == best_kept(whole)
    right = dflash_head.reduced_head
    monkeypatch.setattr(dflash_head, "reduced_head", lambda *given: (right(*given)[0], jnp.roll(right(*given)[1], 1)))
    wrong, _ = draft_of(dflash(target, STATIC, draft_vocab=IDS), target)
    assert wrong[1:].tolist() != best_kept(whole)


def test_dspark_head_with_a_reduced_vocabulary_corrects_the_logits_of_the_kept_ids() -> None:
    """The oracle adds the vanilla correction of all ids to the logits of all ids, then leaves out ids."""
    target = tiny.model(engines.VOCAB)
    head = tiny.dspark_head(target, block_size=4, feature_layers=(0, 1))
    assert head.markov is not None
    embed, project = np.asarray(head.markov.embed), np.asarray(head.markov.project)
    _, whole = draft_of(DSpark(head, "chain:3"), target)
    found, _ = draft_of(DSpark(head, "chain:3", draft_vocab=IDS), target)
    expected, uncorrected = [int(found[0])], []
    for logits in whole:
        corrected = logits + project @ embed[expected[-1]]
        expected.append(KEPT[int(np.argmax(corrected[KEPT]))])
        uncorrected.append(KEPT[int(np.argmax(logits[KEPT]))])
    assert found.tolist() == expected and expected[1:] != uncorrected


def test_eagle3_head_with_a_reduced_vocabulary_drafts_as_one_with_these_rows_in_its_file() -> None:
    target = engines.target()
    head, ids = eagle3_head(target), on_device(KEPT)
    config = replace(head.config, draft_vocab_size=len(KEPT))
    own = head.replace(head=target.output_head[ids], draft_to_target=ids, config=config)
    one = run(target, Eagle3(head, "topk:6,3,2", draft_vocab=IDS))
    other = run(target, Eagle3(own, "topk:6,3,2"))
    for mine, its in zip(one, other, strict=True):
        for round_, same in zip(mine.rounds or (), its.rounds or (), strict=True):
            np.testing.assert_array_equal(round_.tokens, same.tokens)


@pytest.mark.parametrize("kind", ["int8", "fp8_dynamic"])
def test_quantised_output_head_with_a_reduced_vocabulary_has_the_rows_of_the_kept_ids(kind: str) -> None:
    target = quantize_weights(engines.target(), kind)
    bound = Eagle(tiny.eagle1_head(engines.target()), draft_vocab=IDS).bind(target)
    assert isinstance(bound.head, Quantized) and isinstance(target.output_head, Quantized) and bound.head.kind == kind
    np.testing.assert_array_equal(bound.head.values, target.output_head.values[np.array(KEPT)])
    np.testing.assert_array_equal(bound.head.scale, target.output_head.scale[np.array(KEPT)])


def test_rows_of_a_weight_with_scales_for_groups_of_columns_keep_their_values() -> None:
    rng = np.random.default_rng(0)
    weight = Quantized(
        on_device(rng.integers(-9, 9, (6, 8)), jnp.int8), on_device(rng.random((6, 2)), jnp.float32), "int8"
    )
    values = np.asarray(weight.values) * np.repeat(np.asarray(weight.scale), 4, axis=1)
    part = weight.rows(on_device([5, 1]))
    np.testing.assert_array_equal(
        np.asarray(part.values) * np.repeat(np.asarray(part.scale), 4, axis=1), values[[5, 1]]
    )


# ---- the output


@pytest.mark.parametrize(
    ("method", "tree", "accept"),
    [
        ("eagle", "topk:6,3,2", "coupled"),
        pytest.param("eagle3", "chain:3", "coupled", marks=pytest.mark.long),
        pytest.param("dflash", "static:0,1,0.0,1.0", "coupled", marks=pytest.mark.long),
        pytest.param("dflash", "topk:6,3,2", "coupled", marks=pytest.mark.long),
        pytest.param("eagle", "chain:3", "rejection", marks=pytest.mark.long),
        pytest.param("dflash", "static:0,1,0.0,1.0", "traversal", marks=pytest.mark.long),
    ],
)
def test_engine_with_a_reduced_draft_vocabulary_emits_the_tokens_of_plain_decoding(
    method: str, tree: str, accept: str
) -> None:
    """With draft ids that the texts contain, and with others; sampled rows of other rules have other noise."""
    done = run(engines.target(), DRAFTERS[method](engines.target(), tree, draft_vocab=IDS), accept)
    equal = slice(None) if accept == "coupled" else slice(2)
    assert [one.token_ids for one in done][equal] == plain()[equal]
    assert set().union(*plain()) - set(IDS), "the texts have ids that cannot be drafted"
    assert drafted(done) <= set(IDS)


def test_drafter_whose_reduced_vocabulary_is_the_whole_one_is_not_reduced() -> None:
    target = engines.target()
    drafter = Eagle(tiny.eagle1_head(target), draft_vocab=engines.VOCAB)
    assert drafter.draft_vocab is None and drafter.bind(target).head is target.output_head


def test_drafter_with_a_window_keeps_its_reduced_vocabulary() -> None:
    for make in DRAFTERS.values():
        drafter: Any = make(engines.target(), "chain:2", draft_vocab=IDS)
        assert drafter.with_window(4).draft_vocab.tolist() == drafter.cut(1).draft_vocab.tolist() == KEPT


# ---- input


def test_draft_vocabulary_given_in_each_form_has_these_ids_in_ascending_order(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array(IDS))
    (tmp_path / "ids.json").write_text(str(IDS))
    for given in (IDS, tuple(IDS), np.array(IDS, np.uint16), on_device(IDS), tmp_path / "ids.npy"):
        assert read_draft_vocab("Eagle", given, 16).tolist() == KEPT
    assert read_draft_vocab("Eagle", str(tmp_path / "ids.json"), 16).tolist() == KEPT
    assert read_draft_vocab("Eagle", 3, 16).tolist() == [0, 1, 2]


BAD: tuple[tuple[Any, str], ...] = (
    ([1, 2, 1], "draft_vocab: expected different ids, got 1 more than once"),
    ([1, 16], "draft_vocab: expected ids from 0 to 15, those of the target, got 16"),
    ([-1, 2], "draft_vocab: expected ids from 0 to 15, those of the target, got -1"),
    (0, "draft_vocab: expected 1 to 16, the target's vocabulary, got 0"),
    (17, "draft_vocab: expected 1 to 16, the target's vocabulary, got 17"),
    ([], "draft_vocab: expected an int, different token ids, or a .npy or .json file of them, got "),
    ([[1, 2]], "draft_vocab: expected an int, different token ids"),
    ([[1], [2, 3]], "draft_vocab: expected an int, different token ids"),
    ([0.5, 1.0], "draft_vocab: expected an int, different token ids"),
    (True, "draft_vocab: expected an int, different token ids"),
    ("ids.pt", "draft_vocab: expected an int, different token ids, or a .npy or .json file of them, got 'ids.pt'"),
    ([3, 4], "topk:4,1,3 needs 3 children of a node, the draft vocabulary has 2 tokens; take a narrower tree"),
)


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize(("given", "message"), BAD, ids=lambda value: str(value)[:20])
def test_drafter_with_an_invalid_draft_vocabulary_raises(method: str, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}"):
        DRAFTERS[method](engines.target(), "topk:4,1,3", draft_vocab=given)


def test_draft_vocabulary_in_a_damaged_file_raises(tmp_path: Path) -> None:
    for name, content in (("a.json", "[1, 2"), ("a.npy", "no array"), ("b.npy", "")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name}: expected token ids, got a damaged file"):
            read_draft_vocab("Eagle", tmp_path / name, 16)
    with pytest.raises(FileNotFoundError):
        read_draft_vocab("Eagle", tmp_path / "none.npy", 16)


def test_head_with_an_output_head_of_its_own_refuses_a_draft_vocabulary() -> None:
    head = tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1))
    with pytest.raises(ValueError, match=r"Eagle3: draft_vocab: expected a head that uses .* of its own for 12 tokens"):
        Eagle3(head, draft_vocab=IDS)


# ---- frequent tokens


def test_frequent_tokens_are_those_that_a_counter_finds() -> None:
    texts = ["abracadabra", "banana", "", "cab"]
    counted = Counter("".join(texts).encode())
    for size in (1, 2, 4, len(counted)):
        best = sorted(counted, key=lambda token: (-counted[token], token))[:size]
        assert frequent_tokens(texts, size, tokenizer=ByteTokenizer()).tolist() == sorted(best)
    ids = [list(text.encode()) for text in texts]
    assert frequent_tokens(ids, 3).tolist() == frequent_tokens(texts, 3, tokenizer=ByteTokenizer()).tolist()


def test_frequent_tokens_of_texts_with_fewer_tokens_include_the_smallest_other_ids() -> None:
    assert frequent_tokens([[7, 7, 3]], 5).tolist() == [0, 1, 2, 3, 7]
    assert frequent_tokens("aa", 2, tokenizer=ByteTokenizer()).tolist() == [0, ord("a")]


def test_frequent_tokens_with_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="size: expected an int from 1, got 0"):
        frequent_tokens([[1]], 0)
    with pytest.raises(ValueError, match="tokenizer: expected the target's"):
        frequent_tokens(["text"], 2)
    with pytest.raises(ValueError, match="texts: expected at least one token"):
        frequent_tokens([[]], 2)
