"""The Hopper kernel of `prompt_attention`, written for Mosaic GPU.

Terms: a CTA is one Pallas program. It has three warpgroups: two compute, the third one loads. A computing warpgroup has
64 query rows: the 16 tokens of a block, for 4 query heads of one KV head; if 4 does not divide the heads of a KV head,
the tokens of 2 or 4 blocks, for 2 heads or 1. A tile is some cache rows of one sequence, for one KV head. The loader
fetches tiles of K and V, page by page; both computing warpgroups read each tile.

With 4 query heads per KV head the two computing warpgroups have two blocks, with 8 they share one. If blocks belong to
different sequences, the loader fetches the tiles of the first sequence, then those of the next one (`prompt_steps`). So
each warpgroup computes in an interval of the steps, and skips the others.

The two warpgroups take turns on the tensor cores, so that one multiplies while the other one computes its softmax; the
method is that of FlashAttention-3 (arXiv:2407.08608, section 3.1).
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.prompt_steps import COMPUTING, ROWS, PromptSizes, Refs, Span, at_step, spans_of

STAGES = 2  # tiles of K, and as many of V, in shared memory
COMPUTE_REGISTERS, LOAD_REGISTERS = 232, 40  # per thread; together they fill a multiprocessor
MOST_COLUMNS = 128  # of values that are in registers at once besides the sums
FAR = 2**30  # more rows than a sequence has
LEAST = -1e30  # maximum of no scores; finite, because the difference of two infinities is NaN


class Memory(NamedTuple):
    """The shared memory of a CTA, with its barriers."""

    q: Any  # [computing, ROWS, dim], also the output
    k: Any  # [stages, tile, dim]
    v: Any
    q_arrived: Any
    k_arrived: Any
    v_arrived: Any
    k_done: Any
    v_done: Any
    turn: Any  # passed by both computing warpgroups when the tensor cores change hands


class _PromptCta:
    """The operations of one CTA."""

    def __init__(self, refs: Refs, memory: Memory, sizes: PromptSizes, scale: float, interpret: bool) -> None:
        from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

        self.plgpu, self.refs, self.memory, self.sizes, self.interpret = plgpu, refs, memory, sizes, interpret
        self.factor = scale * math.log2(math.e)  # of scores, whose exponentials are powers of two
        self.group, part = lax.axis_index("warpgroup"), lax.axis_index("part")
        self.kv_head = lax.div(part, sizes.parts)
        self.part = lax.rem(part, sizes.parts)  # of the query heads of the KV head
        # The last blocks have the most rows to read: they begin first.
        first = (pl.cdiv(refs.q.shape[0], sizes.blocks) - 1 - lax.axis_index("blocks")) * sizes.blocks
        self.blocks = [first + index for index in range(sizes.blocks)]
        self.spans = spans_of(self.blocks, refs, sizes)
        self.steps = self.spans[-1].steps[1]

    def load_tiles(self) -> None:
        """Fetches the tiles of all steps, as soon as their place in shared memory is free."""
        refs, memory, sizes = self.refs, self.memory, self.sizes
        columns = refs.page_table.shape[1]

        def pages_of(step):
            block = at_step(step, self.spans, self.blocks)
            column = (step + at_step(step, self.spans, [span.base for span in self.spans])) * sizes.pages
            return [refs.page_table[block, jnp.minimum(column + i, columns - 1)] for i in range(sizes.pages)]

        def load(step, pages):
            following = pages_of(jnp.minimum(step + 1, self.steps - 1))  # read while this step waits
            slot = lax.rem(step, STAGES)
            for pool, tiles, arrived, done in (
                (refs.k, memory.k, memory.k_arrived, memory.k_done),
                (refs.v, memory.v, memory.v_arrived, memory.v_done),
            ):
                pl.when(step >= STAGES)(functools.partial(self.plgpu.barrier_wait, done.at[slot]))
                for i, page in enumerate(pages):
                    target = tiles.at[slot, pl.ds(i * sizes.page, sizes.page)]
                    self.plgpu.copy_gmem_to_smem(pool.at[page, self.kv_head], target, arrived.at[slot])
            return following

        lax.fori_loop(0, self.steps, load, pages_of(jnp.int32(0)))

    def attend(self) -> None:
        """Computes the attention of this warpgroup's rows, and stores it."""
        plgpu, sizes, refs = self.plgpu, self.sizes, self.refs
        joined = sizes.joined
        blocks, spans = self.blocks[:joined], self.spans[:joined]
        head = self.kv_head * sizes.group + self.part * (sizes.group // sizes.parts)
        if sizes.shares_blocks:
            head += self.group * sizes.heads
        else:
            blocks, spans = (
                jax.tree.map(functools.partial(jnp.where, self.group == 1), both[joined:], both[:joined])
                for both in (self.blocks, self.spans)
            )
        places = [(block, head + i) for block in blocks for i in range(sizes.heads)]
        rows = [self.memory.q.at[self.group, pl.ds(i * sizes.tokens, sizes.tokens)] for i in range(len(places))]
        for (block, of), part in zip(places, rows, strict=True):
            plgpu.copy_gmem_to_smem(refs.q.at[block, :, of], part, self.memory.q_arrived.at[self.group])
        plgpu.barrier_wait(self.memory.q_arrived.at[self.group])

        out = self.attended(spans)
        self.memory.q[self.group] = out.astype(refs.out.dtype)
        plgpu.commit_smem()
        for (block, of), part in zip(places, rows, strict=True):
            plgpu.copy_smem_to_gmem(part, refs.out.at[block, :, of])
        plgpu.wait_smem_to_gmem(0)

    def attended(self, spans: list[Span]) -> jax.Array:
        """Returns the attention of this warpgroup's rows [ROWS, dim] in float32; ``spans`` are those of its blocks."""
        layout = self.plgpu.Layout.WGMMA
        carry = (
            self.plgpu.layout_cast(jnp.zeros((ROWS, self.sizes.dim), jnp.float32), layout),  # sum of weighted values
            self.plgpu.layout_cast(jnp.full((ROWS,), LEAST, jnp.float32), layout.reduce(1)),  # largest score
            self.plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)),  # sum of weights
        )
        begin, stop = spans[0].steps[0], spans[-1].steps[1]
        # All queries see all rows of the tiles before the first block's first row, if there is no window.
        masked = begin
        if self.sizes.window is None:
            masked = jnp.clip(lax.div(spans[0].first, self.sizes.tile) - spans[0].base, begin, stop)
            if len(spans) > 1:  # and if all blocks belong to one sequence
                masked = jnp.where(spans[0].switch == spans[-1].switch, masked, begin)
        step = functools.partial(self.step, spans)
        pl.when(self.group == 1)(self.pass_turn)  # the first warpgroup has the first turn
        lax.fori_loop(0, begin, self.skip, None)
        carry = lax.fori_loop(begin, masked, functools.partial(step, is_masked=False), carry)
        out, _, total = lax.fori_loop(masked, stop, functools.partial(step, is_masked=True), carry)
        lax.fori_loop(stop, self.steps, self.skip, None)
        pl.when(self.group == 0)(self.pass_turn)
        return out * lax.broadcast_in_dim(jnp.where(total > 0, 1 / total, 0.0), out.shape, [0])

    def pass_turn(self) -> None:
        self.plgpu.barrier_arrive(self.memory.turn)
        self.plgpu.barrier_wait(self.memory.turn)

    def skip(self, step: Any, _: None) -> None:
        """Takes part in a step whose tile this warpgroup does not read."""
        slot = lax.rem(step, STAGES)
        for arrived, done in (
            (self.memory.k_arrived, self.memory.k_done),
            (self.memory.v_arrived, self.memory.v_done),
        ):
            self.plgpu.barrier_wait(arrived.at[slot])
            self.plgpu.barrier_arrive(done.at[slot])
            self.pass_turn()

    def step(self, spans: list[Span], step: Any, carry: Any, *, is_masked: bool) -> Any:
        """Adds a tile to the weighted sum of values, by the online softmax; arrays as in `attended`."""
        plgpu, memory = self.plgpu, self.memory
        out, most, total = carry
        slot, tile = lax.rem(step, STAGES), self.sizes.tile
        plgpu.barrier_wait(memory.k_arrived.at[slot])
        scores = pl.run_scoped(functools.partial(self.scores, slot), plgpu.ACC((ROWS, tile), jnp.float32))
        plgpu.barrier_arrive(memory.k_done.at[slot])
        if is_masked:
            span = Span(*(at_step(step, spans, list(values)) for values in zip(*spans, strict=True)))
            first_row = (step + span.base) * tile
            scores = jnp.where(self.visible(spans, span, first_row), scores, -jnp.inf)
        old, most = most, jnp.maximum(most, scores.max(axis=1) * self.factor)
        weights = jnp.exp2(scores * self.factor - lax.broadcast_in_dim(most, scores.shape, [0]))
        shrink = jnp.exp2(old - most)
        out *= lax.broadcast_in_dim(shrink, out.shape, [0])
        total = total * shrink + weights.sum(axis=1)
        # Keep the softmax before the turn: the compiler must not move it behind the barrier.
        out, most, total, weights = lax.optimization_barrier((out, most, total, weights.astype(memory.v.dtype)))
        plgpu.barrier_arrive(memory.turn)
        plgpu.barrier_wait(memory.v_arrived.at[slot])
        plgpu.barrier_wait(memory.turn)
        if is_masked:
            self.clear_unseen_values(span, slot, first_row)
        out = self.add_values(out, weights, slot)
        plgpu.barrier_arrive(memory.v_done.at[slot])
        return out, most, total

    def scores(self, slot: Any, sums: Any) -> jax.Array:
        """Returns q @ k.T [ROWS, tile]; the other warpgroup's turn begins when this product has been issued."""
        self.plgpu.wgmma(sums, self.memory.q.at[self.group], self.memory.k.at[slot].T)
        self.pass_turn()
        return sums[...]

    def visible(self, spans: list[Span], span: Span, first_row: Any) -> jax.Array:
        """Returns which rows of a tile each query sees [ROWS, tile]; ``span`` is that of a block of its sequence."""
        iota = functools.partial(self.plgpu.broadcasted_iota, jnp.int32, layout=self.plgpu.Layout.WGMMA)
        shape, index = (ROWS, self.sizes.tile), iota((ROWS, self.sizes.tile), 0)
        first = span.first
        if len(spans) > 1:  # the queries of blocks of other sequences are before all rows
            first, *others = (jnp.where(block.switch == span.switch, block.first, -FAR) for block in spans)
            for i, later in enumerate(others):
                first = jnp.where(index >= (i + 1) * (ROWS // len(spans)), later, first)
        query, row = (index & (self.sizes.tokens - 1)) + first, iota(shape, 1) + first_row
        seen = (row <= query) & (row < span.end)
        return seen if self.sizes.window is None else seen & (row > query - self.sizes.window)

    def clear_unseen_values(self, span: Span, slot: Any, first_row: Any) -> None:
        """Writes zeros over the rows of a tile of V that no query of this CTA sees.

        They may hold NaN, and 0 * NaN is NaN. The other warpgroup writes the same zeros in its own turn.
        """
        tile, columns = self.sizes.tile, min(self.sizes.dim, MOST_COLUMNS)

        @pl.when((first_row + tile > span.end) | (first_row < span.lowest))
        def _():
            for start, column in itertools.product(range(0, tile, ROWS), range(0, self.sizes.dim, columns)):
                values = self.memory.v.at[slot, pl.ds(start, ROWS), pl.ds(column, columns)]
                layout = self.plgpu.Layout.WGMMA
                row = self.plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout) + (first_row + start)
                seen = (row < span.end) & (row >= span.lowest)
                values[...] = jnp.where(seen, values[...], jnp.zeros((), values.dtype))
            self.plgpu.commit_smem()

    def add_values(self, out: jax.Array, weights: jax.Array, slot: Any) -> jax.Array:
        """Returns out + weights @ v."""
        if self.interpret:  # the interpreter supports neither this product nor `ACC.init`
            values = self.memory.v[slot].astype(jnp.float32)
            self.plgpu.commit_smem()
            return out + weights.astype(jnp.float32) @ values

        def multiply(sums):
            self.plgpu.wgmma(sums, weights, self.memory.v.at[slot])

        return pl.run_state(multiply)(self.plgpu.ACC.init(out))


def attend_prompts(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    first_row: jax.Array,
    sequence: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
    window: int | None,
    interpret: Any = False,
) -> jax.Array:
    """Runs the kernel; the arguments are those of `prompt_attention`.

    Args:
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    (blocks, tokens, heads, dim), (_, kv_heads, page, _) = q.shape, k_pool.shape
    sizes = PromptSizes(tokens, heads // kv_heads, page, dim, window)

    def shared(*shape):
        transforms = plgpu.TilingTransform((8, ROWS)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, q.dtype, transforms=transforms)

    def barrier(arrivals, count):
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    def kernel(refs, *memory):
        cta = _PromptCta(refs, Memory(*memory), sizes, scale, bool(interpret))

        @pl.when(cta.group == COMPUTING)
        def _():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            cta.load_tiles()

        @pl.when(cta.group < COMPUTING)
        def _():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            cta.attend()

    def entry(*refs):
        pl.run_scoped(
            functools.partial(kernel, Refs(*refs)),
            shared(COMPUTING, ROWS, dim),
            *[shared(STAGES, sizes.tile, dim)] * 2,
            barrier(sizes.heads * sizes.joined, COMPUTING),
            *[barrier(sizes.pages, STAGES)] * 2,
            *[barrier(COMPUTING, STAGES)] * 2,
            plgpu.Barrier(num_arrivals=COMPUTING),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(kv_heads * sizes.parts, math.ceil(blocks / sizes.blocks)),
        grid_names=("part", "blocks"),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        kernel_name="prompt_attention",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )(q, k_pool, v_pool, page_table, first_row, sequence, ends)
