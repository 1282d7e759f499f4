"""What an engine takes of its device's memory: planned before anything is allocated, measured once it is compiled.

How many pages there are follows from it, where the user does not say and the device reports its memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax

from jspec.core.config import EngineConfig
from jspec.core.records import KVCache, SlotState
from jspec.models.kv_cache import MAX_POOL_ELEMENTS, PoolShape
from jspec.step.program import Params, Program, init_state

KEPT = 4  # times the pages that all slots can fill: so much is of use to requests that begin like ended ones
UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device."""

    limit: int
    in_use: int  # by this process, whatever for
    is_reported: bool  # False: it is the machine's memory, for the device says nothing of its own


def device_memory() -> DeviceMemory:
    """What the default device says of itself now."""
    stats = jax.devices()[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):  # 0 or None: an allocator without a limit
        return DeviceMemory(limit, stats.get("bytes_in_use") or 0, is_reported=True)
    return DeviceMemory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0, is_reported=False)


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays (or array shapes) of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes an engine takes, by what they are for.

    Attributes:
        target_weights, draft_weights: what the drafter shares with the target counts as the target's.
        target_pool, draft_pool: keys and values of ``pages`` pages.
        features: the rest of the drafter's state: features that wait or that pages keep, texts that it reads.
        slots: page table and controls of the slots, and the text of the pages where it is kept.
        workspace: of the largest program while it runs: logits, noise, activations.
        is_measured: whether ``workspace`` is what the compiled programs take; else an estimate.
        other: what this process had on the device before.
        pages: of either pool.
        limit: what all of it may take, ``memory_fraction`` of ``device``.
        device: the memory of the device.
    """

    target_weights: int
    draft_weights: int
    target_pool: int
    draft_pool: int
    features: int
    slots: int
    workspace: int
    other: int
    pages: int
    limit: int
    device: int
    is_measured: bool = False

    @property
    def total(self) -> int:
        """Bytes in use while the engine runs."""
        return self.target_weights + self.draft_weights + self.state + self.workspace + self.other

    @property
    def state(self) -> int:
        """Bytes of pools and everything else that goes from round to round."""
        return self.target_pool + self.draft_pool + self.features + self.slots

    def __str__(self) -> str:
        workspace = "noise and workspace" + (" (estimate)" * (not self.is_measured))
        rows = {
            "target weights": self.target_weights,
            "draft weights": self.draft_weights,
            f"target pool, {self.pages} pages": self.target_pool,
            "draft pool": self.draft_pool,
            "features": self.features,
            "slots": self.slots,
            workspace: self.workspace,
            "other arrays": self.other,
        }
        parts = ", ".join(f"{name} {size(count)}" for name, count in rows.items())
        return f"memory: {parts}; total {size(self.total)} of {size(self.limit)} (device: {size(self.device)})"


def size(count: int) -> str:
    """Bytes in words."""
    name, unit = next(((n, u) for n, u in reversed(UNITS.items()) if count >= u), ("bytes", 1))
    return f"{count / unit:.2f} {name}" if unit > 1 else f"{count} bytes"


@dataclass(frozen=True)
class Room:
    """What an engine is to be fitted into, and with what."""

    program: Program
    params: Params
    config: EngineConfig
    device: DeviceMemory

    def plan(self, pool: PoolShape) -> MemoryPlan:
        """What an engine with these pools takes."""
        target = {id(leaf): leaf for leaf in jax.tree.leaves(self.params.target)}
        draft = {id(leaf): leaf for leaf in jax.tree.leaves(self.params.draft) if id(leaf) not in target}
        weights = tree_bytes(target), tree_bytes(draft)
        state: SlotState = jax.eval_shape(lambda p: init_state(self.program, p, pool), self.params)
        draft_pool = tree_bytes(_caches(state.draft))
        return MemoryPlan(
            target_weights=weights[0],
            draft_weights=weights[1],
            target_pool=tree_bytes(state.target),
            draft_pool=draft_pool,
            features=tree_bytes(state.draft) - draft_pool,
            slots=tree_bytes(state) - tree_bytes((state.target, state.draft)),
            workspace=self._workspace(pool),
            other=max(self.device.in_use - sum(weights), 0),
            pages=pool.pages,
            limit=int(self.device.limit * self.config.memory_fraction),
            device=self.device.limit,
        )

    def _workspace(self, pool: PoolShape) -> int:
        """Estimate what the largest program takes while it runs.

        A token of a forward takes its row of every product of a layer, twice over; a node its logits three times:
        as they come, with noise, and what is left of them by top-k and the like; and edited by controls.
        """
        assert self.config.prefill_buckets is not None
        own, tree = self.params.target.config, self.program.drafter.tree
        heads = (own.num_heads + 2 * own.num_kv_heads) * own.head_dim
        features = len(self.program.feature_layers) * own.hidden_size
        token = 2 * (3 * own.intermediate_size + 2 * heads + 4 * own.hidden_size + features)
        token *= self.params.target.embed.dtype.itemsize
        node = token + (3 + self.program.controls) * 4 * own.vocab_size
        return max(pool.slots * max(tree.nodes, tree.k) * node, self.config.prefill_buckets[-1] * token + node)

    def pages_that_fit(self, pool: PoolShape, limit: int) -> int:
        """The most pages with which all is within the limit; below 2 if none are."""
        two, three = (self.plan(replace(pool, pages=pages)).total for pages in (2, 3))
        state = jax.eval_shape(lambda p: init_state(self.program, p, replace(pool, pages=1)), self.params)
        caches = jax.tree.leaves(_caches((state.target, state.draft)))
        addressable = min(((MAX_POOL_ELEMENTS - 1) // leaf.size for leaf in caches), default=MAX_POOL_ELEMENTS)
        return min(2 + (limit - two) // (three - two), addressable)

    def fewest_pages(self, pool: PoolShape) -> int:
        """Pages without which ``slots`` and ``max_len`` mean nothing: for a request of ``max_len``.

        Where the device reports no memory, for as many as there are slots.
        """
        if self.config.pages is not None:
            return self.config.pages
        requests = 1 if self.device.is_reported else pool.slots
        return requests * pool.width(self.program.drafter.tree) + 1

    @property
    def fills(self) -> bool:
        """Whether there are as many pages as fit."""
        return self.config.pages is None and self.device.is_reported

    def remedies(self, pool: PoolShape, limit: int, *, is_started: bool = True) -> str:
        """What to lower, each by itself, and how far, for all to be within the limit.

        Args:
            is_started: the pools were planned already, and something else took too much.
        """

        def fits(other: PoolShape) -> bool:
            return self.fewest_pages(other) <= self.pages_that_fit(other, limit)

        found = []
        if not (is_started and self.fills):  # else the next start would fill what that frees with pages
            largest = {
                "max_len": _largest(pool.max_len - 1, lambda value: fits(replace(pool, max_len=value))),
                "slots": _largest(pool.slots - 1, lambda value: fits(replace(pool, slots=value))),
            }
            found = [f"lower {name} to at most {most}" for name, most in largest.items() if most]
        if (pages := self.pages_that_fit(pool, limit)) >= 2:
            found.append(f"pass pages={pages}")
        if not found:
            return "not one page is left beside the weights; take quantize= or a smaller model"
        return ", or ".join(found)

    def refuse(self, plan: MemoryPlan, pool: PoolShape) -> NoReturn:
        """Say what is needed, what there is, and what would fit."""
        raise ValueError(
            f"out of memory: max_len={pool.max_len}, slots={pool.slots} and {pool.pages} pages need "
            f"{size(plan.total)}, available are {size(plan.limit)}, {self.config.memory_fraction:.0%} of the device's "
            f"{size(plan.device)}. {plan}. To fit, {self.remedies(pool, plan.limit, is_started=False)}"
        )


def fit(room: Room, pool: PoolShape) -> tuple[PoolShape, MemoryPlan]:
    """The pools that an engine gets, and the plan.

    Where neither user nor device says how much, there are pages for every slot to reach ``max_len``. Where the device
    does, there are as many as fit; but no more than are of use.

    Args:
        pool: with pages for every slot to reach ``max_len``, or as many as the config says.

    Raises:
        ValueError: they do not fit, or a request of ``max_len`` does not.
    """
    if room.fills:
        plan = room.plan(replace(pool, pages=2))
        wanted = (pool.pages - 1) * (KEPT if pool.prefix_cache else 1) + 1
        fewest = room.fewest_pages(pool)
        pool = replace(pool, pages=max(min(wanted, room.pages_that_fit(pool, plan.limit)), fewest))
    plan = room.plan(pool)
    if plan.total > plan.limit:
        room.refuse(plan, pool)
    return pool, plan


def measured(room: Room, pool: PoolShape, programs: Iterable[Any]) -> MemoryPlan:
    """The plan with the workspace that compiled programs take, one at a time.

    Raises:
        ValueError: that is more than the device has.
    """
    plan = room.plan(pool)
    analyses = [analysis for program in programs if (analysis := program.memory_analysis()) is not None]
    if not analyses:
        return plan
    workspace = max(a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes for a in analyses)
    plan = replace(plan, workspace=workspace, is_measured=True)
    if plan.total > plan.device:
        over = plan.total - plan.device
        raise ValueError(
            f"out of memory: the compiled programs need {size(over)} more than the device has. {plan}. To fit, "
            f"{room.remedies(pool, room.plan(pool).total - over)}"
        )
    return plan


@contextmanager
def explained(room: Room, pool: PoolShape) -> Iterator[None]:
    """Where memory runs out although the plan fits, say what to lower and by how much.

    Raises:
        ValueError: instead of the device's own error, which is its cause.
    """
    try:
        yield
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or "shared memory" in str(error).lower():
            raise  # a kernel that needs more of a multiprocessor is another matter
        plan, asked = room.plan(pool), _bytes_asked(str(error))
        missing = plan.state // 10 if asked is None else asked
        named = size(missing) + (" or more" if asked is not None else ", for instance, as the device does not say")
        share, most = "", 1000 * (plan.total - missing) // plan.device  # thousandths
        if room.fills and most > 0:
            share = f", or lower memory_fraction={room.config.memory_fraction:g} to at most {most / 1000}"
        raise ValueError(
            f"out of memory at start: missing are {named}. {plan}. To free that, "
            f"{room.remedies(pool, plan.total - missing)}{share}"
        ) from error


def _bytes_asked(message: str) -> int | None:
    """What an allocation that failed asked for, from the message of the device's allocator."""
    found = re.search(r"alloca\w+ ([\d.]+) ?(bytes|[KMGT]iB)", message)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def _caches(tree: object) -> list[object]:
    """The pools of keys and values in a state."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, KVCache))
    return [leaf for leaf in leaves if isinstance(leaf, KVCache)]


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest value from 1 to ``most`` that fits, 0 if none does; whatever is smaller than a fitting one fits."""
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        low, most = (middle, most) if fits(middle) else (low, middle - 1)
    return low
