"""The least time a round can take: the sum over its kernels of the larger of bytes / bandwidth and flops / rate."""

from __future__ import annotations

from dataclasses import dataclass

from jspec.models.config import HeadConfig, ModelConfig
from jspec.tree import Tree

BANDWIDTH = 4.3e12  # bytes a second; device-to-device copy measured on one H200, reads plus writes
MATMUL_RATE = 790e12  # bf16 flops a second; 8192^3 product measured on one H200


@dataclass(frozen=True)
class Cost:
    """What one kernel must do at least."""

    name: str
    bytes: float
    flops: float

    @property
    def seconds(self) -> float:
        return max(self.bytes / BANDWIDTH, self.flops / MATMUL_RATE)


def matmul(name: str, rows: int, out: int, inner: int, weight_bytes: int = 2) -> Cost:
    """A product with a weight [out, inner]; activations are left out of the bytes, they stay in the L2."""
    return Cost(name, out * inner * weight_bytes, 2 * rows * out * inner)


def attention(batch: int, nodes: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Cost:
    """Attention of ``nodes`` rows a sequence over a bf16 cache."""
    return Cost("attention", batch * context * kv_heads * head_dim * 4, 4 * batch * nodes * heads * head_dim * context)


def verify_costs(c: ModelConfig, batch: int, nodes: int, context: int) -> list[Cost]:
    """One forward of the target over root and nodes."""
    rows = batch * nodes
    layer = [
        matmul("qkv", rows, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size),
        attention(batch, nodes, context, c.num_heads, c.num_kv_heads, c.head_dim),
        matmul("o", rows, c.hidden_size, c.num_heads * c.head_dim),
        matmul("gate_up", rows, 2 * c.intermediate_size, c.hidden_size),
        matmul("down", rows, c.hidden_size, c.intermediate_size),
    ]
    return layer * c.num_layers + [matmul("head", rows, c.vocab_size, c.hidden_size)]


def draft_costs(c: HeadConfig, batch: int, tree: Tree, context: int) -> list[Cost]:
    """A tree drafted by an EAGLE-3 head, its fusion of features included."""
    if tree.paths is None:
        fed = [1] + [tree.k] * (tree.depth - 1)
    else:
        fed = [len(level.with_children) for level in tree.levels[:-1]]
    costs = [matmul("fc", batch * (tree.depth + 1), c.hidden_size, 3 * c.target_hidden_size)]
    for nodes in fed:
        rows = batch * nodes
        costs += [
            matmul("draft qkv", rows, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, 2 * c.hidden_size),
            attention(batch, nodes, context, c.num_heads, c.num_kv_heads, c.head_dim),
            matmul("draft o", rows, c.hidden_size, c.num_heads * c.head_dim),
            matmul("draft gate_up", rows, 2 * c.intermediate_size, c.hidden_size),
            matmul("draft down", rows, c.hidden_size, c.intermediate_size),
            matmul("draft head", rows, c.draft_vocab_size, c.hidden_size),
        ]
    return costs


def seconds(costs: list[Cost]) -> float:
    """The floor: kernels run one after another."""
    return sum(cost.seconds for cost in costs)
