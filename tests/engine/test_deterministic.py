"""Test deterministic=True: a token's logits have equal bits with any drafter, batch, bucket, page size and chunk."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Completion, DraftModel, DSpark, Engine, Model, SamplingParams, Tree
from jspec.core.ancestors import ancestors, by_depth, depths
from jspec.core.numerics import Numerics
from jspec.core.records import TokenBatch
from jspec.models.decoder import forward
from jspec.models.deterministic import check_deterministic
from jspec.models.mixers.mla import MLA
from jspec.models.mlps.mlp_config import Experts, Router
from jspec.models.parts.kv_pool import KVPool
from jspec.models.parts.rope import Rope
from jspec.models.weights.params import model_params, random_weights
from jspec.models.weights.quantize import quantize_weights
from jspec.tools.bench import random_models
from tests.support import tiny
from tests.support.arrays import on_device

VOCAB, TEXT = 64, 24
TOKENS = np.random.default_rng(0).integers(0, VOCAB, TEXT)
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 23, 11)]


TEMPERED = Rope(temperature=0.3, original_max_position=8)
# Options of attention and of layers, which together cover what the model families compute beside Llama.
TRAITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "norms before and after": (
        dict(qk_norm="head", bias=True, output_bias=True, window=9, softcap=5.0, scale=0.3, sinks=True),
        dict(norms="both", residual_scale=0.7, post_norm_eps=1e-2),
    ),
    "experts, chunks": (
        dict(qk_norm="unit", v_norm=True, chunk=11, output_gate=True),
        dict(mlp=Experts(64, Router(6, 2, scores="sigmoid", correction=True), shared=64, bias=True), has_scale=True),
    ),
    # sizes that the kernel of deterministic products takes: multiples of 64 out, of 32 in
    "latent": ({}, dict(mixer=MLA(4, 48, 16, 16, 32, 0.2, query_latent=64, rope=TEMPERED))),
    "norms after": (dict(qk_norm="all", rope=Rope(fraction=0.5, attention_factor=1.2)), dict(norms="post")),
}


@cache
def model(dtype: str, layers: int = 2, traits: str = "llama") -> Model:
    """Return a random target with nearly flat distributions."""
    own, more = tiny.config(VOCAB, layers=layers, hidden=64), TRAITS[traits]
    layer = replace(own.layers[0], mixer=replace(own.layers[0].attention, **more[0]))
    layer = replace(layer, **more[1])
    if more[1]:
        layer = replace(layer, mlp=replace(layer.mlp, activation="gelu_tanh"))
        own = replace(own, embed_scale=3.0, norms_embedding=True, logit_divisor=1.5, logit_softcap=9.0)
    made = tiny.random_model(replace(own, layers=(layer,) * layers), sharpness=0.3)
    return jax.tree.map(lambda x: x.astype(dtype), made)


class Texts:
    """A runner of the target's forward pass over several rows of equal tokens, with pools of its own."""

    def __init__(
        self,
        dtype: str,
        *,
        page: int,
        rows: int = 1,
        traits: str = "llama",
        deterministic: bool = True,
        implementation: str,
    ) -> None:
        columns = 64 // page
        self.target = model(dtype, traits=traits)
        self.table = on_device(1 + np.arange(rows * columns).reshape(rows, columns), jnp.int32)
        attention = self.target.config.layers[0].attention
        k, v = ((1 + rows * columns, attention.cached_heads, page, dim) for dim in attention.pool_dims)
        self.cache = [KVPool(on_device(np.zeros(k, dtype)), on_device(np.zeros(v, dtype)))] * 2
        self.numerics = Numerics(implementation, deterministic)
        options = {"xla_allow_excess_precision": False}
        self.forward = jax.jit(forward, compiler_options=options if deterministic else None)

    def feed(self, tokens: Any, first: int, parents: Any = None) -> np.ndarray:
        """Return the last row's logits [tokens, vocab]; earlier rows hold equal tokens at other positions."""
        rows, tokens = self.table.shape[0], np.asarray(tokens)
        firsts = np.array([*range(rows - 1), first])
        offsets, paths = np.arange(len(tokens)), None
        if parents is not None:
            ancestor_mask = ancestors(on_device([parents] * rows, jnp.int32))
            offsets, paths = np.asarray(depths(ancestor_mask)[0]), by_depth(ancestor_mask, 3)
        batch = TokenBatch(
            tokens=on_device(np.tile(tokens, (rows, 1)), jnp.int32),
            positions=on_device(firsts[:, None] + offsets, jnp.int32),
            valid=on_device(np.ones((rows, len(tokens)), bool)),
            first_row=on_device(firsts, jnp.int32),
            page_table=self.table,
            bits=None,
            paths=paths,
            numerics=self.numerics,
        )
        out, self.cache = self.forward(self.target, self.cache, batch)
        return np.asarray(out.logits)[-1]

    def fed_in(self, size: int) -> np.ndarray:
        """Return the logits of the whole text, fed in chunks of the given sizes."""
        return np.concatenate([self.feed(TOKENS[at : at + size], at) for at in range(0, TEXT, size)])


def check_every_way(dtype: str, implementation: str, traits: str = "llama") -> None:
    make = partial(Texts, dtype, implementation=implementation, traits=traits)
    alone = make(page=16)
    one_by_one = alone.fed_in(1)
    np.testing.assert_array_equal(make(page=4, rows=3).fed_in(6), one_by_one)
    # Nodes 1, 3 and 5 are the text's next tokens, nodes 2 and 4 are other tokens, and node 6 is padding.
    begun = TEXT - 4
    nodes = np.array([TOKENS[begun], TOKENS[begun + 1], 3, TOKENS[begun + 2], 9, TOKENS[begun + 3], 0])
    logits = alone.feed(nodes, begun, parents=[-1, 0, 0, 1, 2, 3, -1])
    np.testing.assert_array_equal(logits[[0, 1, 3, 5]], one_by_one[begun:])
    assert (logits[4] != one_by_one[begun + 2]).any()


@pytest.mark.parametrize(
    ("dtype", "traits"),
    [
        pytest.param("float32", "llama", marks=pytest.mark.long),
        pytest.param("bfloat16", "llama", marks=pytest.mark.long),  # as the engines below
        ("float32", "norms before and after"),
        ("bfloat16", "norms after"),
        pytest.param("float32", "experts, chunks", marks=pytest.mark.long),
        pytest.param("float32", "latent", marks=pytest.mark.long),
        ("bfloat16", "latent"),
        ("bfloat16", "experts, chunks"),
    ],
)
def test_deterministic_forward_in_any_batch_chunk_or_tree_has_equal_logit_bits(dtype: str, traits: str) -> None:
    """The test feeds single tokens, three rows in chunks on other pages, and nodes of a tree."""
    check_every_way(dtype, "reference", traits)


@pytest.mark.long
@pytest.mark.parametrize("traits", TRAITS)
def test_deterministic_forward_with_interpreted_kernels_has_equal_logit_bits(traits: str) -> None:
    check_every_way("bfloat16", "pallas", traits)


@pytest.mark.gpu
@pytest.mark.parametrize("traits", TRAITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_forward_on_a_gpu_has_equal_logit_bits(dtype: str, traits: str) -> None:
    check_every_way(dtype, "pallas", traits)


def test_ordinary_forward_in_another_batch_has_other_logit_bits() -> None:
    make = partial(Texts, "bfloat16", implementation="reference", deterministic=False)
    assert (make(page=4, rows=3).fed_in(6) != make(page=16).fed_in(1)).any()


def params(index: int) -> SamplingParams:
    """Return the parameters of request 0 (greedy), 1 (seeded, with top-k, top-p, min-p) or 2 (greedy, penalised)."""
    own: dict[str, Any] = [
        dict(temperature=0.0),
        dict(temperature=1.0, seed=3, top_k=20, top_p=0.9, min_p=0.01),
        dict(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3),
    ][index]
    return SamplingParams(max_tokens=24, logprobs=20, **own)


def engine(*, deterministic: bool = True, tree: Tree | None = None, **options: Any) -> Engine:
    target = model("bfloat16", layers=1)
    drafter = None
    if tree is not None:
        head = target.head.at[: VOCAB // 4].set(0)  # some drafts are wrong
        drafter = DraftModel(target.replace(head=head), tree)
    options = {"slots": 3, "max_len": 64, "buckets": (3,), "prefill_buckets": (32,), **options}
    return Engine(target, drafter=drafter, deterministic=deterministic, **options)


def seen(completions: list[Completion]) -> list[Any]:
    """Return tokens and log-probabilities of completions for bitwise comparison."""
    return [(done.token_ids, [(one.logprob, one.top) for one in done.logprobs or ()]) for done in completions]


def one_by_one(engine: Engine) -> list[Any]:
    return seen([engine.generate(prompt, params(index))[0] for index, prompt in enumerate(PROMPTS)])


def at_once(engine: Engine) -> list[Completion]:
    return engine.generate(PROMPTS, [params(index) for index in range(3)])


@cache
def plain_alone() -> list[Any]:
    return one_by_one(engine(buckets=(1,), slots=1, prefix_cache=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "options"),
    [
        pytest.param("chain:1", dict(buckets=(1, 3)), marks=pytest.mark.matrix),
        pytest.param("chain:4", dict(page_size=4, pages=22, prefill_buckets=(7,)), marks=pytest.mark.matrix),
        pytest.param(  # too few pages for three requests
            "topk:9,3,3",
            dict(page_size=4, pages=24, prefill_buckets=(7,), rounds_per_dispatch=2),
            marks=pytest.mark.once,
        ),
    ],
)
def test_deterministic_engine_with_drafter_has_the_output_bits_of_plain_decoding(
    tree: str, options: dict[str, Any]
) -> None:
    """Requests in one batch are greedy, seeded and penalised; in plain decoding each runs alone."""
    drafted = engine(tree=Tree.parse(tree), **options)
    together = at_once(drafted)
    assert seen(together) == plain_alone()
    assert seen(at_once(drafted)) == plain_alone(), "differs when the prompts are cached"
    lengths = [done.metrics.mean_acceptance_length for done in together]
    assert 1.1 < np.mean(lengths) < Tree.parse(tree).depth + 0.95, lengths
    if "pages" in options:
        assert drafted.metrics.num_preemptions > 0


@pytest.mark.long
def test_deterministic_engine_with_a_dspark_head_has_the_output_bits_of_plain_decoding() -> None:
    target = model("bfloat16", layers=1)
    head = tiny.dspark_head(target, block_size=3, feature_layers=(0, 1))
    drafter = DSpark(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), head), "topk:9,3,3")
    options = {"slots": 3, "max_len": 64, "page_size": 4, "buckets": (3,), "prefill_buckets": (7,)}
    drafted = Engine(target, drafter=drafter, deterministic=True, **options)
    assert seen(at_once(drafted)) == plain_alone()
    assert seen(at_once(drafted)) == plain_alone(), "differs when the prompts are cached"


@pytest.mark.once
@pytest.mark.slow
def test_ordinary_engine_in_another_bucket_returns_other_tokens_or_logprobs() -> None:
    ordinary = engine(deterministic=False, buckets=(1, 3), prefix_cache=False)
    assert one_by_one(ordinary) != seen(at_once(ordinary))


def test_deterministic_engine_with_quantised_weights_raises() -> None:
    with pytest.raises(ValueError, match=r"deterministic: expected quantize=None, got 'int8'"):
        engine(quantize="int8")
    quantised = quantize_weights(model("float32"), "fp8")
    with pytest.raises(ValueError, match="deterministic: expected a target whose weights are not quantised, got fp8"):
        Engine(quantised, deterministic=True)
    with pytest.raises(ValueError, match="deterministic: expected a bool"):
        engine(deterministic=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "implementation", "warnings"), [(64, "auto", 0), (128, "auto", 1), (128, "reference", 0)]
)
def test_deterministic_latent_attention_of_too_many_heads_for_the_kernel_on_a_gpu_is_logged(
    heads: int, implementation: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = model("float32", layers=1)
    layer = replace(target.config.layers[0], mixer=MLA(heads, 512, 64, 32, 16, 0.2))
    target = target.replace(config=replace(target.config, layers=(layer,)))
    check_deterministic(target, implementation)
    assert "reference" not in caplog.text, "control: not on a GPU"
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    check_deterministic(target, implementation)
    expected = f"{heads} query heads per KV head runs its slow reference, as its kernel has at most 64; raise tensor_pa"
    assert caplog.text.count("reference") == caplog.text.count(expected) == warnings


def test_ancestors_by_depth_of_each_tree_node_start_at_the_root() -> None:
    ancestor_mask = ancestors(on_device([[-1, 0, 0, 1, -1, 3]]))
    wanted = [[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1], [0, 1, 3, -1], [4, -1, -1, -1], [0, 1, 3, 5]]
    np.testing.assert_array_equal(by_depth(ancestor_mask, 3)[0], wanted)


@pytest.mark.gpu
def test_deterministic_engine_on_gpu_has_equal_bits_in_any_packing_of_prompts() -> None:
    sizes = dict(vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_layers=6, num_heads=8, num_kv_heads=2)
    config = random_models.TARGETS["llama3-8b"].resized(**sizes)
    target = Model.from_weights(config, random_weights(model_params(config), "bfloat16", 0))
    lengths = (1, 5, 16, 17, 40, 100, 128, 130, 300, 511, 512, 700, 1000, 33, 64, 250)
    prompts = [np.random.default_rng(n).integers(0, 4096, n).tolist() for n in lengths]

    def found(order: list[int], calls: int, **options: Any) -> dict[int, Any]:
        """Return tokens and log-probabilities of each prompt; the prompts are divided among several calls."""
        common = dict(slots=16, max_len=1200, buckets=(1, 16), deterministic=True, prefix_cache=False)
        params, outputs = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=2), {}
        with Engine(target, **common | options) as engine:
            for own in np.array_split(np.array(order), calls):
                done = engine.generate([prompts[index] for index in own], params)
                outputs |= {int(i): (one.token_ids, repr(one.logprobs)) for i, one in zip(own, done, strict=True)}
        return outputs

    order = list(range(len(prompts)))
    alone = found(order, len(prompts))
    assert found(order, 1) == found(order[::-1], 3) == found(order[8:] + order[:8], 2, prefill_buckets=(256,)) == alone
