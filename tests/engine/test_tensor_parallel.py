"""Test that an engine on several devices emits the tokens of an engine on one, and that the devices stay equal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jaxtyping import Array
from safetensors.numpy import load_file, save_file

from jspec import (
    MTP,
    Beside,
    Completion,
    DFlash,
    DFlash2,
    Drafter,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    Engine,
    Medusa,
    Model,
    NGram,
    PEagle,
    SamplingParams,
    Suffix,
)
from jspec.core.config import ACCEPT_RULES
from jspec.draft.dflash_head import Context
from jspec.draft.eagle_head import EagleHead
from jspec.engine.schedule.program_choice import gathering
from jspec.models.mlps.mlp_config import Router
from jspec.models.weights.quantize import quantize_weights
from pallas_kernels.layers.shard import AXIS, Shard
from tests.support import cover, engines, folders, lettered, tiny
from tests.support.beside import check_sources
from tests.support.devices import check_devices_equal
from tests.support.recordings import recording

pytestmark = pytest.mark.slow
VOCAB = 61  # devices cannot divide it, so weights are padded
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 23, 11, 2, 9)] + [[7, 8, 9] * 5]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    SamplingParams(max_tokens=12, temperature=0.8, seed=2, top_k=7),
    SamplingParams(max_tokens=12, temperature=1.2, seed=3, top_p=0.9, min_p=0.02),
    SamplingParams(
        max_tokens=12, temperature=0.9, seed=4, repetition_penalty=1.2, logit_bias={3: 2.0}, bad_words=[[5], [6, 7]]
    ),
    SamplingParams(max_tokens=12, temperature=0.0),
]
PLAIN = 0, 1, 5  # requests of `PARAMS` for which no logits are gathered, neither the target's nor the draft's
WIDTHS = {32, 62}  # of gathered draft logits and logits on two devices
OPTIONS: dict[str, Any] = dict(slots=6, max_len=64, buckets=(6,), prefill_buckets=(96,))
LLAMA_OPTIONS: dict[str, Any] = {**OPTIONS, "controls": False}  # fewer traits, which compile sooner
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "llama4_text", "minimax_m2", "laguna")
DENSE = (
    *("gemma2", "gemma3_text", "gemma4_text", "gemma4_e2b", "granite", "llama", "mistral", "muse_glimmer"),
    *("olmo3", "phi3", "qwen2", "qwen3"),
)
FAMILIES = (*DENSE, *EXPERTS, *LATENT)


@cache
def target() -> Model:
    """Return a random target with biases, sinks and head norms, and two key-value heads."""
    own = tiny.config(VOCAB, hidden=64)
    layer = own.layers[0]
    attention = replace(layer.attention, qk_norm="head", bias=True, output_bias=True, sinks=True, window=9)
    layers = (replace(layer, mixer=attention, norms="both", residual_scale=0.7), layer)
    return tiny.random_model(replace(own, layers=layers, logit_softcap=9.0))


@cache
def llama() -> Model:
    """Return a random target whose output head is its embedding."""
    return tiny.random_model(replace(tiny.config(VOCAB, layers=1, hidden=64), tie_word_embeddings=True))


def head() -> EagleHead:
    return tiny.eagle_head(target(), draft_vocab=31, feature_layers=(0, 2))


def small_model() -> Model:
    return tiny.model(VOCAB, layers=1, hidden=64, seed=3)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "eagle3 chain": lambda: Eagle3(head(), "chain:3"),
    "eagle3 tree": lambda: Eagle3(head(), "topk:8,3,3"),
    "peagle": lambda: PEagle(tiny.peagle_head(target(), draft_vocab=31, feature_layers=(0, 2)), "topk:8,3,3"),
    "eagle": lambda: Eagle(tiny.eagle1_head(target()), "chain:2"),
    "reduced eagle": lambda: Eagle(tiny.eagle1_head(target()), "chain:2", draft_vocab=range(3, 32)),
    "mtp": lambda: MTP(tiny.mtp_head(target()), "topk:8,3,3"),
    "draft model": lambda: DraftModel(small_model(), "topk:6,2,2"),
    "dflash": lambda: DFlash(tiny.dflash_head(target(), block_size=4, feature_layers=(0, 1)), "topk:8,3,3"),
    "reduced dflash": lambda: DFlash(
        tiny.dflash_head(target(), block_size=4, feature_layers=(0, 1)), "chain:3", draft_vocab=range(3, 32)
    ),
    "dflash2": lambda: DFlash2(tiny.dflash2_head(target(), block_size=4, feature_layers=(0, 1)), "topk:8,3,3"),
    "dspark": lambda: DSpark(tiny.dspark_head(target(), block_size=4, feature_layers=(0, 1)), "chain:3"),
    "medusa": lambda: Medusa(tiny.medusa_heads(target(), heads=2)),
    "ngram": lambda: NGram("chain:2"),
    "beside": lambda: Beside(Eagle3(head(), "topk:8,3,3"), NGram("chain:4"), "beside"),
    "replace": lambda: Beside(Eagle3(head(), "chain:3"), NGram("chain:4"), threshold=1),  # rates would never choose it
    "suffix": lambda: Suffix("chain:2"),
}


@cache
def one_device() -> Engine:
    return Engine(target(), **OPTIONS)


@cache
def expected() -> list[list[int]]:
    return tokens(one_device())


def tokens(engine: Engine, which: Sequence[int] = range(len(PROMPTS))) -> list[list[int]]:
    done = engine.generate([PROMPTS[i] for i in which], [PARAMS[i] for i in which])
    return [one.token_ids for one in done]


def exchanged_widths(engine: Engine, *, gathers_logits: bool) -> set[int]:
    """Return the last sizes of all arrays that the rounds of one kind gather from the devices."""
    compiled = engine.core.runner.programs.compiled.items()
    texts = [one.as_text() for key, one in compiled if key.kind == "round" and key.gathers_logits == gathers_logits]
    assert texts, "no such round is compiled"
    return {int(size) for text in texts for size in re.findall(r"= \w+\[[\d,]*?(\d+)\]\S* all-gather", text)}


DEFAULT = (("eagle3 tree", 2),)
LONG = (
    ("reduced eagle", 2),
    ("dspark", 2),
    ("draft model", 4),
    ("beside", 2),
    ("replace", 2),
)  # tokens of such drafters are compared below too


@pytest.mark.parametrize(
    ("drafter", "devices"),
    [
        pytest.param(drafter, devices, marks=cover.marks_of((drafter, devices), DEFAULT, LONG))
        for drafter in DRAFTERS
        for devices in (2, 4)
    ],
)
def test_engine_on_several_devices_emits_the_tokens_of_one_device(drafter: str, devices: int) -> None:
    """On four devices, each of the two key-value heads is on two of them.

    Requests that are greedy, or have a temperature alone, come first by themselves, then beside all others.
    """
    with Engine(target(), drafter=DRAFTERS[drafter](), tensor_parallel=devices, **OPTIONS) as engine:
        assert tokens(engine, PLAIN) == [expected()[i] for i in PLAIN]
        assert tokens(engine) == expected()
        if drafter in ("beside", "replace"):
            check_sources(engine.metrics)
            assert min(engine.metrics.num_draft_tokens_per_source.values()) > 20
        if devices == 2:  # on four devices, logits are as wide as hidden states
            assert not exchanged_widths(engine, gathers_logits=False) & WIDTHS
            assert 62 in exchanged_widths(engine, gathers_logits=True), "control"
        assert check_devices_equal(engine.core.runner.state) > 10
        assert engine.pages_in_use == 0


def drafts(drafter: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and scores of the drafts of all rounds."""
    options |= {"controls": False}  # which compiles sooner
    with Engine(target(), drafter=DRAFTERS[drafter](), **OPTIONS, **options) as engine:
        done = engine.generate(PROMPTS[:2], PARAMS[:2], trace=True)
    assert [one.token_ids for one in done] == expected()[:2]
    rounds = [one for each in done for one in each.raise_for_error().rounds or ()]
    return np.stack([one.tokens for one in rounds]), np.stack([one.scores for one in rounds])


@pytest.mark.parametrize(
    "drafter",
    [
        "dspark",
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in ("dflash", "dflash2", "reduced dflash", "eagle3 chain")
        ),
    ],
)
def test_drafts_on_several_devices_are_those_of_one_device(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts would change no token. In the negative control the heads of a block's keys are out of order."""
    one, two = drafts(drafter), drafts(drafter, tensor_parallel=2)
    assert np.array_equal(one[0], two[0]) and np.allclose(one[1], two[1], atol=1e-4)
    if drafter == "dspark":
        declared = Context.declared
        unordered = lambda self: {name: replace(spec, parts=()) for name, spec in declared(self).items()}  # noqa: E731
        monkeypatch.setattr(Context, "declared", unordered)
        broken = drafts(drafter, tensor_parallel=2)
        assert not (broken[1].shape == one[1].shape and np.allclose(broken[1], one[1], atol=1e-4))


def test_engine_on_a_mesh_of_other_devices_reports_the_log_probabilities_of_one_device() -> None:
    params = [replace(one, logprobs=2, prompt_logprobs=1) for one in PARAMS]
    devices = jax.devices()[2:]
    with Engine(target(), mesh=Mesh(np.array(devices), (AXIS,)), **OPTIONS) as engine:
        made = engine.generate(PROMPTS, params)
        mixed = engine.generate(PROMPTS, [params[0], *PARAMS[1:]])  # one row with log-probabilities
        arrays = jax.tree.leaves((engine.core.runner.state, engine.core.runner.params))
        assert {device for array in arrays for device in array.devices()} == set(devices)
    assert [one.token_ids for one in mixed] == expected()
    for one, other in zip(made, one_device().generate(PROMPTS, params), strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(scores(one), scores(other), atol=1e-4)


def scores(completion: Completion) -> list[float]:
    """Return the log-probabilities of a completion's prompt, after its first token, and of its tokens."""
    assert completion.logprobs is not None and completion.prompt_logprobs is not None
    return [one.logprob for one in (*completion.prompt_logprobs[1:], *completion.logprobs) if one is not None]


@pytest.fixture(scope="module")
def eagle() -> Engine:
    """An engine with an EAGLE-1 head on four devices; its state has the target's hidden states as each device sums."""
    return Engine(target(), drafter=DRAFTERS["eagle"](), tensor_parallel=4, **{**OPTIONS, "max_len": 320})


def test_devices_hold_equal_bits_after_200_rounds(eagle: Engine) -> None:
    assert tokens(eagle) == expected()
    params = [SamplingParams(max_tokens=290, temperature=temperature, seed=5) for temperature in (0.0, 1.0)]
    before = eagle.metrics.num_rounds_per_depth[2]
    eagle.generate(PROMPTS[:2], params)
    assert eagle.metrics.num_rounds_per_depth[2] >= before + 2 * 200
    assert check_devices_equal(eagle.core.runner.state) > 10


def test_device_that_sums_in_another_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the second device adds up the parts of the four devices from the last to the first."""

    def join(shard: Shard, parts: Array, dtype: Any, *, deterministic: bool = False) -> Array:
        parts = jax.lax.all_gather(parts, AXIS, tiled=True)
        return jnp.where(jax.lax.axis_index(AXIS) == 1, parts[::-1], parts)

    monkeypatch.setattr(Shard, "join", join)
    jax.clear_caches()  # products that are traced already have the right order
    try:
        drafter = Eagle(tiny.eagle1_head(llama()), "chain:2")
        with Engine(llama(), drafter=drafter, tensor_parallel=4, **LLAMA_OPTIONS) as engine:
            engine.generate(PROMPTS[:4], PARAMS[:4])
            with pytest.raises(AssertionError, match="differs between devices"):
                check_devices_equal(engine.core.runner.state)
    finally:
        jax.clear_caches()


# By their experts, and by two query heads.
UNDIVIDED = tuple((family, 4) for family in ("deepseek_v2", "deepseek_v3", "mistral4", "laguna", "gemma4_e2b"))
MISSING = {
    "llama4_text": (1, 1),
    "laguna": (1, 0),
    **dict.fromkeys(("glm4_moe_lite", "minimax_m2"), (0, 2)),
}
FAMILIES_BY_DEFAULT = tuple((family, 2) for family in ("gpt_oss", "deepseek_v3", "gemma4_e2b"))
LONG_FAMILIES = (
    ("gemma4_text", 2),
    ("glm4_moe", 2),
    ("llama4_text", 2),
    ("deepseek_v2", 2),
    ("mistral4", 2),
    ("minimax_m2", 2),
    ("muse_glimmer", 2),
    ("laguna", 2),
)


def with_more_experts(folder: Path, out: Path, more: int) -> Path:
    """Write a copy of a target with more experts, which the router scores as the last one and never takes.

    Of equal scores the first is taken, if a row takes one, and one with a smaller correction after the others.
    """
    fields, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    key = next(key for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in fields)
    count = fields[key]
    for name, values in list(tensors.items()):
        if re.search(r"router|(mlp|block_sparse_moe)\.gate\.weight", name):
            tensors[name] = np.concatenate([values, *[values[-1:]] * more])
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = np.append(values, [values[-1] - 100] * more).astype(values.dtype)
        elif (last := f".experts.{count - 1}.") in name:
            others = [name.replace(last, f".experts.{count + index}.") for index in range(more)]
            tensors |= dict.fromkeys(others, np.full_like(values, 0.5))
        elif ".experts." in name and values.ndim == 3:
            tensors[name] = np.concatenate([values, *[np.full_like(values[-1:], 0.5)] * more])
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**fields, key: count + more}))
    return out


@pytest.mark.parametrize(
    ("family", "devices"),
    [
        pytest.param(family, devices, marks=cover.marks_of((family, devices), FAMILIES_BY_DEFAULT, LONG_FAMILIES))
        for family in FAMILIES
        for devices in (2, 4)
        if (family, devices) not in UNDIVIDED
    ],
)
def test_family_on_several_devices_emits_the_greedy_tokens_of_transformers(
    family: str, devices: int, golden: Path, tmp_path: Path
) -> None:
    """Gemma's output head is its embedding, and OLMo norms all heads together; the last prompt has cached pages."""
    folder = golden / "families" / family
    data = recording(folder / "expect.npz")
    prompts, wanted = ([data[f"{name}{i}"].tolist() for i in range(3)] for name in ("prompt", "greedy"))
    own: dict[str, Any] = dict(slots=3, max_len=176, buckets=(3,), prefill_buckets=(32,), page_size=8)
    more = MISSING.get(family, (0, 0))[devices == 4]
    folder = with_more_experts(folder, tmp_path, more) if more else folder
    with Engine.from_pretrained(folder, dtype="float32", tensor_parallel=devices, eos_ids=(), **own) as engine:
        for time in range(2):
            done = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0))
            assert [one.token_ids for one in done] == wanted
            assert time == 0 or done[2].metrics.num_cached_tokens >= 64


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 4])
def test_experts_with_norms_of_their_own_give_the_same_tokens_on_several_devices(
    devices: int, golden: Path, tmp_path: Path
) -> None:
    """The recorded target has five experts; here it has four. A device has some experts, and some channels beside."""
    folder = golden / "families" / "gemma4_26b_a4b"
    fields, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    cut = {name: values[:4] if len(values) == 5 else values for name, values in tensors.items()}
    folders.write(tmp_path, {**fields, "num_experts": 4}, cut)
    prompts, found = [recording(folder / "expect.npz")[f"prompt{i}"].tolist() for i in range(3)], []
    own: dict[str, Any] = dict(slots=3, max_len=160, buckets=(3,), prefill_buckets=(32,), page_size=8)
    for count in (1, devices):
        with Engine.from_pretrained(tmp_path, dtype="float32", tensor_parallel=count, eos_ids=(), **own) as engine:
            done = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0))
            found.append([one.raise_for_error().token_ids for one in done])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "kind",
    [
        "int4",
        pytest.param("int8", marks=pytest.mark.long),
        *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("fp8", "fp8_dynamic")),
    ],
)
def test_quantised_engine_on_four_devices_emits_with_a_draft_the_tokens_without_one(kind: str) -> None:
    """With fp8_dynamic, inputs have scales for each device's columns, so tokens may differ from one device's."""
    devices = 4 if kind == "fp8_dynamic" else 1
    drafter = Eagle3(quantize_weights(tiny.eagle_head(llama(), draft_vocab=31, feature_layers=(0, 1)), kind), "chain:2")
    plain = Engine(llama(), quantize=kind, tensor_parallel=devices, **LLAMA_OPTIONS)
    drafted = Engine(llama(), drafter=drafter, quantize=kind, tensor_parallel=4, **LLAMA_OPTIONS)
    one, two = (engine.generate(PROMPTS[:4], PARAMS[:4]) for engine in (plain, drafted))
    assert [done.token_ids for done in two] == [done.token_ids for done in one]


def test_deterministic_engine_on_two_devices_has_equal_bits_with_any_drafter_and_bucket() -> None:
    options: dict[str, Any] = {**LLAMA_OPTIONS, "deterministic": True, "tensor_parallel": 2, "prefill_buckets": (32,)}
    other = {**options, "prefill_buckets": (16,), "page_size": 4}
    both = (
        Engine(llama(), **options),
        Engine(llama(), drafter=DraftModel(small_model(), "chain:2"), **other),
    )
    params = [SamplingParams(max_tokens=12, temperature=index % 2, seed=index, logprobs=1) for index in range(6)]
    plain, drafted = (engine.generate(PROMPTS, params) for engine in both)
    for one, two in zip(plain, drafted, strict=True):
        assert one.token_ids == two.token_ids
        assert [a.logprob for a in one.logprobs or []] == [b.logprob for b in two.logprobs or []]
    divided = both[1].generate(PROMPTS, [replace(one, logprobs=None) for one in params])
    assert [one.token_ids for one in divided] == [one.token_ids for one in plain]


GATHERS: tuple[tuple[dict[str, Any], bool], ...] = (
    (dict(temperature=0.0), False),
    (dict(temperature=0.7, seed=3), False),
    (dict(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1), False),  # which greedy decoding ignores
    (dict(temperature=0.7, stop=["x"], max_tokens=3, n=2), False),
    (dict(temperature=0.7, top_k=5), True),
    (dict(temperature=0.7, top_p=0.9), True),
    (dict(temperature=0.7, min_p=0.1), True),
    (dict(temperature=0.0, presence_penalty=0.1), True),
    (dict(temperature=0.0, min_tokens=3), True),
    (dict(temperature=0.0, regex="a"), True),
    (dict(temperature=0.0, logprobs=0), True),
)


@pytest.mark.parametrize(("fields", "gathers"), GATHERS)
def test_rounds_gather_logits_for_requests_that_cut_edit_or_report_them(
    eagle: Engine, fields: dict[str, Any], gathers: bool
) -> None:
    params = SamplingParams(**fields)
    assert eagle.input_processor.gathers_logits(params) is gathers
    assert not one_device().input_processor.gathers_logits(params)
    assert gathering(eagle.config, edits_all=True)(params)
    assert gathering(replace(eagle.config, accept="rejection"), edits_all=False)(params) is (
        gathers or params.temperature > 0
    )


RULES = [rule for rule in ACCEPT_RULES if rule not in ("coupled", "rejection")]


@pytest.mark.filterwarnings("ignore:accept=.typical.")
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param("rejection", marks=pytest.mark.long),
        *(pytest.param(rule, marks=pytest.mark.matrix) for rule in RULES),
    ],
)
def test_rule_that_compares_probabilities_emits_on_two_devices_the_tokens_of_one(rule: str) -> None:
    """Its rounds gather logits only if a request is sampled."""
    options: dict[str, Any] = {**LLAMA_OPTIONS, "accept": rule}
    made = []
    for devices in (1, 2):
        drafter = DraftModel(small_model(), "chain:2")
        with Engine(llama(), drafter=drafter, tensor_parallel=devices, **options) as engine:
            made.append([tokens(engine, which) for which in ((0, 5), (0, 1, 2))])
    assert made[0] == made[1] and made[0][0] == tokens(Engine(llama(), **LLAMA_OPTIONS), (0, 5))
    assert 62 not in exchanged_widths(engine, gathers_logits=False)
    assert 62 in exchanged_widths(engine, gathers_logits=True), "control"


def test_nan_in_the_logits_of_one_device_ends_the_request_with_an_error() -> None:
    """After the first token, the last row of the output head, which is on the second device, becomes NaN."""
    with Engine(tiny.model(VOCAB, layers=1, hidden=64), tensor_parallel=2, **LLAMA_OPTIONS) as engine:
        stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=40, temperature=1.0, seed=1))
        assert next(stream).token_ids
        side = engine.core.runner.target_side
        head = side.params.target.head
        broken = jax.device_put(head.at[VOCAB - 1].set(jnp.nan), head.sharding)
        side.params = replace(side.params, target=replace(side.params.target, head=broken))
        with pytest.raises(FloatingPointError, match="got NaN"):
            list(stream)
        assert not exchanged_widths(engine, gathers_logits=False) & WIDTHS
        check_devices_equal(side.state)


@pytest.mark.long
def test_preemption_and_prefix_hits_with_pages_of_one_row_change_no_token() -> None:
    """The pages do not suffice for six requests, so some are preempted; later the last prompt has cached pages."""
    own: dict[str, Any] = dict(page_size=1, pages=64, tensor_parallel=2)
    with Engine(target(), drafter=NGram("chain:2"), **{**OPTIONS, **own}) as engine:
        assert tokens(engine) == expected()
        assert engine.metrics.num_preemptions > 0
        for _ in range(2):
            (again,) = engine.generate(PROMPTS[2], PARAMS[2])
            assert again.token_ids == expected()[2]
        assert again.metrics.num_cached_tokens == len(PROMPTS[2]) - 1
        engine.scheduler.pages.check()


@pytest.mark.long
def test_grammar_that_the_host_follows_gives_the_tokens_of_one_device() -> None:
    """Such a round is two programs, and the masks between them go to every device; a regex has a table there."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    asked = [
        SamplingParams(max_tokens=16, temperature=0.7, seed=1, json_schema=schema),
        SamplingParams(max_tokens=16, temperature=0.7, seed=2, regex="(ab|1){4}"),
    ]
    made = []
    for devices in (1, 2):
        engine = Engine(
            engines.target(),
            drafter=NGram("chain:2"),
            slots=2,
            max_len=engines.MAX_LEN,
            buckets=(2,),
            prefill_buckets=(16,),
            tokenizer=lettered.Lettered(lettered.JSON_TEXTS[: engines.VOCAB]),
            eos_ids=(lettered.END,),
            tensor_parallel=devices,
        )
        made.append([one.raise_for_error().token_ids for one in engine.generate(["{", "ab"], asked)])
    assert made[0] == made[1]


def test_memory_plan_counts_the_arrays_of_one_device(eagle: Engine) -> None:
    """The weights are those of the plan's device, and a device of four has one of the two key-value heads."""
    plan, runner = eagle.memory_plan, eagle.core.runner

    def held(tree: Any) -> int:
        leaves = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves.values())

    assert plan.target_weights == held(runner.params.target)
    assert plan.target_weights + plan.draft_weights == held(runner.params)
    assert plan.target_pool == held(runner.state.target)
    assert plan.state == held(runner.state)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(target()))
    assert plan.target_weights < 0.5 * whole  # the embedding and the norms are on each device
    pools = [pool.k for pool in runner.state.target]
    assert all(pool.shape[1] == 4 and pool.addressable_shards[0].data.shape[1] == 1 for pool in pools)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(tensor_parallel=8), "tensor_parallel: expected at most 4, the number of cpu devices, got 8"),
    (dict(tensor_parallel=3), "tensor_parallel: expected a divisor of 4, the model's num_attention_heads, got 3"),
    (dict(tensor_parallel=0), "tensor_parallel: expected an int from 1"),
    (dict(tensor_parallel="2"), "tensor_parallel: expected an int from 1"),
    (dict(mesh=2), "mesh: expected None or a jax.sharding.Mesh of one axis named .model., got 2"),
)


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_engine_refuses_impossible_devices(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(target(), **OPTIONS, **options)


def test_engine_refuses_a_mesh_of_other_axes_or_of_another_size() -> None:
    devices = np.array(jax.devices())
    with pytest.raises(ValueError, match=r"mesh: expected None or a jax\.sharding\.Mesh of one axis"):
        Engine(target(), mesh=Mesh(devices[:2], ("x",)))
    with pytest.raises(ValueError, match=r"mesh: expected None or a jax\.sharding\.Mesh of one axis"):
        Engine(target(), mesh=Mesh(devices.reshape(2, 2), (AXIS, "data")))
    with pytest.raises(ValueError, match="tensor_parallel: expected 2, the number of devices of the mesh, got 4"):
        Engine(target(), mesh=Mesh(devices[:2], (AXIS,)), tensor_parallel=4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(num_heads=6, num_kv_heads=2), "a divisor of 6, the model's num_attention_heads"),
        (dict(num_heads=12, num_kv_heads=3), "a divisor or a multiple of 3, the model's num_key_value_heads"),
        (dict(intermediate_size=90), "a divisor of 90, the model's intermediate_size"),
    ],
)
def test_engine_refuses_sizes_that_four_devices_cannot_divide(changes: dict[str, int], expected: str) -> None:
    config = tiny.config(VOCAB).resized(**changes)
    with pytest.raises(ValueError, match=f"tensor_parallel: expected {expected}, got 4"):
        Engine(tiny.random_model(config), tensor_parallel=4)


def test_engine_refuses_a_number_of_experts_that_the_devices_cannot_divide(golden: Path) -> None:
    mixtral = tiny.load_target(golden / "families" / "mixtral")
    layers = [replace(layer, mlp=replace(layer.mlp, router=Router(5, 2))) for layer in mixtral.config.layers]
    config = replace(mixtral.config, layers=tuple(layers))
    with pytest.raises(ValueError, match="expected a divisor of 5, the model's num_experts, got 2"):
        Engine(tiny.random_model(config), tensor_parallel=2)
