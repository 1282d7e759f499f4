"""`jspec bench inflate`: the inflated target's and head's logits equal those of the small ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Eagle3, Engine, Model, SamplingParams, Tree
from jspec.core.numerics import AUTO
from jspec.core.records import TokenBatch
from jspec.draft.eagle_head import EagleHead, fuse, output_logits, project_inputs, run_on_cache
from jspec.models.kv_cache import create
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.rope import Rope
from jspec.tools import demo
from jspec.tools.bench import options, random_models
from jspec.tools.bench.inflate import grow
from jspec.tools.bench.inflate.convert import grow_pair
from jspec.tools.bench.inflate.grow import sizes_of
from jspec.tools.replay import run_texts
from pallas_kernels.layers.partial_sums import reduce_partials
from tests.support import byte_pair, tiny
from tests.support.arrays import on_device
from tests.support.inflating import (
    BYTE_SIZES,
    DRAFTED,
    LAYERS,
    SIZES,
    TOLERANCE,
    VOCAB,
    byte_models,
    compare,
    head_of,
    large_pair,
    target,
    text_tokens,
    tokens,
)

pytestmark = pytest.mark.once

# ---- the target


@pytest.mark.parametrize(
    ("model", "larger"),
    [
        (dict(), dict()),
        (
            dict(kv_heads=1, rope=Rope()),
            dict(num_kv_heads=1, num_heads=4, hidden_size=17, head_dim=4, num_layers=LAYERS),
        ),
        (dict(kv_heads=4, tied=True), dict(num_kv_heads=4, num_heads=8, head_dim=16)),
        (dict(tied=True), dict(vocab_size=VOCAB, hidden_size=16, draft_vocab_size=None)),
    ],
    ids=["grouped queries, llama3", "one kv head, one channel more", "a kv head each, tied", "its vocabulary, tied"],
)
def test_inflated_target_has_the_logits_of_the_small_target(model: dict[str, Any], larger: dict[str, int]) -> None:
    small, wanted = target(**model), SIZES | larger
    large, none = grow_pair(small, wanted)
    assert none is None and large.head is not None
    layers = wanted["num_layers"]
    assert {name: getattr(large.config, name) for name in options.SIZES} == {n: wanted[n] for n in options.SIZES}
    match = compare(small, large, (2, 3, 4), (2, layers // 2, layers - 3), tokens())
    assert match.same, match


def test_inflated_embedded_target_has_the_logits_of_the_small_target() -> None:
    large, head = large_pair()
    assert head.config.feature_layers == (2, 4, 6)
    match = compare(byte_models()[0], large, (2, 4, 5), (2, 4, 6), text_tokens())
    assert match.same, match


def test_inflated_target_in_bfloat16_has_about_the_logit_error_of_the_small_target() -> None:
    """Small and inflated bfloat16 targets round differently, so each is compared with the float32 target."""
    small, _ = byte_models()
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small)
    large, _ = grow_pair(small, BYTE_SIZES | dict(hidden_size=128), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(large)} == {jnp.dtype("bfloat16")}
    exact, own, logits = (np.asarray(run_texts(model, text_tokens()).logits) for model in (small, rounded, large))
    assert logits[..., 256:].max() < exact.min() - 100
    errors = [np.sqrt(np.mean((x[..., :256] - exact) ** 2)) for x in (own, logits)]
    assert errors[1] < 1.5 * errors[0] < 0.1 * exact.std()


# ---- negative controls: each part left out or done wrongly is seen


def scaled(dims: int) -> Callable[..., Any]:
    """Return a `grow.pad` that does not scale weights with ``dims`` dimensions."""
    pad = grow.pad

    def unscaled(x: jax.Array, *axes: grow.Axis, scale: float = 1.0, dtype: str) -> jax.Array:
        return pad(x, *axes, scale=1.0 if x.ndim == dims else scale, dtype=dtype)

    return unscaled


def contiguous(factor: grow.Factor) -> tuple[int, int, int]:
    return 0, factor.new - factor.old, 0


padder_heads = grow.Padder._heads


def heads_in_one_row(padder: grow.Padder, *group: grow.Factor) -> grow.Axis:
    heads = "num_heads" if group else "num_kv_heads"
    return grow.Factor(getattr(padder.old, heads), getattr(padder.new, heads)), *padder_heads(padder)[-2:]


def unmasked(padder: grow.Padder, weight: jax.Array, rows: grow.Factor) -> jax.Array:
    return padder.pad(weight, (rows,), (padder.hidden,))


def after_all(old: int, new: int, moved: dict[int, int]) -> tuple[int | None, ...]:
    return (*range(old), *[None] * (new - old))


STEPS: dict[str, tuple[Any, str, Any, str]] = {
    "scale of the queries": (grow, "pad", scaled(2), "logits"),
    "scale of the norms": (grow, "pad", scaled(1), "logits"),
    "eps": (grow, "_eps", lambda old, new: old.norm_eps, "logits"),
    "places of the channels": (grow.Factor, "padding", property(contiguous), "logits"),
    "places of the heads": (grow.Padder, "_heads", heads_in_one_row, "logits"),
    "a constant for the mask that norms do not see": (grow, "NEGLIGIBLE", 1.0, "logits"),
    "the mask": (grow.Padder, "output_head", unmasked, "margin"),
    "places of the layers": (grow, "insert_layers", after_all, "features"),
}


@pytest.mark.parametrize("step", STEPS)
def test_inflated_target_with_one_padding_rule_broken_has_other_logits(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, instead, seen = STEPS[step]
    monkeypatch.setattr(where, name, instead)
    small = target()
    large, _ = grow_pair(small, SIZES)
    match = compare(small, large, (2, 3, 4), (2, 6, 9), tokens())
    assert not match.same
    assert match.margin < 100 if seen == "margin" else getattr(match, seen) > 10 * TOLERANCE, match


# ---- the head


def drafted(head: EagleHead, model: Model, features: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return a head's logits over a text, first from the target's features, then from its own features."""
    bound = Eagle3(head, Tree.chain(1)).bind(model)
    count = features.shape[1]
    pool = PoolShape(1, 8, 16, 2 * count, "float32", "float32")
    draft_cache = create(head.config.layers, pool, "float32")
    own, logits = fuse(bound, features), []
    for part in range(2):
        pairs = TokenBatch(
            tokens=tokens()[:, :count],
            positions=part * count + on_device(np.arange(count))[None],
            valid=on_device(np.ones((1, count), bool)),
            first_row=on_device(np.full(1, 1 + part * count, jnp.int32)),
            page_table=on_device(np.arange(1, 8, dtype=jnp.int32))[None],
            bits=None,
            numerics=AUTO,
        )
        inputs = project_inputs(bound, pairs.tokens, own, pairs.numerics)
        *attended, draft_cache = run_on_cache(bound, draft_cache, pairs, *inputs, attends=True)
        out, product = output_logits(bound, *attended, pairs.numerics)
        own = out.hidden
        logits.append(np.asarray(reduce_partials(product, jnp.float32)))
    return logits[0], logits[1]


EAGLE31 = dict(num_layers=2, fc_norm=True, norm_output=True)


@pytest.mark.parametrize(
    ("vocab", "config"), [(16, {}), (None, {}), (16, dict(num_layers=2)), (None, EAGLE31)], ids=str
)
def test_inflated_head_has_the_logits_of_the_small_head(vocab: int | None, config: dict[str, Any]) -> None:
    model = target()
    head = head_of(model, **config)
    large, large_head = grow_pair(model, SIZES | dict(draft_vocab_size=vocab), head=head)
    assert large_head is not None and large_head.config.draft_vocab_size == (vocab or DRAFTED)
    states, new_states = head.config.states_of(LAYERS), large_head.config.states_of(12)
    features, new_features = (run_texts(m, tokens(), at).features for m, at in ((model, states), (large, new_states)))
    for one, other in zip(drafted(head, model, features), drafted(large_head, large, new_features), strict=True):
        count = one.shape[-1]
        assert np.abs(other[..., :count] - one).max() < TOLERANCE * np.abs(one).max()
        assert (one.min() - other[..., count:]).min(initial=np.inf) > 100
        assert np.isfinite(other).all()


def test_inflated_head_padded_draft_tokens_map_to_padded_target_tokens() -> None:
    _, head = large_pair()
    ids = np.asarray(head.draft_to_target)
    old = np.asarray(byte_models()[1].draft_to_target)
    assert ids.tolist() == [*old.tolist(), *range(256, 256 + 100 - len(old))]


@cache
def short_pairs() -> list[tuple[Model, EagleHead]]:
    """Small and inflated embedded pair without the target's last three layers, which compile faster."""
    whole, head = byte_models()
    model = whole.replace(layers=whole.layers[:5], config=whole.config.resized(num_layers=5))
    large, large_head = grow_pair(model, BYTE_SIZES | dict(num_layers=6), head=head, feature_layers=(2, 5, 6))
    assert large_head is not None
    return [(model, head), (large, large_head)]


@pytest.mark.long
@pytest.mark.parametrize("tree", [pytest.param(Tree.chain(2), marks=pytest.mark.matrix), Tree.topk(6, 2, 3)], ids=str)
def test_inflated_pair_emits_the_tokens_of_the_small_pair_in_as_many_steps(tree: Tree) -> None:
    size, seen = len(byte_pair.PROMPT), []
    # For greedy rows all rules are equal; this one compiles fastest.
    options = dict(slots=1, max_len=size + 64, prefill_buckets=(size,), tokenizer="bytes", accept="multi_candidate")
    for model, head in short_pairs():
        with Engine(model, drafter=Eagle3(head, tree), **options) as engine:
            (done,) = engine.generate(byte_pair.PROMPT, SamplingParams(max_tokens=48, temperature=0))
        seen.append((done.token_ids, done.metrics.num_drafts, done.metrics.mean_acceptance_length))
    assert seen[0] == seen[1]
    assert seen[0][2] > 1.3


# ---- states and layers


@pytest.mark.parametrize(
    ("old", "new", "moved", "expected"),
    [
        (2, 4, {}, (None, None, 0, 1)),
        (2, 4, {1: 1}, (0, None, None, 1)),
        (2, 4, {0: 1, 2: 3}, (None, 0, 1, None)),
        (2, 4, {3: 5, 1: 2}, (None, 0, None, 1)),
        (7, 9, {2: 2, 3: 4, 4: 6}, (0, 1, None, 2, None, 3, 4, 5, 6)),
        (2, 2, {2: 2}, (0, 1)),
    ],
)
def test_inflation_with_inserted_layers_keeps_old_layers_around_feature_states(
    old: int, new: int, moved: dict[int, int], expected: tuple[int | None, ...]
) -> None:
    assert grow.insert_layers(old, new, moved) == expected


@pytest.mark.parametrize(
    "moved", [{1: 0}, {1: 2, 2: 2}, {1: 4}, {3: 4}, {2: 5}, {3: 6}], ids=lambda moved: f"{moved} of 2 in 4"
)
def test_inflation_with_feature_states_too_close_for_new_layers_raises(moved: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="layers: expected room"):
        grow.insert_layers(2, 4, moved)


def test_inflated_head_with_other_feature_layers_keeps_or_moves_them_as_requested() -> None:
    model = target()
    head = head_of(model, feature_layers=(1, 5, LAYERS))
    for wanted, expected in ((None, (1, 5, LAYERS)), ((3, 8, 10), (3, 8, 10))):
        large, large_head = grow_pair(model, SIZES, head=head, feature_layers=wanted)
        assert large_head is not None and large_head.config.feature_layers == expected
        match = compare(model, large, (1, 5, LAYERS), expected, tokens())
        assert match.same, match


def test_inflation_plan_of_the_embedded_pair_has_the_sizes_of_an_8b_model() -> None:
    model, head = byte_models()
    made = grow.plan(model, sizes_of("llama3-8b"), head=head, feature_layers=None, dtype="bfloat16")
    own = made.target.old
    assert made.target.new == random_models.TARGETS["llama3-8b"].resized(
        rope=own.rope, max_position=own.max_position, norm_eps=own.norm_eps / 64
    )
    assert made.head is not None and made.head.new.feature_layers == (2, 16, 29)
    assert [made.layer_at.index(old) for old in range(8)] == [0, 1, 14, 15, 28, 29, 30, 31]


def test_inflation_plan_of_the_demo_pair_keeps_the_draft_vocabulary_of_its_head() -> None:
    model = tiny.load_target(demo.TARGET)
    sizes = sizes_of("llama3-8b") | dict(draft_vocab_size=model.config.vocab_size)
    made = grow.plan(model, sizes, head=tiny.load_head(demo.HEAD), feature_layers=None, dtype="bfloat16")
    assert made.head is not None and made.head.new.num_layers == made.head.old.num_layers
    assert (made.head.new.hidden_size, made.head.new.draft_vocab_size) == (4096, 2048)
