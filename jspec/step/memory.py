"""Plans the device memory of an engine before anything is allocated, and measures it after compilation.

The plan also sets the number of cache pages, unless the user gives one or the device does not report its memory.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import jax

from jspec import verify
from jspec.core.accept_rule import DraftSampling
from jspec.core.config import EngineConfig
from jspec.core.prompt_blocks import block_rows
from jspec.core.records import LayerState, SlotState
from jspec.draft.elsewhere import Elsewhere
from jspec.models.parts.kv_pool import MAX_POOL_ELEMENTS, KVPool, PoolShape
from jspec.models.weights.quantize import widened_bytes
from jspec.step.program import Params, Program, init_state
from jspec.step.program_memory import ProgramMemory

# With a prefix cache, the automatic number of pages is at most this multiple of what all slots can use at once.
PREFIX_CACHE_FACTOR = 4
UNITS = {"": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device in bytes.

    Attributes:
        limit: number of bytes that the allocator may use.
        in_use: number of bytes that this process has allocated.
        is_reported: whether the device reports its memory; if False, ``limit`` is the memory of the machine.
    """

    limit: int
    in_use: int
    is_reported: bool


def device_memory(*devices: jax.Device) -> DeviceMemory:
    """Read the smallest memory limit and the largest memory usage of devices, by default of the default device."""
    stats = [device.memory_stats() or {} for device in devices or jax.local_devices()[:1]]
    if all(values.get("bytes_limit") for values in stats):  # 0 or None: the allocator has no limit
        in_use = max(values.get("bytes_in_use") or 0 for values in stats)
        return DeviceMemory(min(values["bytes_limit"] for values in stats), in_use, is_reported=True)
    return DeviceMemory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0, is_reported=False)


def tree_bytes(tree: object) -> int:
    """Return the total size in bytes of all arrays (or array shapes) in a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@dataclass(frozen=True)
class MemoryPlan:
    """The device memory that an engine uses for each purpose, in bytes.

    Attributes:
        target_weights: the target's weights, including those that the drafter shares.
        draft_weights: the drafter's own weights.
        target_pool: the target's keys and values, for ``pages`` pages.
        draft_pool: the drafter's keys and values, for ``pages`` pages.
        features: the drafter's other state, such as features of pending tokens and of pages, and token histories.
        slots: page table, controls and grammar tables, and the token history if the state has one.
        states: what the target's layers without pages keep in each slot, and its copies for the prefix cache.
        workspace: temporary memory of the largest program while it runs: logits, noise, activations.
        other: other arrays of this process on the device.
        adapters: tables of adapters of the target.
        exchanges: memory that the kernels keep by which several devices exchange arrays, in all compiled programs.
        pages: number of pages in each pool.
        limit: largest total allowed, which is ``memory_fraction`` of ``device``.
        device: memory of the device that the allocator may use.
        is_measured: whether ``workspace`` comes from the compiled programs; otherwise it is an estimate.
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
    states: int = 0
    adapters: int = 0
    exchanges: int = 0
    is_measured: bool = False

    @property
    def total(self) -> int:
        """The total number of bytes in use while the engine runs."""
        weights = self.target_weights + self.draft_weights + self.adapters
        return weights + self.state + self.workspace + self.exchanges + self.other

    @property
    def state(self) -> int:
        """The number of bytes of the engine's state: pools, features, slots and states."""
        return self.target_pool + self.draft_pool + self.features + self.slots + self.states

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

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
        rows |= {name: count for name in ("states", "adapters", "exchanges") if (count := getattr(self, name))}
        parts = ", ".join(f"{name} {size(count)}" for name, count in rows.items())
        whose = "" if self.target_weights else " of the draft model's devices"
        return f"memory{whose}: {parts}; total {size(self.total)} of {size(self.limit)} (device: {size(self.device)})"


def size(count: int) -> str:
    """Write a number of bytes as text with a readable unit."""
    name, unit = next(((n, u) for n, u in reversed(UNITS.items()) if count >= u), ("bytes", 1))
    return f"{count / unit:.2f} {name}" if unit > 1 else f"{count} bytes"


@dataclass(frozen=True)
class MemoryPlanner:
    """Plans the memory of an engine on a device before the engine is made.

    Attributes:
        program, params: program and parameters of one device.
        config: options of the engine.
        device: memory of the device.
        devices: number of devices over which the weights are divided.
        adapters: bytes of the tables of adapters.
    """

    program: Program
    params: Params
    config: EngineConfig
    device: DeviceMemory
    devices: int = 1
    adapters: int = 0

    def plan(self, pool: PoolShape) -> MemoryPlan:
        """Plan the memory of an engine whose KV pools have the given shapes."""
        return self._plan_of(pool, self._state(pool))

    def _state(self, pool: PoolShape) -> SlotState:
        """Return the shapes of the slot state."""
        return jax.eval_shape(lambda p: init_state(self.program, p, pool), self.params)

    def _plan_of(self, pool: PoolShape, state: SlotState) -> MemoryPlan:
        target = {id(leaf): leaf for leaf in jax.tree.leaves(self.params.target)}
        draft = {id(leaf): leaf for leaf in jax.tree.leaves(self.params.draft) if id(leaf) not in target}
        weights = tree_bytes(target), tree_bytes(draft)
        draft_pool = tree_bytes(_caches(state.draft))
        target_pool = tree_bytes([layer for layer in state.target if isinstance(layer, KVPool)])
        return MemoryPlan(
            target_weights=weights[0],
            draft_weights=weights[1],
            target_pool=target_pool,
            draft_pool=draft_pool,
            features=tree_bytes(state.draft) - draft_pool,
            slots=tree_bytes(state) - tree_bytes((state.target, state.draft)),
            states=tree_bytes(state.target) - target_pool,
            adapters=self.adapters,
            workspace=self._workspace(pool),
            other=max(self.device.in_use - sum(weights), 0),
            pages=pool.pages,
            limit=int(self.device.limit * self.config.memory_fraction),
            device=self.device.limit,
        )

    def _workspace(self, pool: PoolShape) -> int:
        """Estimate the temporary memory of the largest program, in bytes.

        The estimate counts two copies of each token's outputs of all matrix products in one layer, and of its
        embeddings for all layers. For each draft node and each piece of a prefill it also counts three copies of the
        logits: raw, with noise, and after top-k, top-p and min-p. If the program applies controls, it counts a fourth
        copy for the edited logits. Products of many rows with packed weights also write a widened copy of a weight,
        except on a Hopper GPU.
        """
        assert self.config.prefill_buckets is not None
        model_config, tree = self.params.main.config, self.program.drafter.tree
        heads = max(layer.mixer.row_size for layer in model_config.layers)
        features = len(self.program.feature_layers) * model_config.hidden_size
        inner = max(layer.mlp.row_size(model_config.hidden_size) for layer in model_config.layers)
        embedded = sum(layer.embedded for layer in model_config.layers)
        token = 2 * (inner + 2 * heads + 4 * model_config.hidden_size + features + embedded)
        token *= self.params.main.embed.dtype.itemsize
        node = token + (3 + self.program.controls) * 4 * model_config.vocab_size
        size = self.config.prefill_buckets[-1]
        pieces = min(block_rows(size)[0], pool.slots)
        nodes = pool.slots * max(tree.nodes, tree.k)
        largest = max(nodes * node, size * token + pieces * node)
        return largest + widened_bytes(self.params, max(nodes, size)) + self.received(pool)

    def received(self, pool: PoolShape) -> int:
        """Return the bytes of two drafts that arrive from other devices, one of which a running program reads."""
        if not isinstance(self.program.drafter, Elsewhere):
            return 0
        tree, sampling = self.program.drafter.tree, verify.resolve(self.program.accept).draft_sampling
        has_probs = sampling is DraftSampling.OWN_DISTRIBUTION and tree.paths is not None  # dynamic trees have none
        node = 4 * (4 + has_probs * self.params.main.config.vocab_size)  # token, parent, score, flag; probabilities
        return 2 * pool.slots * tree.nodes * node

    def pages_that_fit(self, pool: PoolShape, limit: int) -> int:
        """Return the largest number of pages whose plan fits into ``limit`` bytes; less than 2 if no number fits."""
        pools = [replace(pool, pages=pages) for pages in (2, 3)]
        states = [self._state(pool) for pool in pools]
        two, three = (self._plan_of(*pair).total for pair in zip(pools, states, strict=True))
        less, more = (jax.tree.leaves(_caches((state.target, state.draft))) for state in states)
        of_page = [b.size - a.size for a, b in zip(less, more, strict=True) if b.size > a.size]
        addressable = min(((MAX_POOL_ELEMENTS - 1) // size for size in of_page), default=MAX_POOL_ELEMENTS)
        return min(2 + (limit - two) // (three - two), addressable)

    def fewest_pages(self, pool: PoolShape) -> int:
        """Return the smallest acceptable number of pages: the user's, or enough for one request of ``max_len`` tokens.

        If the device does not report its memory, the pages must suffice for such a request in every slot.
        """
        if self.config.pages is not None:
            return self.config.pages
        requests = 1 if self.device.is_reported else pool.slots
        return requests * pool.width(self.program.drafter.tree) + 1

    @property
    def is_auto_sized(self) -> bool:
        """Return whether the planner chooses the number of pages to fill the memory."""
        return self.config.pages is None and self.device.is_reported

    def suggest_smaller(self, pool: PoolShape, limit: int, *, is_started: bool = True) -> str:
        """Name settings to lower and their largest values; each one alone makes the plan fit into the limit.

        Args:
            limit: number of bytes that the plan may use.
            is_started: whether the engine had a plan that fitted and then ran out of memory.
        """

        def fits(other: PoolShape) -> bool:
            return self.fewest_pages(other) <= self.pages_that_fit(other, limit)

        remedies = []
        if not (is_started and self.is_auto_sized):  # else the next engine fills freed memory with pages
            largest = {
                "max_len": _largest(pool.max_len - 1, lambda value: fits(replace(pool, max_len=value))),
                "slots": _largest(pool.slots - 1, lambda value: fits(self._of_slots(pool, value))),
            }
            remedies = [f"lower {name} to at most {most}" for name, most in largest.items() if most]
            if pool.copies and fits(replace(pool, copies=0)):
                most = _largest(pool.copies - 1, lambda value: fits(replace(pool, copies=value)))
                remedies.append(f"lower cached_states to at most {most}")
        if self.adapters:
            remedies.append(f"lower adapters or adapter_rank, whose tables take {size(self.adapters)}")
        if (pages := self.pages_that_fit(pool, limit)) >= 2:
            remedies.append(f"pass pages={pages}")
        if not remedies:
            return "not one page is left beside the weights; take quantize= or a smaller model"
        return ", or ".join(remedies)

    def _of_slots(self, pool: PoolShape, slots: int) -> PoolShape:
        """Return pools of fewer slots, and of fewer copies of states if the user gives no number of these."""
        copies = pool.copies * slots // pool.slots if self.config.cached_states is None else pool.copies
        return replace(pool, slots=slots, copies=copies)

    def refuse(self, plan: MemoryPlan, pool: PoolShape) -> NoReturn:
        """Raise an error that names the needed memory, the available memory and smaller settings that fit."""
        states = f", cached_states={pool.copies}" if pool.copies else ""
        raise ValueError(
            f"out of memory: max_len={pool.max_len}, slots={pool.slots}{states} and {pool.pages} pages need "
            f"{size(plan.total)}, available are {size(plan.limit)}, {self.config.memory_fraction:.0%} of the device's "
            f"{size(plan.device)}. {plan}. To fit, {self.suggest_smaller(pool, plan.limit, is_started=False)}"
        )


def fit(planner: MemoryPlanner, pool: PoolShape) -> tuple[PoolShape, MemoryPlan]:
    """Choose the number of pages and plan the memory.

    If the user gives no number and the device reports its memory, the pools get as many pages as fit, up to the number
    that all slots can use. With a prefix cache the bound is `PREFIX_CACHE_FACTOR` times as high. Otherwise the given
    pools are kept.

    Args:
        pool: pools with the number of pages that the user gave, or else with ``max_len`` rows for every slot.

    Raises:
        ValueError: the given pools, or the pages of one request of ``max_len`` tokens, do not fit.
    """
    if planner.is_auto_sized:
        plan = planner.plan(replace(pool, pages=2))
        useful = (pool.pages - 1) * (PREFIX_CACHE_FACTOR if pool.prefix_cache else 1) + 1
        fewest = planner.fewest_pages(pool)
        pool = replace(pool, pages=max(min(useful, planner.pages_that_fit(pool, plan.limit)), fewest))
    plan = planner.plan(pool)
    if plan.total > plan.limit:
        planner.refuse(plan, pool)
    return pool, plan


def measured(planner: MemoryPlanner, pool: PoolShape, programs: Iterable[ProgramMemory]) -> MemoryPlan:
    """Make a plan with a measured workspace, which is the largest temporary memory of any compiled program.

    Args:
        programs: memory of the compiled programs.

    Raises:
        ValueError: the total exceeds the device's memory.
    """
    plan, programs = planner.plan(pool), list(programs)
    known = [program.workspace for program in programs if program.workspace is not None]
    if not known:
        return plan
    workspace, exchanges = max(known) + planner.received(pool), sum(program.exchanges for program in programs)
    plan = replace(plan, workspace=workspace, exchanges=exchanges, is_measured=True)
    if plan.total > plan.device:
        over = plan.total - plan.device
        raise ValueError(
            f"out of memory: the compiled programs need {size(over)} more than the device has. {plan}. To fit, "
            f"{planner.suggest_smaller(pool, planner.plan(pool).total - over)}"
        )
    return plan


@contextmanager
def explain_oom(planner: MemoryPlanner, pool: PoolShape) -> Iterator[None]:
    """Replace an out-of-memory error in this context by one that names settings to lower and their largest values.

    Raises:
        ValueError: device memory ran out although the plan fits; the device's error is the cause.
    """
    try:
        yield
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or "shared memory" in str(error).lower():
            raise  # a kernel exceeds a multiprocessor's shared memory; device memory is not the cause
        plan, asked = planner.plan(pool), _bytes_asked(str(error))
        missing = plan.state // 10 if asked is None else asked
        named = size(missing) + (" or more" if asked is not None else ", for instance, as the device does not say")
        share, most = "", 1000 * (plan.total - missing) // plan.device  # in thousandths of the device's memory
        if planner.is_auto_sized and most > 0:
            share = f", or lower memory_fraction={planner.config.memory_fraction:g} to at most {most / 1000}"
        raise ValueError(
            f"out of memory at start: missing are {named}. {plan}. To free that, "
            f"{planner.suggest_smaller(pool, plan.total - missing)}{share}"
        ) from error


def _bytes_asked(message: str) -> int | None:
    """Read the size of the failed allocation, in bytes, from the allocator's message; None if it has no size."""
    match = re.search(r"alloca\w+ ([\d.]+) ?(bytes|[KMGT]iB)", message)
    return None if match is None else int(float(match[1]) * UNITS[match[2]])


def _caches(tree: object) -> list[object]:
    """Return the states of layers in a slot state."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LayerState))
    return [leaf for leaf in leaves if isinstance(leaf, LayerState)]


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Find the largest value from 1 to ``most`` that fits, or 0. If a value fits, all smaller values must fit."""
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        low, most = (middle, most) if fits(middle) else (low, middle - 1)
    return low
