"""Drafting with an assistant of Gemma 4, which attends to the target's own cache.

A node of a draft tree sees the committed rows alone, not its ancestors: what it knows of them is in its state. So the
nodes of a tree need no mask, and drafting writes no rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self, final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jspec.core.records import Draft, SlotView, TokenBatch
from jspec.core.tree import DEFAULT_TREE, Tree, tree_of
from jspec.draft.base import CHECK_HEAD, CHECK_PROMPT, check_part, check_window
from jspec.draft.elsewhere import READS_FEATURES, refuses_device
from jspec.draft.expand_tree import Level, expand_tree
from jspec.draft.formats.gemma4_assistant_format import assistant_format
from jspec.draft.gemma4_assistant_head import AssistantConfig, AssistantHead, common_sizes, sources_in
from jspec.draft.head_config import Overrides
from jspec.draft.newest_state import NewestState, NewestStateDrafter
from jspec.models.decoder import Model
from jspec.models.load import Format
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.tensor_parallel import place
from pallas_kernels.layers.partial_sums import PartialSums

POSITION = -1  # rotary position of all queries of a round, counted from the root's


@final
class Gemma4Assistant(NewestStateDrafter):
    """Drafts with an assistant of Gemma 4.

    Args:
        head: weights and config of the assistant.
        tree: draft tree of any kind, or its text such as "chain:4".
        draft_window: number of newest tokens that the assistant attends to; None: all.

    Raises:
        ValueError: a node of the tree has more children than there are candidates, or the window is smaller than 1.
    """

    method = AssistantConfig.method
    weights_type = AssistantHead
    reads_target = True

    @refuses_device(READS_FEATURES)
    def __init__(
        self, head: AssistantHead, tree: Tree | str = DEFAULT_TREE, *, draft_window: int | None = None
    ) -> None:
        name = type(self).__name__
        check_part(name, "head", head, AssistantHead, f"{name}.from_pretrained(path)")
        self.head = head
        self.tree = tree_of(name, tree)
        self.draft_window = check_window(name, draft_window, None)
        if self.tree.branching > (most := head.config.candidates):
            raise ValueError(
                f"{name}: {self.tree} needs {self.tree.branching} children of a node, the head has {most} candidates; "
                "take a narrower tree"
            )

    @classmethod
    @refuses_device(READS_FEATURES)
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        tree: Tree | str = DEFAULT_TREE,
        dtype: str | None = None,
        quantize: str | None = None,
        draft_window: int | None = None,
    ) -> Self:
        """Load an assistant.

        Args:
            path: Hugging Face folder, converted folder or hub id ("owner/name").
            tree: draft tree of any kind, or its text such as "chain:4".
            dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
            quantize: "int8", "fp8", "fp8_dynamic" or "int4", how weights are quantised
                (`jspec.models.weights.quantize`); None: as stored.
            draft_window: number of newest tokens that the assistant attends to; None: all.
        """
        return cls(cls.read(path, dtype=dtype, quantize=quantize), tree, draft_window=draft_window)

    @classmethod
    def file_format(cls, kind: str, overrides: Overrides, dequantize: bool) -> Format:
        return assistant_format()

    def with_window(self, draft_window: int) -> Self:
        return type(self)(self.head, self.tree, draft_window=draft_window)

    def on_mesh(self, mesh: Mesh) -> Self:
        return type(self)(place(self.head, mesh), self.tree, draft_window=self.draft_window)

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT} and that the assistant was trained for this target, and {CHECK_HEAD}"

    def bind(self, target: Model) -> AssistantHead:
        head, name = self.head, type(self).__name__
        for size in common_sizes(head.config, target.config):
            if not size.is_equal:
                raise ValueError(f"{name}: {size}; use a head made for this target")
        try:
            sources = sources_in(head.config, target.config)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; use a head made for this target") from None
        return replace(head, embed=target.embed, embed_scale=target.config.embed_scale, sources=sources)

    def init(self, params: AssistantHead, pool: PoolShape) -> NewestState:
        return NewestState.new(pool.slots, params.config.target_hidden_size, params.dtype)

    def draft(self, params: AssistantHead, state: NewestState, view: SlotView) -> tuple[Draft, NewestState]:
        assert view.target is not None
        caches = view.target
        with jax.named_scope("root"):
            root = batch_of(view, view.root[:, None], self.draft_window)
            logits, states = params.run(caches, root, state.of(view))

        def run_level(before: Float[Array, "batch parents hidden"], level: Level) -> tuple[PartialSums, Array]:
            if not self.tree.is_chain:
                before = jnp.take_along_axis(before, level.parents[..., None], axis=1)
            return params.run(caches, batch_of(view, level.tokens, self.draft_window), before)

        expanded, _ = expand_tree(self.tree, view, params.vocabulary, logits, states, run_level)
        return expanded.draft, state


def batch_of(view: SlotView, tokens: Int[Array, "batch tokens"], window: int | None = None) -> TokenBatch:
    """Make a batch of tokens that see the committed rows alone, the last of which counts as the row of each.

    Args:
        view: the slots of the batch.
        tokens: tokens of one level of a tree.
        window: number of newest tokens that the assistant attends to; None: all.
    """
    is_one = tokens.shape[1] == 1
    return TokenBatch(
        tokens=tokens,
        positions=jnp.broadcast_to((view.lengths + POSITION)[:, None], tokens.shape),
        valid=jnp.broadcast_to(view.active[:, None], tokens.shape),
        first_row=jnp.maximum(view.lengths - 1, 0),
        page_table=view.page_table,
        bits=None if is_one else jnp.ones((*tokens.shape, 1), jnp.uint32),
        numerics=view.numerics.relaxed,
        new_rows=None if is_one else 1,
        window=window,
    )
