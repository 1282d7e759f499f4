"""Whether weights, pools and state fit on the device, before anything is allocated."""

from __future__ import annotations

import os

import jax

from jspec.cache import PoolShape
from jspec.step import Params, Program, init_state


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays (or array shapes) of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_bytes() -> int:
    """Memory of the default device; the machine's where the device has none of its own."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(program: Program, params: Params, pool: PoolShape, fraction: float) -> None:
    """Refuse an engine that cannot fit.

    Raises:
        ValueError: with the numbers and the number of pages that would fit.
    """
    state = jax.eval_shape(lambda p: init_state(program, p, pool), params)
    weights, pools = tree_bytes(params), tree_bytes(state)
    budget = int(device_bytes() * fraction)
    if weights + pools <= budget:
        return
    fitting = max(budget - weights, 0) * pool.pages // max(pools, 1)
    weights_gib, pools_gib, device_gib = (size / 2**30 for size in (weights, pools, device_bytes()))
    raise ValueError(
        f"out of memory: weights {weights_gib:.2f} GiB and pools of {pool.pages} pages {pools_gib:.2f} GiB exceed "
        f"{fraction:.0%} of the device's {device_gib:.2f} GiB; lower slots or max_len, or pass pages={fitting}"
    )
