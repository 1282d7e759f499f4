"""Drafting with the target itself and an adapter that was trained for drafting (UNO).

A pass of the target computes the root, with the target's own weights, and after it rows of random tokens, with the
adapter. The root's row gives the distribution of the next token, and row i that of the token i places after it. The
rows lie in the target's caches after the committed ones, where the pass that verifies the draft overwrites them.

The next token is drafted as all others are, and verified: so grammars, penalties, log-probabilities and all accept
rules work as with any drafter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self, final

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from jspec.core.records import Draft, LayerState, SlotView, TokenBatch
from jspec.core.tree import DEFAULT_TREE, Tree, tree_of
from jspec.draft.base import CHECK_PROMPT, StatelessDrafter, check_part
from jspec.draft.elsewhere import READS_FEATURES, refuses_device
from jspec.draft.expand_block import expand_block
from jspec.draft.expand_tree import Vocabulary
from jspec.models.adapter_files import AdapterFile, read_adapter
from jspec.models.adapters import as_tables, empty_tables, on_devices
from jspec.models.decoder import Model, forward
from jspec.models.parts.adapter_tables import AdapterTables


@struct.dataclass
class BoundUNO:
    """The weights with which the drafter computes."""

    model: Model  # the target
    adapter: AdapterTables


@final
class UNO(StatelessDrafter):
    """Drafts with the target and a draft-only adapter.

    Args:
        adapter: the adapter, in the format of PEFT.
        tree: draft tree of any kind, or its text such as "chain:4". A tree of depth d takes a pass of d rows.

    Source: UNO as SGLang 0.5.23 serves it, which emits the root's token from the first pass; here it is verified.
    """

    method = "uno"
    writes_target = True

    @refuses_device(READS_FEATURES)
    def __init__(self, adapter: AdapterFile, tree: Tree | str = DEFAULT_TREE) -> None:
        name = type(self).__name__
        check_part(name, "adapter", adapter, AdapterFile, f"{name}.from_pretrained(path)")
        self.adapter = adapter
        self.tree = tree_of(name, tree)

    @classmethod
    @refuses_device(READS_FEATURES)
    def from_pretrained(cls, path: str | os.PathLike[str], *, tree: Tree | str = DEFAULT_TREE) -> Self:
        """Load an adapter.

        Args:
            path: folder or hub id ("owner/name") of an adapter in the format of PEFT.
            tree: draft tree of any kind, or its text such as "chain:4".

        Raises:
            ValueError, FileNotFoundError, NotImplementedError: as `jspec.models.adapter_files.read_adapter`.
        """
        return cls(read_adapter(path), tree)

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT} and that the adapter was trained for this target"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> BoundUNO:
        name = type(self).__name__
        if target.config.has_slot_states:
            raise ValueError(f"{name}: expected a target with attention in all layers, got one with recurrent states")
        try:
            table = as_tables(self.adapter, target, self.adapter.rank)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        tables = empty_tables(target, 1, self.adapter.rank)
        return BoundUNO(target, tables.with_table(0, on_devices(table, target)))

    def draft(self, params: BoundUNO, state: tuple[()], view: SlotView) -> tuple[Draft, tuple[()]]:
        raise NotImplementedError("the drafter writes rows of the target's caches: draft_with_target")

    def draft_with_target(
        self, params: BoundUNO, target: Sequence[LayerState], view: SlotView
    ) -> tuple[Draft, list[LayerState]]:
        depth, vocab = self.tree.depth, params.model.config.vocab_size
        positions = view.lengths[:, None] + jnp.arange(depth, dtype=jnp.int32)
        tokens = jnp.concatenate([view.root[:, None], random_tokens(positions[:, 1:], vocab)], axis=1)
        batch = TokenBatch(
            tokens=tokens,
            positions=positions,
            valid=jnp.broadcast_to(view.active[:, None], tokens.shape),
            first_row=view.lengths,
            page_table=view.page_table,
            bits=None,
            numerics=view.numerics,
            slots=view.slots,
            adapters=params.adapter,
            adapter=jnp.broadcast_to(jnp.arange(depth) > 0, tokens.shape).astype(jnp.int32),
        )
        out, states = forward(params.model, target, batch)
        assert out.product is not None
        return expand_block(self.tree, view, Vocabulary(None, vocab), out.product), states


def random_tokens(positions: Int[Array, "batch rows"], vocab: int) -> Int[Array, "batch rows"]:
    """Return tokens that are uniform over the vocabulary; each position has its own."""
    key = jax.random.key(0)

    def draw(position: Int[Array, ""]) -> Int[Array, ""]:
        return jax.random.randint(jax.random.fold_in(key, position), (), 0, vocab, jnp.int32)

    return jax.vmap(jax.vmap(draw))(positions)
