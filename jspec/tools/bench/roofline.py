"""The least time of a decoding step: the sum over its kernels of the larger of bytes / bandwidth and flops / rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import jax

from jspec.core.tree import Tree
from jspec.draft.gemma4_assistant_head import AssistantConfig
from jspec.draft.head_config import DFlashConfig, DSparkConfig, HeadConfig, PEagleConfig
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.layer_config import LayerConfig
from jspec.models.mixers.mixer import Mixer
from jspec.models.mlps.mlp_config import Experts
from jspec.models.weights.params import layer_params


@dataclass(frozen=True)
class Chip:
    """The highest memory and arithmetic rates that were measured on a kind of device."""

    name: str
    bandwidth: float  # bytes a second of a device-to-device copy, reads plus writes
    matmul_rate: float  # bf16 flops a second of an 8192^3 product

    def __str__(self) -> str:
        return f"{self.name}, {self.bandwidth / 1e12:.2f} TB/s, {self.matmul_rate / 1e12:.0f} TFLOP/s"


EXCHANGE_SECONDS = 6e-6  # of a few rows between two H100s of one host, beside a kernel that computes
RATES = (Chip("NVIDIA H200", 4.3e12, 790e12), Chip("NVIDIA H100 80GB HBM3", 3.02e12, 789e12))
CHIPS = {chip.name: chip for chip in RATES}


def chip() -> Chip | None:
    """Return the rates of the device that JAX computes on; None if they are unknown."""
    return CHIPS.get(jax.devices()[0].device_kind)


@dataclass(frozen=True)
class Widths:
    """The bytes of one weight and of one cache entry, and the speed of products relative to bf16."""

    weight: float = 2  # bytes of a weight
    expert: float | None = None  # bytes of a weight of experts; None: as of others
    cache: int = 2  # bytes of a K or V cache entry
    kept: int = 2  # bytes of a value that layers without a cache keep of a token
    speed: int = 1  # rate of matrix products over that of bf16


BF16 = Widths()


@dataclass(frozen=True)
class Cost:
    """The bytes and flops that one kernel needs at least."""

    name: str
    bytes: float
    flops: float


def matmul(name: str, rows: int, out: int, inner: int, widths: Widths) -> Cost:
    """Return the cost of ``rows`` vectors times a weight [out, inner]; the vectors' bytes do not count."""
    return Cost(name, out * inner * widths.weight, 2 * rows * out * inner / widths.speed)


def mixing(c: Mixer, batch: int, nodes: int, context: int, widths: Widths, *, tokens: float = 1.0) -> Cost:
    """Return the cost of mixing the tokens of a round with those before them, such as that of attention.

    Args:
        c: config of the mixer.
        batch: number of sequences.
        nodes: number of tokens of each sequence that are computed.
        context: number of committed tokens of each sequence.
        widths: bytes of values.
        tokens: number of tokens that a round commits for each sequence, on average.
    """
    read, flops = c.traffic(nodes, context, tokens, (widths.cache, widths.kept))
    return Cost(next(iter(c.describe())), batch * read, batch * flops)


def verify_costs(
    c: ModelConfig,
    batch: int,
    nodes: int,
    context: int,
    widths: Widths = BF16,
    *,
    rows: int | None = None,
    tokens: float = 1.0,
) -> list[Cost]:
    """Return the costs of the kernels of one target pass over ``nodes`` tree nodes (root included) a row.

    Args:
        rows: number of rows of the matrix products; None: those of all nodes.
        tokens: number of tokens that a pass commits for each row, on average.
    """
    point = batch, nodes, context, widths
    costs = [cost for layer in c.layers for cost in layer_costs(layer, c.hidden_size, *point, rows=rows, tokens=tokens)]
    return [*costs, matmul("head", rows or batch * nodes, c.vocab_size, c.hidden_size, widths)]


def layer_costs(
    layer: LayerConfig,
    hidden: int,
    batch: int,
    nodes: int,
    context: int,
    widths: Widths,
    *,
    rows: int | None = None,
    inputs: int | None = None,
    tokens: float = 1.0,
) -> list[Cost]:
    """Return the costs of a layer's kernels; of experts, those that random choices hit on average are read.

    The arguments are those of `verify_costs`, and the numbers of channels of the residual stream and of the mixer's
    input; ``inputs`` of None: those of the residual stream.
    """
    rows = batch * nodes if rows is None else rows
    costs = [mixing(layer.mixer, batch, nodes, context, widths, tokens=tokens)] if layer.has_mixer else []
    for name, spec in layer_params(layer, hidden, inputs or hidden).items():
        if len(spec.shape) == 2 and not name.endswith("bias"):
            costs.append(matmul(name, rows, *spec.shape, widths=widths))
        elif len(spec.shape) == 3:
            assert isinstance(layer.mlp, Experts)
            (count, out, inner), chosen = spec.shape, layer.mlp.router.chosen
            hit = count * (1 - (1 - chosen / count) ** rows)
            one = matmul(name, rows * chosen, out, inner, replace(widths, weight=widths.expert or widths.weight))
            costs.append(Cost(name, one.bytes * hit, one.flops))
    return costs


def head_costs(
    c: HeadConfig | AssistantConfig, batch: int, tree: Tree, context: int, widths: Widths = BF16
) -> list[Cost]:
    """Return the costs of the kernels of a head that drafts a tree."""
    if isinstance(c, AssistantConfig):
        return assistant_costs(c, batch, tree, context, widths)
    features = c.num_features * c.target_hidden_size
    fc = matmul("fc", batch * (tree.depth + 1), c.hidden_size, features, widths)
    if isinstance(c, DFlashConfig):
        return [fc, *block_costs(c, batch, tree, context, widths)]
    return [fc, *eagle_costs(c, batch, tree, context, widths)]


def eagle_costs(c: HeadConfig, batch: int, tree: Tree, context: int, widths: Widths) -> list[Cost]:
    """Return the costs of a head that runs once for each level of a tree, or once for all levels (P-EAGLE)."""
    fed = [tree.depth] if isinstance(c, PEagleConfig) else nodes_with_children(tree)
    # The embeddings' half of the projection is precomputed for a reduced draft vocabulary.
    has_own_vocab, costs = c.draft_vocab_size < c.vocab_size, []
    for (depth, nodes), (index, layer) in product(enumerate(fed), enumerate(c.layers)):
        inputs = c.hidden_size if index or (depth and has_own_vocab) else 2 * c.hidden_size
        costs += layer_costs(layer, c.hidden_size, batch, nodes, context, widths, inputs=inputs)
    return costs + [matmul("head", batch * nodes, c.draft_vocab_size, c.hidden_size, widths) for nodes in fed]


def nodes_with_children(tree: Tree) -> list[int]:
    """Return how many nodes of each level but the last a head runs on."""
    if tree.paths is None:
        return [1] + [tree.k] * (tree.depth - 1)
    return [len(level.with_children) for level in tree.levels[:-1]]


def assistant_costs(c: AssistantConfig, batch: int, tree: Tree, context: int, widths: Widths) -> list[Cost]:
    """Return the costs of an assistant of Gemma 4 without clusters, which runs once for each level of a tree."""
    costs = []
    for nodes in nodes_with_children(tree):
        costs.append(matmul("fc", batch * nodes, c.hidden_size, 2 * c.target_hidden_size, widths))
        for layer in c.layers:
            costs += layer_costs(layer, c.hidden_size, batch, nodes, context, widths)
        costs.append(matmul("project", batch * nodes, c.target_hidden_size, c.hidden_size, BF16))
        costs.append(matmul("head", batch * nodes, c.vocab_size, c.hidden_size, widths))
    return costs


def block_costs(c: DFlashConfig, batch: int, tree: Tree, context: int, widths: Widths) -> list[Cost]:
    """Return the costs of a DFlash or DSpark head that has the target's output head.

    Keys and values of committed tokens come from rows of the QKV projections, whose bytes count once.
    """
    tokens, costs = tree.depth + (not c.sample_from_anchor), []
    for layer in c.layers:
        context_product = matmul("context", batch * (tree.depth + 1), 2 * layer.gqa.kv_size, c.hidden_size, widths)
        costs.append(Cost("context", 0, context_product.flops))
        costs += layer_costs(layer, c.hidden_size, batch, tokens, context, widths)
        if layer.block_taps:  # of convolutions around attention and feed-forward
            rows = 2 * layer.block_taps * c.hidden_size // layer.block_group
            costs += 2 * [matmul("taps", batch * tokens, rows, c.hidden_size, BF16)]
    if isinstance(c, DSparkConfig) and c.markov_rank:
        fed = [1] + [tree.k or 1] * (tree.depth - 1)  # nodes of each level that are followed by others
        costs += [matmul("markov", batch * nodes, c.vocab_size, c.markov_rank, BF16) for nodes in fed]
    return [*costs, matmul("head", batch * tree.depth, c.vocab_size, c.hidden_size, widths)]


def seconds(costs: list[Cost], *, devices: int = 1, sums: int = 0) -> float | None:
    """Return the least seconds of kernels that run one after another; None if the device's rates are unknown.

    A kernel takes at least the longer of two times: its bytes over the bandwidth, its flops over the arithmetic rate.

    Args:
        devices: number of devices, between which bytes and flops are divided.
        sums: number of products whose parts several devices exchange; an exchange takes at least `EXCHANGE_SECONDS`.
    """
    rates = chip()
    if rates is None:
        return None
    alone = sum(max(cost.bytes / rates.bandwidth, cost.flops / rates.matmul_rate) for cost in costs)
    return alone if devices == 1 else alone / devices + sums * EXCHANGE_SECONDS
