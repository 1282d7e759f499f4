"""What the devices that share one engine hold."""

from __future__ import annotations

import jax
import numpy as np

from jspec.core.records import LayerState, SlotState


def check_devices_equal(state: SlotState) -> int:
    """Check that all devices hold the same bits of what every device has; return the number of such arrays.

    Pools are divided by heads; devices beyond the number of key-value heads repeat those of others.
    """
    leaves = [
        leaf
        for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LayerState))
        for leaf in ([] if isinstance(node, LayerState) else [node])
    ]
    for leaf in leaves:
        first, *others = (np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards)
        assert others and all(other == first for other in others), f"{leaf.shape} differs between devices"
    return len(leaves)
