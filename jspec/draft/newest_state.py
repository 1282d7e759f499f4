"""Drafters that read one hidden state of the target: that after the final norm, at the position before the root."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from jspec.core.records import Draft, PromptBatch, SlotView, Verdict
from jspec.draft.base import Params, active_slots
from jspec.draft.pretrained import Pretrained
from jspec.models.decoder import Model


@struct.dataclass
class NewestState:
    """The state of such a drafter, with one hidden state of the target for each slot."""

    hidden: Float[Array, "slots hidden"]  # target's state after the final norm, one position before the slot's root

    @classmethod
    def new(cls, slots: int, width: int, dtype: jnp.dtype) -> NewestState:
        return cls(jnp.zeros((slots, width), dtype))

    def of(self, view: SlotView) -> Float[Array, "batch 1 hidden"]:
        """Return the hidden state of each row of a batch."""
        return self.hidden.at[view.slots].get(mode="fill", fill_value=0)[:, None]


class NewestStateDrafter(Pretrained):
    """Base class of these drafters. The newest token of a prompt runs through the target even if its rows are cached,
    so no state is kept for the pages of the prefix cache.
    """

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return (target.config.num_layers + 1,)

    def prefill(
        self, params: Params, state: NewestState, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> NewestState:
        assert features is not None
        newest = batch.newest_of(features).astype(state.hidden.dtype)
        return NewestState(state.hidden.at[view.slots].set(newest, mode="drop"))

    def commit(
        self,
        params: Params,
        state: NewestState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> NewestState:
        assert features is not None
        last = jnp.take_along_axis(verdict.path, verdict.accept_len[:, None], axis=1)
        newest = jnp.take_along_axis(features, last[..., None], axis=1)[:, 0].astype(state.hidden.dtype)
        return NewestState(state.hidden.at[active_slots(view, len(state.hidden))].set(newest, mode="drop"))
