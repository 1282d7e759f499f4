"""Test that a round of an 8B model on an H200 is one CUDA graph with nothing outside, which copies no pool."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache, partial

import jax
import pytest

from jspec import Beside, Eagle3, NGram, Tree
from jspec.core.config import EngineConfig
from jspec.core.prefill_input import PrefillInput
from jspec.draft.dflash_head import DFlashHead
from jspec.draft.gemma4_assistant_head import AssistantHead, assistant_params
from jspec.models.families import read_config
from jspec.models.mlps.mlp_config import Experts
from jspec.models.weights.params import random_weights
from jspec.models.weights.quantize import quantize_weights
from jspec.step.decode import spec_step
from jspec.step.memory import DeviceMemory, MemoryPlanner
from jspec.step.prefill import prefill_step
from jspec.step.program import init_state
from jspec.tools.bench import random_models as shapes
from jspec.tools.bench import step as rounds
from tests.support.h200 import H200Program, compile_for_h200

SHAPE = "llama3-8b"


def windowed_dflash(shape: str, dtype: str) -> DFlashHead:
    """Return a DFlash head with windows in four of five layers, two of which are causal within the block."""
    head = shapes.random_head(shape, dtype, method="dflash")
    layers = [
        replace(layer, mixer=replace(layer.attention, window=2048, causal=index < 2))
        for index, layer in enumerate(head.config.layers[:4])
    ]
    return head.replace(config=replace(head.config, layers=(*layers, head.config.layers[4])))


def clustered_assistant(shape: str, dtype: str) -> AssistantHead:
    """Return an assistant of the size of those of E2B and E4B, with an output head of clusters."""
    config = shapes.head_config(shape, "gemma4_assistant")
    config = replace(config, hidden_size=256, clusters=2048, top_clusters=32)
    return AssistantHead.from_weights(config, random_weights(assistant_params(config), dtype, 1))


HEADS = {name: partial(shapes.random_head, method=name) for name in rounds.DRAFTERS} | {
    "dflash windows": windowed_dflash,
    "assistant clusters": clustered_assistant,
}


@lru_cache(maxsize=4)  # with -m matrix two tests use the same chain
def compile_round(
    tree: Tree | None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
    *,
    prefix_cache: bool = False,
    controls: bool = False,
    deterministic: bool = False,
    batch: int = 1,
    depth: int | None = None,
    nodes: int | None = None,
    method: str = "eagle3",
    shape: str = SHAPE,
    layers: int | None = None,
    adapters: int = 0,
) -> tuple[H200Program, int]:
    """Compile a round whose tree is cut at ``depth``; return the program and the state's size in bytes."""
    target = jax.eval_shape(partial(shapes.random_target, shape, "bfloat16"))
    head = jax.eval_shape(partial(HEADS[method], shape, "bfloat16"))
    config = replace(target.config, layers=target.config.layers[:layers])
    target = target.replace(layers=target.layers[:layers], config=config)
    if quantize is not None:
        target, head = (jax.eval_shape(partial(quantize_weights, kind=quantize), model) for model in (target, head))
    case = rounds.StepCase(
        shape,
        batch=batch,
        context=1024,
        tree=tree,
        quantize=quantize,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
        adapters=adapters,
    )
    program, params, pool = rounds.build(case, target, head)
    pool, program = replace(pool, prefix_cache=prefix_cache), replace(program, controls=controls)
    state = jax.eval_shape(lambda p: init_state(program, p, pool), params)
    program = replace(program, nodes=nodes)
    if depth is not None:
        program = replace(program, drafter=program.drafter.cut(depth))
    slots = jax.ShapeDtypeStruct((batch,), "int32")
    options = program.compiler_options
    compiled = compile_for_h200(partial(spec_step, program), params, state, slots, donate_argnums=1, options=options)
    return compiled, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def check(program: H200Program, state_bytes: int, *, launches: int, temp_mib: int) -> H200Program:
    """Check that a program is one CUDA graph that updates the state in place, copies no pool and has few launches."""
    print(len(program.launches), "launches,", program.temp_bytes >> 20, "MiB")
    assert len(program.graphs) == 1
    assert not program.outside_graphs
    assert program.alias_bytes == state_bytes
    assert not program.copies(1 << 20)
    assert program.temp_bytes < temp_mib << 20
    assert len(program.launches) < launches
    return program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "launches", "temp_mib"),
    [pytest.param(None, 310, 12, marks=pytest.mark.long), (Tree.chain(4), 375, 12), (Tree.topk(60, 8, 10), 485, 72)],
    ids=str,
)
def test_h200_round_of_each_drafter_is_one_cuda_graph_that_updates_in_place(
    tree: Tree | None, launches: int, temp_mib: int
) -> None:
    """Temporary memory holds logits (30 MB for 60 nodes) and partial sums; a copied pool would add 70 MB."""
    program = check(*compile_round(tree), launches=launches, temp_mib=temp_mib)
    assert not [launch for launch in program.launches if launch.kind == "kConditional"], "each takes 13 us"
    has_few_rows = tree != Tree.topk(60, 8, 10)
    drafted = (
        tree.depth if tree == Tree.chain(4) else 0
    )  # number of drafted tokens; all but the last are fed to the head
    assert program.count("append_attention") == 32 * has_few_rows + max(drafted - 1, 0)
    assert program.count("paged_attention") >= 32 * (1 if has_few_rows else 2)
    assert program.count("sample_tokens") == 2 * (1 + drafted)
    if jax.__version_info__ >= (0, 11):  # of 60 nodes, and of the 10 that each level feeds to the head
        assert program.count("gated_matmul") == (32 + 7 if tree == Tree.topk(60, 8, 10) else 0)


@pytest.mark.parametrize(
    ("tree", "launches", "temp_mib"),
    [(None, 138, 12), pytest.param(Tree.chain(4), 215, 60, marks=pytest.mark.long), (Tree.topk(32, 4, 4), 248, 360)],
    ids=str,
)
def test_h200_round_of_a_hybrid_reads_and_folds_states_in_place(
    tree: Tree | None, launches: int, temp_mib: int
) -> None:
    """Three of four layers have states; a kernel reads them in each round, another folds in one conditional.

    The tree's temporary memory holds 254 MiB of logits. Before kernels made tables and moved rows it had 380 launches.
    """
    program = check(*compile_round(tree, batch=8, shape="qwen3.8-27b", layers=8), launches=launches, temp_mib=temp_mib)
    assert sum(launch.kind == "kConditional" for launch in program.launches) == 1
    mosaic = [launch for launch in program.launches if launch.kind == "kCustomCall"]
    assert len(mosaic) >= 6 * 3


@pytest.mark.parametrize(
    ("tree", "launches", "temp_mib"),
    [(None, 115, 12), pytest.param(Tree.chain(4), 210, 60, marks=pytest.mark.long), (Tree.topk(32, 4, 4), 240, 200)],
    ids=str,
)
def test_h200_round_of_mamba_reads_and_folds_states_in_place(tree: Tree | None, launches: int, temp_mib: int) -> None:
    """The first 8 layers of Nemotron 3 Nano: four Mamba 2 mixers, attention and three mixtures of experts."""
    compiled = compile_round(tree, batch=8, shape="nemotron3-nano", layers=8)
    program = check(*compiled, launches=launches, temp_mib=temp_mib)
    assert sum(launch.kind == "kConditional" for launch in program.launches) == 1


def float_sums(program: H200Program) -> int:
    """Count what XLA's own kernels sum up in floating point to verify a draft; matrix products are sums."""
    pattern = r' = (?:f32|bf16)\S* (?:reduce|dot)\(.*op_name="[^"]*/verify/'
    return len(re.findall(pattern, program.compiled.as_text() or ""))


@pytest.mark.parametrize(
    ("tree", "launches", "temp_mib"),
    [(None, 240, 12), pytest.param(Tree.chain(4), 310, 60, marks=pytest.mark.long)],
    ids=str,
)
def test_h200_deterministic_round_of_a_hybrid_sums_in_no_kernel_of_xla(
    tree: Tree | None, launches: int, temp_mib: int
) -> None:
    """How XLA divides a sum depends on the number of rows."""
    run = partial(compile_round, tree, batch=8, shape="qwen3.8-27b", layers=8)
    program = check(*run(deterministic=True), launches=launches, temp_mib=temp_mib)
    assert program.count("deterministic_matmul") == 8 * 4 + 6 + 1  # and gates in six layers, and the output head
    assert sum(launch.kind == "kCustomCall" for launch in program.launches) >= 6 * 2
    assert float_sums(program) == 0
    assert float_sums(run()[0]) > 0, "control"


@pytest.mark.long
def test_h200_round_of_a_dflash_head_has_fewer_launches_than_an_eagle3_chain_of_equal_length() -> None:
    """A block of 8 takes one pass of 5 layers, an EAGLE-3 chain of 7 takes 7 passes of one layer."""
    tree = Tree.chain(7)
    block = check(*compile_round(tree, method="dflash"), launches=335, temp_mib=12)
    chain, _ = compile_round(tree)
    assert len(block.launches) < len(chain.launches)
    assert block.count("append_attention") == 32 + 5
    assert block.count("sample_tokens") == 2 + 2


@pytest.mark.long
def test_h200_round_of_a_peagle_head_has_fewer_launches_than_an_eagle3_chain_of_equal_length() -> None:
    """All pairs take one pass of 4 layers, an EAGLE-3 chain of 7 takes 7 passes of one layer."""
    tree = Tree.chain(7)
    block = check(*compile_round(tree, method="peagle"), launches=390, temp_mib=12)
    chain, _ = compile_round(tree)
    assert len(block.launches) < len(chain.launches)
    assert block.count("sample_tokens") == 2 + 2


@pytest.mark.long
@pytest.mark.parametrize(("tree", "launches", "temp_mib"), [(Tree.chain(7), 405, 12), (Tree.topk(48, 7, 10), 475, 60)])
def test_h200_round_of_a_dflash2_head_is_one_cuda_graph(tree: Tree, launches: int, temp_mib: int) -> None:
    check(*compile_round(tree, method="dflash2"), launches=launches, temp_mib=temp_mib)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "tree", "launches", "temp_mib"),
    [
        ("gemma4_assistant", Tree.chain(4), 345, 10),
        ("gemma4_assistant", Tree.topk(60, 8, 10), 620, 76),
        ("assistant clusters", Tree.topk(60, 8, 10), 640, 136),
    ],
    ids=str,
)
def test_h200_round_of_an_assistant_is_one_cuda_graph_that_copies_no_pool_of_the_target(
    method: str, tree: Tree, launches: int, temp_mib: int
) -> None:
    """The target has six layers; a pool of one with a window has 8 MB."""
    program = check(
        *compile_round(tree, method=method, shape="gemma4-26b-a4b", layers=6), launches=launches, temp_mib=temp_mib
    )
    attended = program.count("paged_attention") + program.count("append_attention")
    assert attended >= 6 + 2 * 4 * tree.depth, "each of the assistant's four layers attends and merges"


@pytest.mark.long
def test_h200_round_of_a_tree_over_a_block_is_one_cuda_graph_that_updates_in_place() -> None:
    check(*compile_round(Tree.topk(48, 7, 10), method="dflash"), launches=376, temp_mib=40)


@pytest.mark.long
def test_h200_round_of_a_dspark_head_corrects_a_block_within_one_cuda_graph() -> None:
    """A block of 7 takes one pass, and each of its 7 tokens a product with the Markov head and a sample."""
    tree = Tree.chain(7)
    corrected = check(*compile_round(tree, method="dspark"), launches=375, temp_mib=12)
    chain, _ = compile_round(tree)
    assert len(corrected.launches) < len(chain.launches)
    assert corrected.count("append_attention") == 32 + 5
    assert corrected.count("sample_tokens") == 2 * (1 + 7)


@pytest.mark.long
def test_h200_round_of_a_tree_over_a_corrected_block_is_one_cuda_graph_that_updates_in_place() -> None:
    check(*compile_round(Tree.topk(48, 7, 10), method="dspark"), launches=423, temp_mib=40)


@pytest.mark.parametrize(
    ("tree", "batch", "more"),
    [(None, 1, 4), *(pytest.param(Tree.chain(4), *case, marks=pytest.mark.long) for case in ((1, 4), (8, 8), (32, 8)))],
    ids=str,
)
def test_h200_round_with_adapters_has_few_launches_more_in_a_layer(tree: Tree | None, batch: int, more: int) -> None:
    """Each of the four products has a kernel that adds adapters; of more than 16 rows others multiply by A.

    Before there were kernels, a layer had 18 launches more. A few launches of a round find the tables that rows chose.
    """
    plain, _ = compile_round(tree, batch=batch, layers=8)
    adapted = check(*compile_round(tree, batch=batch, layers=8, adapters=8), launches=215, temp_mib=130)
    names = ("low_rank_sum", "split_matmul_low_rank", "low_rank_inner")
    assert [adapted.count(name) for name in names] == [8 * 4, *((8 * 3, 8) if more == 4 else (0, 8 * 4))]
    assert len(adapted.launches) - len(plain.launches) <= 8 * more + 5


@pytest.mark.long
def test_h200_round_with_a_budget_is_one_cuda_graph_that_packs_rows_once_a_layer() -> None:
    """A layer has two launches more, which unpack the rows before its attention and pack them after it."""
    whole, _ = compile_round(Tree.chain(4), batch=32)
    packed = check(*compile_round(Tree.chain(4), batch=32, nodes=2), launches=400, temp_mib=130)
    assert len(packed.launches) <= len(whole.launches) + 3 * 32


@pytest.mark.matrix
def test_h200_round_of_a_dflash_head_with_windows_has_the_launches_of_one_without() -> None:
    block = check(*compile_round(Tree.chain(7), method="dflash windows"), launches=335, temp_mib=12)
    assert len(block.launches) == len(compile_round(Tree.chain(7), method="dflash")[0].launches)


@pytest.mark.matrix
def test_h200_round_of_draft_depth_0_runs_no_draft_attention() -> None:
    """The round still writes the draft cache rows of newly accepted tokens."""
    program = check(*compile_round(Tree.chain(4), depth=0), launches=320, temp_mib=12)
    assert program.count("append_attention") == 32 and program.count("rotate_append") == 1
    assert program.count("paged_attention") == 32  # merges


@pytest.mark.matrix
def test_h200_round_with_prefix_cache_adds_at_most_four_launches() -> None:
    """The round's graph also stores the feature at each page's end."""
    (plain, _), (kept, _) = compile_round(Tree.chain(4)), compile_round(Tree.chain(4), prefix_cache=True)
    assert len(kept.graphs) == 1
    assert not kept.outside_graphs
    assert not kept.copies(1 << 20)
    assert len(kept.launches) <= len(plain.launches) + 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("tree", "launches", "temp_mib"),
    [(Tree.chain(4), 395, 12), pytest.param(Tree.topk(60, 8, 10), 515, 96, marks=pytest.mark.matrix)],
    ids=str,
)
def test_h200_round_with_penalties_is_one_cuda_graph_that_updates_in_place(
    tree: Tree, launches: int, temp_mib: int
) -> None:
    """Token counts are updated in place; temporary memory also holds the edited and the scaled logits."""
    check(*compile_round(tree, controls=True), launches=launches, temp_mib=temp_mib)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tree", "batch", "launches", "temp_mib"),
    [
        pytest.param(None, 1, 345, 12, marks=pytest.mark.matrix),
        (Tree.chain(4), 32, 415, 200),
        pytest.param(Tree.topk(60, 8, 10), 1, 525, 112, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_h200_deterministic_round_is_one_cuda_graph_of_deterministic_kernels(
    tree: Tree | None, batch: int, launches: int, temp_mib: int
) -> None:
    """XLA's own kernels for products, norms and attention would depend on the number of rows."""
    compiled = compile_round(tree, deterministic=True, batch=batch)
    program = check(*compiled, launches=launches, temp_mib=temp_mib)
    assert program.count("deterministic_matmul") == 4 * 32 + 1
    assert program.count("paged_attention") >= 2 * 32
    assert program.count("add_rms_norm") >= 2 * 32 + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "launches"),
    [
        pytest.param("fp8", 410, marks=pytest.mark.matrix),
        pytest.param("fp8_dynamic", 412, marks=pytest.mark.long),
        pytest.param("int4", 375, marks=pytest.mark.long),
    ],
)
def test_h200_round_with_quantised_weights_and_float8_cache_reads_them_unconverted(
    quantize: str, launches: int
) -> None:
    """A weight converted to another type would take at least 34 MB of temporary memory."""
    program = check(*compile_round(Tree.chain(4), quantize, "float8_e4m3fn"), launches=launches, temp_mib=12)
    rounded = program.count("paged_attention_merge_and_round")  # in every layer, and in each of the draft's passes
    assert rounded == (32 + 4 if quantize == "fp8_dynamic" else 0)


@pytest.mark.long
def test_h200_round_of_160_rows_with_packed_weights_widens_no_weight_in_memory() -> None:
    program = check(*compile_round(Tree.chain(4), "int4", batch=32), launches=303, temp_mib=100)
    assert sum(launch.kind == "kCustomCall" for launch in program.launches) >= 4 * 32 + 1
    assert program.count("gemm") == 0


@pytest.mark.long
def test_h200_round_of_32_rows_with_fp8_has_no_separate_scaling_kernels() -> None:
    """A separate kernel that scales the logits would read and write 82 MB."""
    program, _ = compile_round(Tree.chain(4), "fp8_dynamic", "float8_e4m3fn", batch=32)
    lines = program.compiled.as_text().split("\nENTRY")[1].splitlines()
    logits = [line.split(" = ")[0] for line in lines if " = f32[32,5,128256]" in line or " = f32[160,128256]" in line]
    assert logits and not [name for name in logits if "multiply" in name or "convert" in name], logits
    assert program.count("rotate_append") >= 32
    assert len(program.launches) <= 418


# ---- mixtures of experts: some layers of Qwen3-30B-A3B


@pytest.mark.parametrize(
    ("tree", "layers", "batch", "launches", "temp_mib"),
    [
        (None, 4, 1, 58, 12),
        pytest.param(Tree.chain(4), 8, 1, 176, 12, marks=pytest.mark.long),
        pytest.param(Tree.chain(4), 8, 32, 230, 160, marks=pytest.mark.long),
        pytest.param(Tree.topk(60, 8, 10), 8, 1, 285, 100, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_h200_round_of_a_mixture_of_experts_is_one_cuda_graph_that_copies_no_weights(
    tree: Tree | None, layers: int, batch: int, launches: int, temp_mib: int
) -> None:
    """A layer has two kernels for its experts and one that chooses them; its experts' weights are 1.2 GB, 9 MB each."""
    compiled = compile_round(tree, batch=batch, shape="qwen3-30b-a3b", layers=layers)
    program = check(*compiled, launches=launches, temp_mib=temp_mib)
    assert (program.count("expert_matmul"), program.count("route")) == (2 * layers, layers)
    assert not [launch for launch in program.launches if launch.kind in ("kConditional", "kWhile", "kSort")]


@pytest.mark.parametrize(
    ("tree", "layers", "batch", "launches"),
    [
        (None, 4, 1, 71),
        pytest.param(Tree.chain(4), 8, 1, 207, marks=pytest.mark.long),
        pytest.param(Tree.chain(4), 8, 32, 282, marks=pytest.mark.long),
        pytest.param(Tree.topk(32, 6, 6), 8, 1, 278, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_h200_round_of_latent_attention_is_one_cuda_graph_that_copies_no_pool(
    tree: Tree | None, layers: int, batch: int, launches: int
) -> None:
    """DeepSeek-V2-Lite's first layers; XLA pads the down projection of the dense one, of 43 MB."""
    compiled = compile_round(tree, batch=batch, shape="deepseek-v2-lite", layers=layers)
    program = check(*compiled, launches=launches, temp_mib=180)
    assert [program.count(name) for name in ("append_latent", "head_products")] == [layers] * 2


FLASH: dict[str, Any] = dict(
    model_type="glm4_moe_lite", hidden_size=2048, intermediate_size=10240, num_hidden_layers=8, num_attention_heads=20
)
SMALL: dict[str, Any] = dict(
    model_type="mistral4", hidden_size=4096, intermediate_size=12288, num_hidden_layers=8, num_attention_heads=32
)


@pytest.mark.long
@pytest.mark.parametrize(("fields", "launches"), [(FLASH, 310), (SMALL, 310)], ids=["glm-4.7-flash", "mistral-small-4"])
@pytest.mark.parametrize("tree", [Tree.chain(4), Tree.topk(32, 6, 6)], ids=str)
def test_h200_round_of_latent_attention_of_other_sizes_is_one_cuda_graph_that_copies_no_pool(
    fields: dict[str, Any], launches: int, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, layers = fields["model_type"], fields["num_hidden_layers"]
    config = read_config({**fields, "vocab_size": 131072, "rms_norm_eps": 1e-5})
    monkeypatch.setitem(shapes.TARGETS, name, config)
    monkeypatch.setitem(shapes.DRAFT_VOCAB, name, 32000)
    program = check(*compile_round(tree, shape=name), launches=launches, temp_mib=180)
    assert [program.count(kernel) for kernel in ("append_latent", "head_products")] == [layers] * 2
    assert program.count("expert_matmul") == 2 * sum(isinstance(mlp, Experts) for mlp in config.mlps)


CHUNKS: dict[str, Any] = dict(
    model_type="llama4_text", hidden_size=5120, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=40
)  # as Llama 4 Scout, whose layers have chunks and experts with weighted inputs
TWO_SIZES: dict[str, Any] = dict(
    model_type="gemma4_text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=12, num_attention_heads=32,
    num_key_value_heads=16, head_dim=256, num_global_key_value_heads=4, attention_k_eq_v=True,
    hidden_size_per_layer_input=0, sliding_window=1024,
)  # pools of two shapes  # fmt: skip

GATES: dict[str, Any] = dict(
    model_type="muse_glimmer_text", hidden_size=6656, intermediate_size=19968, num_hidden_layers=8,
    num_attention_heads=32,
)  # gates of channels, and a normed embedding  # fmt: skip
HEAD_GATES: dict[str, Any] = dict(
    model_type="laguna", hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=48,
    num_attention_heads_per_layer=[48, 64, 64, 64] * 2,
    layer_types=["full_attention", *["sliding_attention"] * 3] * 2,
)  # fmt: skip
GEMMA4: dict[str, Any] = dict(model_type="gemma4_text", head_dim=256, final_logit_softcapping=30.0)
EMBEDDED: dict[str, Any] = GEMMA4 | dict(
    hidden_size=1536, intermediate_size=6144, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=1,
    num_kv_shared_layers=6, use_double_wide_mlp=True, sliding_window=512, vocab_size_per_layer_input=200064,
)  # a third of Gemma 4 E2B: six layers read the pools of others, and a table of 1.2 GB embeds tokens  # fmt: skip
BESIDE: dict[str, Any] = GEMMA4 | dict(
    hidden_size=2816, intermediate_size=2112, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
    num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0, enable_moe_block=True,
    num_experts=128, top_k_experts=8, moe_intermediate_size=704, sliding_window=1024,
)  # a quarter of Gemma 4 26B-A4B: experts beside a dense path  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "launches", "moves"),
    [
        pytest.param(CHUNKS, 300, 1, id="chunks", marks=pytest.mark.long),
        pytest.param(TWO_SIZES, 270, 3, id="two", marks=pytest.mark.long),
        pytest.param(EMBEDDED, 330, 2, id="embedded"),
        pytest.param(BESIDE, 305, 2, id="beside", marks=pytest.mark.long),
        pytest.param(GATES, 300, 1, id="gates", marks=pytest.mark.long),
        pytest.param(HEAD_GATES, 300, 1, id="head gates", marks=pytest.mark.long),
    ],
)
def test_h200_round_of_a_tree_with_other_layers_is_one_cuda_graph_that_copies_no_pool(
    fields: dict[str, Any], launches: int, moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fields["model_type"]
    config = read_config({**fields, "vocab_size": 200064, "rms_norm_eps": 1e-5})
    monkeypatch.setitem(shapes.TARGETS, name, config)
    monkeypatch.setitem(shapes.DRAFT_VOCAB, name, 32000)
    program = check(*compile_round.__wrapped__(Tree.topk(32, 6, 6), shape=name), launches=launches, temp_mib=48)
    assert program.count("move_rows") == moves
    assert program.count("rotate_queries") == fields.get("num_kv_shared_layers", 0)


@pytest.mark.long
def test_h200_prefill_of_a_mixture_of_experts_sorts_nothing_and_fits_into_the_planned_memory() -> None:
    """The rows of 2048 tokens are counted, not sorted; the plan's estimate of temporary memory holds."""
    target = jax.eval_shape(partial(shapes.random_target, "qwen3-30b-a3b", "bfloat16"))
    config = replace(target.config, layers=target.config.layers[:2])
    target = target.replace(layers=target.layers[:2], config=config)
    case = rounds.StepCase("qwen3-30b-a3b", batch=8, context=1024, tree=None)
    program, params, pool = rounds.build(case, target, None)
    program = replace(program, controls=False)
    state = jax.eval_shape(lambda p: init_state(program, p, pool), params)
    packed = PrefillInput.shapes(2048, slots=8, pages=state.page_table.shape[1])
    run, options = partial(prefill_step, program), program.compiler_options
    compiled = compile_for_h200(run, params, state, packed, donate_argnums=1, options=options)
    assert compiled.count("expert_matmul") == 2 * 2
    assert not [launch for launch in compiled.launches if "sort" in (launch.kind + launch.name).lower()]
    assert not compiled.copies(1 << 20)
    engine = EngineConfig(slots=8, max_len=1200, buckets=(8,), prefill_buckets=(2048,))
    planned = MemoryPlanner(program, params, engine, DeviceMemory(2**40, 0, True)).plan(pool).workspace
    assert compiled.temp_bytes < planned < 5 * compiled.temp_bytes


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("tree", "join", "launches", "temp_mib"),
    [
        (Tree.chain(4), "replace", 400, 12),
        (Tree.chain(4), "beside", 415, 12),
        (Tree.topk(60, 8, 10), "beside", 515, 72),
    ],
    ids=str,
)
def test_h200_round_of_a_look_up_beside_a_head_is_one_cuda_graph_that_updates_in_place(
    tree: Tree, join: str, launches: int, temp_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up takes about 15 launches, and what is learned of it 5; a chain becomes a tree by joining."""
    monkeypatch.setitem(
        rounds.DRAFTERS, "eagle3", lambda head, tree: Beside(Eagle3(head, tree), NGram("chain:4"), join)
    )
    check(*compile_round.__wrapped__(tree), launches=launches, temp_mib=temp_mib)
