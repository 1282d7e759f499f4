"""Compare prefills of pieces of several prompts with the prefill of each whole prompt in one block of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DFlash, Drafter, DraftModel, Eagle, Eagle3, Medusa, Model, NGram, Suffix, Tree
from jspec.core import prompt_blocks
from jspec.core.prefill_input import PrefillInput, PromptPiece
from jspec.core.records import Draft, LogProbs, PromptBatch, SlotState
from jspec.models.parts.kv_pool import PoolShape
from jspec.step import prefill
from jspec.step.program import Params, Program, init_state, view_of
from pallas_kernels.attention.append_attention import MOST_ROWS
from tests.support import tiny
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

VOCAB, LONGEST, SLOTS, SIZE = 16, 60, 4, 64  # LONGEST: most tokens of a prompt; SIZE: tokens of a prefill
TOLERANCE = 1e-4  # float32 log-probabilities of differently shaped programs
DRAFTERS: dict[str, Callable[[Model, Tree], Drafter]] = {
    "eagle3": lambda target, tree: Eagle3(tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1)), tree),
    "eagle": lambda target, tree: Eagle(tiny.eagle1_head(target), tree),
    "draft model": lambda target, tree: DraftModel(tiny.model(VOCAB, layers=1, seed=1), tree),
    "dflash": lambda target, tree: DFlash(tiny.dflash_head(target, block_size=4, feature_layers=(0, 1)), tree),
    "medusa": lambda target, tree: Medusa(tiny.medusa_heads(target, 3), tree),
    "ngram": lambda target, tree: NGram(tree),
    "suffix": lambda target, tree: Suffix(tree),
}
CHAIN, DYNAMIC, STATIC = Tree.chain(2), Tree.topk(7, 3, 2), Tree.static([(0,), (1,), (0, 0)])
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}  # compiles in half the time


@dataclass(frozen=True)
class PrefillCase:
    """Compiled programs of a drafter: a prefill of blocks, a prefill of one block, and their drafts."""

    params: Params
    pool: PoolShape
    state: SlotState  # all pages hold NaN
    run: Callable[..., Any]
    alone: Callable[..., Any]
    state_alone: SlotState
    draft: Callable[[SlotState, Any], Draft]
    deterministic: bool


def make_case(
    name: str, tree: Tree, page: int, target: Model | None = None, *, deterministic: bool = False
) -> PrefillCase:
    """Compile a case; its prefills return the log-probabilities of all tokens at all positions."""
    options = QUICK if target is None else None  # in the quick programs, sums often have the same order
    target = target or tiny.model(VOCAB)
    dtype = str(target.embed.dtype)
    drafter = DRAFTERS[name](target, tree)
    program = Program(
        drafter,
        drafter.feature_layers(target),
        "coupled",
        "reference",
        logprobs="raw_logprobs",
        prompt_logprobs=True,
        deterministic=deterministic,
    )
    params = Params(target=target, draft=drafter.bind(target))
    width = -(-(LONGEST + tree.scratch_rows) // page)
    pools = [
        PoolShape(SLOTS, SLOTS * width + 3, page, LONGEST, dtype, dtype, prefix_cache=True),
        PoolShape(1, 2, LONGEST + tree.scratch_rows, LONGEST, dtype, dtype, prefix_cache=True),
    ]
    states = [init_state(program, params, pool) for pool in pools]

    def with_nan(leaf: jax.Array) -> jax.Array:
        is_paged = leaf.shape[:1] == (pools[0].pages,) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.full_like(leaf, jnp.nan) if is_paged else leaf

    options = program.compiler_options or options
    run, alone = (jax.jit(partial(prefill.prefill_step, program), compiler_options=options) for _ in range(2))

    def draft(state: SlotState, slots: Any) -> Draft:
        return drafter.draft(params.draft, state.draft, view_of(state, slots, program))[0]

    state = jax.tree.map(with_nan, states[0])
    return PrefillCase(
        params, pools[0], state, run, alone, states[1], jax.jit(draft, compiler_options=QUICK), deterministic
    )


case = cache(make_case)


def distributions(scores: LogProbs) -> np.ndarray:
    """Return the log-probability of each token at each position, [positions, VOCAB]."""
    found = np.full((len(scores.top_ids), VOCAB), np.nan, np.float32)
    np.put_along_axis(found, np.asarray(scores.top_ids), np.asarray(scores.top), axis=-1)
    return found


@dataclass
class Prompt:
    """A prompt in a slot, and how much of it was prefilled."""

    tokens: list[int]
    slot: int
    pages: np.ndarray
    start: int = 0  # number of tokens before the next piece
    cached: int = 0  # number of rows in pages of ``parent``
    parent: Prompt | None = None

    @property
    def filled(self) -> int:
        """The number of rows at the beginning of the prompt's pages that were written."""
        inherited = self.cached if self.parent is None else self.parent.filled
        return max(self.start, self.cached) if inherited >= self.cached else inherited

    @property
    def is_ready(self) -> bool:
        """Whether the prompt has tokens left and its shared pages are filled, or will be by the pieces before."""
        return self.start < len(self.tokens) and self.filled >= self.cached

    def piece(self, count: int) -> PromptPiece:
        end = self.start + count
        is_last = end == len(self.tokens)
        return tiny.prompt_piece(
            count,
            page_row=self.pages,
            slot=self.slot,
            start=np.int32(self.start),
            last=np.int32(is_last),
            write=np.int32(self.start >= self.cached),
            root=np.int32(-1 if is_last else self.tokens[end]),
        )


def random_prompts(one: PrefillCase, rng: np.random.Generator) -> list[Prompt]:
    """Return prompts of random lengths in random pages; some begin with full pages of an earlier prompt."""
    page, width = one.pool.page_size, one.state.page_table.shape[1]
    free = (1 + rng.permutation(one.pool.pages - 1)).tolist()
    slots, made = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist(), list[Prompt]()
    for slot in slots:
        tokens = rng.integers(0, VOCAB, rng.choice([1, rng.integers(1, LONGEST + 1), 16, 17])).tolist()
        row = np.array([free.pop() for _ in range(width)], np.int32)
        new = Prompt(tokens, slot, row)
        if made and rng.random() < 0.6:
            new.parent = made[rng.integers(len(made))]
            shared = int(rng.integers(0, len(new.parent.tokens) // page + 1))
            new.cached, row[:shared] = shared * page, new.parent.pages[:shared]
            new.tokens = [*new.parent.tokens[: new.cached], *tokens[: rng.integers(0, LONGEST + 1 - new.cached)]]
            new.tokens = new.tokens or tokens
            new.start = min(new.cached, len(new.tokens) - 1)
        made.append(new)
    return made


def random_counts(prompts: Sequence[Prompt], rng: np.random.Generator, size: int = SIZE) -> list[tuple[Prompt, int]]:
    """Choose pieces of prompts that fit into one prefill, in the order of the prompts."""
    blocks, rows = prompt_blocks.block_rows(size)
    chosen, starts = [], {id(one): one.start for one in prompts}
    for one in prompts:
        if not blocks or not one.is_ready:
            continue
        count = int(rng.integers(1, min(len(one.tokens) - one.start, blocks * rows) + 1))
        if rng.random() < 0.5:
            count = min(len(one.tokens) - one.start, blocks * rows)
        chosen.append((one, count))
        one.start += count  # so that a later prompt may share the pages that this piece fills
        blocks -= -(-count // rows)
    for one in prompts:
        one.start = starts[id(one)]
    return chosen


def run_pieces(
    one: PrefillCase, state: SlotState, chosen: Sequence[tuple[Prompt, int]]
) -> tuple[SlotState, list[np.ndarray]]:
    """Run one prefill; return the state, and the distributions after each token of each piece."""
    pieces = [prompt.piece(count) for prompt, count in chosen]
    tokens = [prompt.tokens[prompt.start :][:count] for prompt, count in chosen]
    state, output = one.run(one.params, state, PrefillInput.pack(pieces, tokens, SIZE, slots=SLOTS))
    output = jax.tree.map(np.asarray, output)
    found, first = list[np.ndarray](), 0
    for index, (prompt, count) in enumerate(chosen):
        found.append(distributions(output.prompt.part(first, first + count)))
        # The distribution of the sampled token; among other rows its product may have other last bits.
        sampled = distributions(jax.tree.map(lambda field, row=index: field[0, row], output.logprobs))
        np.testing.assert_allclose(sampled, found[-1][-1:], rtol=0 if one.deterministic else 2e-6)
        first += -(-count // prompt_blocks.BLOCK) * prompt_blocks.BLOCK
        prompt.start += count
    return state, found


class Oracle:
    """Prefills of one prompt, in pieces of at most ``size`` tokens, each in one block of rows in a cache of its own."""

    def __init__(self, one: PrefillCase, size: int = LONGEST) -> None:
        self.one, self.size = one, size

    def __call__(self, tokens: list[int]) -> tuple[np.ndarray, SlotState]:
        state, prompt, found = self.one.state_alone, Prompt(tokens, 0, np.ones(1, np.int32)), list[np.ndarray]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompt_blocks, "BLOCK", self.size)
            while prompt.start < len(tokens):
                count = min(self.size, len(tokens) - prompt.start)
                own = tokens[prompt.start :][:count]
                packed = PrefillInput.pack([prompt.piece(count)], [own], self.size, slots=1)
                state, output = self.one.alone(self.one.params, state, packed)
                found.append(distributions(output.prompt)[:count])
                prompt.start += count
        return np.concatenate(found), state


def check_mixes(one: PrefillCase, prefills: int, seed: int = 0) -> int:
    """Compare random mixes of pieces with the oracle; return how many pieces shared pages of their own prefill."""
    rng, oracle, done, hits = np.random.default_rng(seed), Oracle(one), 0, 0
    while done < prefills:
        prompts, state = random_prompts(one, rng), one.state
        expected = [oracle(prompt.tokens) for prompt in prompts]
        while any(prompt.start < len(prompt.tokens) for prompt in prompts):
            begun = {id(prompt): prompt.filled for prompt in prompts}
            chosen = random_counts(prompts, rng)
            hits += sum(p.parent is not None and begun[id(p.parent)] < p.cached for p, _ in chosen)
            state, found = run_pieces(one, state, chosen)
            done += 1
            for (prompt, count), values in zip(chosen, found, strict=True):
                wanted = expected[prompts.index(prompt)][0][prompt.start - count : prompt.start]
                np.testing.assert_allclose(values, wanted, atol=TOLERANCE)
        drafts = one.draft(state, on_device([prompt.slot for prompt in prompts] + [SLOTS] * (SLOTS - len(prompts))))
        for row, (_, alone) in enumerate(expected):
            wanted = one.draft(alone, on_device(np.zeros(1, jnp.int32)))
            np.testing.assert_array_equal(drafts.valid[row], wanted.valid[0])
            np.testing.assert_array_equal(np.where(drafts.valid[row], drafts.tokens[row], 0), wanted.tokens[0])
            np.testing.assert_allclose(drafts.scores[row], wanted.scores[0], atol=TOLERANCE)
    return hits


@pytest.mark.parametrize(
    ("name", "tree", "page", "prefills"),
    [
        ("eagle3", DYNAMIC, 4, 20),
        ("draft model", CHAIN, 1, 20),
        ("suffix", DYNAMIC, 16, 20),
        ("dflash", DYNAMIC, 4, 20),
        *(
            pytest.param(name, tree, page, 200, marks=pytest.mark.matrix)
            for name in DRAFTERS
            for tree in (CHAIN, STATIC if name == "medusa" else DYNAMIC)
            for page in (1, 16, 64)
        ),
    ],
    ids=str,
)
def test_pieces_of_several_prompts_have_the_logits_and_drafts_of_whole_prompts(
    name: str, tree: Tree, page: int, prefills: int
) -> None:
    """Every page holds NaN at first. Prompts share pages, also pages that the same prefill fills."""
    assert check_mixes(case(name, tree, page), prefills) > prefills // 20 or page == 64


BLOCKS = prefill._blocks


def swap_page_rows(*arguments: Any) -> PromptBatch:
    """Exchange the page tables of the first two blocks, if there are several."""
    batch = BLOCKS(*arguments)
    return batch.replace(page_table=jnp.concatenate([batch.page_table[:2][::-1], batch.page_table[2:]]))


def shift_rows(*arguments: Any) -> PromptBatch:
    """Put all blocks but those at the beginning of a text one row too early."""
    batch = BLOCKS(*arguments)
    return batch.replace(first_row=jnp.maximum(batch.first_row - 1, 0))


def mix_pieces(*arguments: Any) -> PromptBatch:
    """Take each prompt's logits from the last row of the prefill."""
    batch = BLOCKS(*arguments)
    return batch.replace(newest=jnp.full_like(batch.newest, SIZE - 1))


@pytest.mark.parametrize("broken", [swap_page_rows, shift_rows, mix_pieces], ids=lambda wrong: wrong.__name__)
def test_comparison_with_wrongly_assigned_blocks_fails(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., PromptBatch]
) -> None:
    """Negative controls."""
    monkeypatch.setattr(prefill, "_blocks", broken)
    with pytest.raises(AssertionError):
        check_mixes(make_case("ngram", CHAIN, 4), 20)


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_prefill_has_equal_bits_in_any_packing(deterministic: bool) -> None:
    """The oracle prefills token by token. Without ``deterministic`` some bits differ."""
    target = jax.tree.map(lambda x: x.astype("bfloat16"), tiny.model(VOCAB, hidden=64))
    one = make_case("ngram", CHAIN, 4, target, deterministic=deterministic)
    rng, is_equal = np.random.default_rng(0), []
    for _ in range(3):
        prompts, state = random_prompts(one, rng), one.state
        expected = [Oracle(one, size=1)(prompt.tokens)[0] for prompt in prompts]
        while any(prompt.start < len(prompt.tokens) for prompt in prompts):
            chosen = random_counts(prompts, rng)
            state, found = run_pieces(one, state, chosen)
            for (prompt, count), values in zip(chosen, found, strict=True):
                wanted = expected[prompts.index(prompt)][prompt.start - count : prompt.start]
                is_equal.append(np.array_equal(values, wanted))
    assert all(is_equal) == deterministic


def test_blocks_of_a_prefill_are_longer_than_the_rows_of_the_kernel_that_writes_and_reads() -> None:
    """That kernel would let a block read cache rows that another block has not written yet."""
    assert MOST_ROWS < prompt_blocks.BLOCK


@pytest.mark.parametrize("size", [1, 5, 16, 17, 24, 40, 64])
def test_packed_pieces_unpack_to_the_same_values(size: int) -> None:
    blocks, rows = prompt_blocks.block_rows(size)
    assert (blocks - 1) * rows < size <= blocks * rows and rows <= prompt_blocks.BLOCK
    pieces = [tiny.prompt_piece(1, page_row=[3, 4], slot=n, temperature=np.float32(0.1 + n)) for n in range(blocks)]
    packed = PrefillInput.pack(pieces, [[7 + n] for n in range(blocks)], size, slots=blocks + 1)
    assert [shape.shape for shape in PrefillInput.shapes(size, slots=blocks + 1, pages=2)] == [x.shape for x in packed]
    unpacked = packed.unpack()
    jax.tree.map(np.testing.assert_array_equal, unpacked.pieces, jax.tree.map(lambda *row: np.stack(row), *pieces))
    np.testing.assert_array_equal(unpacked.tokens[:, 0], 7 + np.arange(blocks))
