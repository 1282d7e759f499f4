"""Test the gated delta rule over rounds of drafts against its recurrence in float64; broken states must differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.ancestors import ancestors, depths
from jspec.core.numerics import REFERENCE, Numerics
from jspec.core.records import PromptBatch, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree
from jspec.models.kv_cache import commit
from jspec.models.parts.conv_state import ConvState
from jspec.models.parts.delta_state import DeltaState, run_tokens
from jspec.models.parts.kv_pool import PoolShape
from pallas_kernels.attention.ancestor_bits import ancestor_bits
from pallas_kernels.recurrent.gated_delta import fold
from pallas_kernels.recurrent.records import EVERY, DeltaTokens
from tests.support.arrays import on_device
from tests.support.views import view_of_rows

KEY_HEADS, HEADS, KEY_DIM, DIM, SLOTS = 2, 6, 8, 12, 3
TOLERANCE = 5e-6  # largest error in float32 was 7e-7
LEAST = 1e-3  # a broken state moves some output by more
CHAIN, TREE = Tree.chain(4), Tree.topk(7, 3, 2)
PARENTS = {"chain": [-1, 0, 1, 2, 3], "tree": [-1, 0, 0, 1, 1, 2, 3]}
TEXTS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "usual": lambda rng: {},
    "decay near 1": lambda rng: {"decay": -1e-4},
    "decays near 0": lambda rng: {"decay": -rng.uniform(0, 320) if rng.random() < 0.1 else -rng.uniform(0, 50)},
    "equal keys": lambda rng: {"decay": 0.0, "rate": 1.0, "key": np.eye(KEY_DIM)[0]},
    "keys of zeros": lambda rng: {"key": np.zeros(KEY_DIM)} if rng.random() < 0.5 else {},
    "rates 0 or 1": lambda rng: {"rate": float(rng.integers(2))},
    "no rates": lambda rng: {"rate": None},  # the rule of Mamba 2
}


def token(rng: np.random.Generator, text: str, dims: tuple[int, int] = (KEY_DIM, DIM)) -> dict[str, np.ndarray]:
    """Draw the inputs of one token, for all heads, whose keys and values have some numbers of channels."""
    made, (key_dim, dim) = TEXTS[text](rng), dims
    keys = (
        np.broadcast_to(made["key"], (KEY_HEADS, key_dim))
        if "key" in made
        else rng.standard_normal((KEY_HEADS, key_dim))
    )
    queries = rng.standard_normal((KEY_HEADS, key_dim))
    keys, queries = (rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-9) for rows in (keys, queries))
    return {
        "queries": queries.astype(np.float32),
        "keys": keys.astype(np.float32),
        "values": rng.standard_normal((HEADS, dim)).astype(np.float32),
        "decays": np.full(HEADS, made.get("decay", -rng.exponential(0.1)), np.float32),
        "rates": None if made.get("rate", 0) is None else np.full(HEADS, made.get("rate", rng.random()), np.float32),
    }


def advanced(state: np.ndarray, of: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return state and output of the heads after a token, by the recurrence."""
    keys, queries = (np.repeat(of[name].astype(float), HEADS // KEY_HEADS, axis=0) for name in ("keys", "queries"))
    state = state * np.exp(of["decays"].astype(float))[:, None, None]
    values = of["values"].astype(float)
    if of["rates"] is not None:
        values = of["rates"].astype(float)[:, None] * (values - np.einsum("hkv,hk->hv", state, keys))
    state = state + keys[:, :, None] * values[:, None]
    return state, np.einsum("hkv,hk->hv", state, queries)


def stacked(tokens: list[list[dict[str, np.ndarray]]]) -> DeltaTokens:
    """Return the inputs of several rows of tokens, [batch, heads, tokens, ...]."""
    names = [name for name in DeltaTokens._fields if tokens[0][0][name] is not None]
    fields = {name: np.stack([[of[name] for of in row] for row in tokens]) for name in names}
    return DeltaTokens(**{"rates": None} | {name: on_device(np.swapaxes(of, 1, 2)) for name, of in fields.items()})


@cache
def steps(tree: Tree) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the compiled run of some tokens, and the commit of a round."""

    @jax.jit
    def verify(state: DeltaState, new: DeltaTokens, batch: TokenBatch) -> Any:
        return run_tokens(state, new, batch)

    @jax.jit
    def accept(state: DeltaState, view: SlotView, verdict: Verdict) -> DeltaState:
        return commit([state], tree, view, verdict)[0]

    return verify, accept


class DeltaRounds:
    """Random texts in slots, whose states are compared with the recurrence at every node."""

    def __init__(
        self,
        name: str,
        text: str,
        *,
        numerics: Numerics = REFERENCE,
        dims: tuple[int, int] = (KEY_DIM, DIM),
        seed: int = 0,
    ) -> None:
        self.rng, self.text, self.dims = np.random.default_rng(seed), text, dims
        self.tree, self.parents = (CHAIN, PARENTS["chain"]) if name == "chain" else (TREE, PARENTS["tree"])
        self.nodes = len(self.parents)
        pool = PoolShape(SLOTS, 2, 16, 512, "float32", "float32", round_rows=self.nodes)
        inputs = ConvState.zeros(pool, 1, 2)
        state = DeltaState.zeros(pool, (KEY_HEADS, HEADS), dims, inputs)
        self.state = jax.tree.map(lambda rows: jnp.full_like(rows, np.nan), state)  # of requests before
        self.numerics = numerics
        self.run, self.accept = steps(self.tree)
        self.committed: dict[int, list[dict[str, np.ndarray]]] = {}
        self.wanted: dict[int, list[np.ndarray]] = {}  # the states before, after one, after two, ... committed tokens
        self.outputs: list[np.ndarray] = []
        self.error = 0.0

    def add(self, slot: int, tokens: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
        """Commit tokens to the text of a slot, and return their outputs by the recurrence."""
        outputs = []
        for of in tokens:
            state, output = advanced(self.wanted[slot][-1], of)
            self.committed[slot].append(of)
            self.wanted[slot].append(state)
            outputs.append(output)
        return outputs

    def compare(self, found: Any, wanted: Any) -> None:
        error = np.abs(np.asarray(found, np.float64) - wanted).max()
        self.error = max(self.error, error if np.isfinite(error) else np.inf)

    def drawn(self, count: int) -> list[dict[str, np.ndarray]]:
        return [token(self.rng, self.text, self.dims) for _ in range(count)]

    def prompt(self, slot: int, pieces: list[int], text: list[dict[str, np.ndarray]] | None = None) -> None:
        """Run a prompt in pieces of some lengths, a random one or the beginning of a text."""
        self.committed[slot], self.wanted[slot], self.outputs = [], [np.zeros((HEADS, *self.dims))], []
        text = self.drawn(sum(pieces)) if text is None else text
        for count in pieces:
            start = len(self.committed[slot])
            new = text[start : start + count]
            size = -(-count // 16) * 16
            padding = self.drawn(size - count)
            blocks = np.arange(size).reshape(-1, 16)
            batch = PromptBatch(
                tokens=on_device(blocks),
                positions=on_device(start + blocks),
                valid=on_device(blocks < count),
                first_row=on_device(start + blocks[:, 0]),
                page_table=jnp.zeros((len(blocks), 1), jnp.int32),
                bits=None,
                numerics=self.numerics,
                slots=on_device(np.array([slot])),
                piece=jnp.zeros(len(blocks), jnp.int32),
                starts=on_device(np.array([start])),
                ends=on_device(np.array([start + count])),
                newest=on_device(np.array([count - 1])),
            )
            every = (new + padding)[:size]
            rows = stacked([every[first : first + 16] for first in range(0, size, 16)])
            outputs, self.state = self.run(self.state, rows, batch)
            flat = np.swapaxes(np.asarray(outputs), 1, 2).reshape(size, HEADS, -1)
            self.outputs += list(flat[:count])
            self.compare(flat[:count], np.stack(self.add(slot, new)))

    def follow(self, slot: int, text: list[dict[str, np.ndarray]], others: Sequence[int] = ()) -> None:
        """Run a round whose first path has the next tokens of a text, and commit some of them.

        Other slots have random drafts in the same batch.
        """
        nodes, start = self.path(self.nodes - 1), len(self.committed[slot])
        draft = self.drawn(self.nodes)
        for depth, node in enumerate(nodes):
            draft[node] = text[start + depth]
        taken = nodes[: self.rng.integers(1, len(nodes) + 1)]
        drafts = [*(self.drawn(self.nodes) for _ in others), draft]
        self.outputs += list(self.round([*others, slot], drafts, [*([0] for _ in others), taken])[-1][taken])

    def round(
        self,
        slots: list[int],
        drafts: list[list[dict[str, np.ndarray]]] | None = None,
        chosen: list[list[int]] | None = None,
        *,
        change: Callable[[TokenBatch], TokenBatch] = lambda batch: batch,
    ) -> np.ndarray:
        """Verify drafts of some slots, commit paths of them, and return all outputs; drafts and paths may be random."""
        drafts = [self.drawn(self.nodes) for _ in slots] if drafts is None else drafts
        parents = np.broadcast_to(np.array(self.parents, np.int32), (len(slots), self.nodes))
        lengths = on_device(np.array([len(self.committed[slot]) for slot in slots], np.int32))
        index = on_device(np.array(slots, np.int32))
        batch = TokenBatch(
            tokens=jnp.zeros(parents.shape, jnp.int32),
            positions=lengths[:, None] + depths(ancestors(parents)),
            valid=jnp.ones(parents.shape, bool),
            first_row=lengths,
            page_table=jnp.zeros((len(slots), 1), jnp.int32),
            bits=None if self.tree.is_chain else ancestor_bits(parents),
            numerics=self.numerics,
            slots=index,
        )
        outputs, self.state = self.run(self.state, stacked(drafts), change(batch))
        paths = [self.path(node) for node in range(self.nodes)]
        for row, slot in enumerate(slots):
            states = {-1: self.wanted[slot][-1]}
            for node, parent in enumerate(self.parents):
                states[node], wanted = advanced(states[parent], drafts[row][node])
                self.compare(outputs[row, :, node], wanted)
        chosen = [paths[self.rng.integers(self.nodes)] for _ in slots] if chosen is None else chosen
        counts = np.array([len(path) for path in chosen], np.int32)
        longest = self.tree.depth + 1
        path = np.array([path + [-1] * (longest - len(path)) for path in chosen], np.int32)
        verdict = Verdict(counts - 1, on_device(path), on_device(path), on_device(counts), on_device(counts < 0))
        view = replace(view_of_rows([0] * len(slots)), slots=index, lengths=lengths, numerics=self.numerics)
        self.state = self.accept(self.state, view, verdict)
        for row, slot in enumerate(slots):
            self.add(slot, [drafts[row][at] for at in chosen[row]])
            whole = len(self.committed[slot]) // EVERY * EVERY
            self.compare(np.swapaxes(self.state.state[slot], 1, 2), self.wanted[slot][whole])
        return np.swapaxes(np.asarray(outputs), 1, 2)

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parents[node]), node]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["chain", "tree"])
def test_rounds_have_the_outputs_and_states_of_the_recurrence_at_every_node(name: str, text: str) -> None:
    rounds = DeltaRounds(name, text)
    rounds.prompt(0, [5, 40, 1])
    rounds.prompt(2, [64])
    for _ in range(20):
        rounds.round([2, 0])
    rounds.prompt(2, [33])  # the slot's next request sees nothing of the first
    for _ in range(10):
        rounds.round([0, 2])
    assert len(rounds.committed[0]) > 3 * EVERY
    assert rounds.error < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["chain", "tree"])
def test_2000_tokens_of_random_rounds_stay_at_the_recurrence(name: str, text: str) -> None:
    """Errors of float32 do not add up: each state is compared, after 62 folds too."""
    rounds = DeltaRounds(name, text, seed=1)
    rounds.prompt(1, [20])
    while len(rounds.committed[1]) < 2000:
        rounds.round([1])
    print(f"largest error {rounds.error:.1e}")
    assert rounds.error < TOLERANCE


@pytest.mark.parametrize("text", ["usual", "no rates"])
def test_outputs_differ_if_state_records_or_ancestors_are_wrong(text: str) -> None:
    def error(
        change: Callable[[TokenBatch], TokenBatch] = lambda batch: batch,
        state: Callable[[DeltaState, DeltaState], Any] = lambda before, after: after.state,
    ) -> float:
        """Return the error of a round after a fold, with a changed batch or a state made of those around the fold."""
        rounds = DeltaRounds("tree", text)
        rounds.prompt(1, [40])
        rounds.prompt(0, [EVERY - 2])
        before = rounds.state
        while len(rounds.committed[0]) < EVERY:
            rounds.round([0])
        assert rounds.error < TOLERANCE
        rounds.state = rounds.state._replace(state=state(before, rounds.state))
        rounds.round([0], change=change)
        return rounds.error

    def folded(first: int) -> Callable[[DeltaState, DeltaState], Any]:
        block = jnp.arange(first, first + EVERY)[None]
        slot = jnp.zeros(1, jnp.int32)
        return lambda before, after: after.state.at[0].set(fold(before.state[:1], after.records.at(slot, block))[0])

    errors = {
        "a record less": error(lambda batch: replace(batch, first_row=batch.first_row - 1)),
        "a row of a rejected draft": error(lambda batch: replace(batch, first_row=batch.first_row + 1)),
        "another slot": error(lambda batch: replace(batch, slots=batch.slots + 1)),
        "an ancestor less": error(lambda batch: replace(batch, bits=batch.bits.at[:, 6, 0].set(0b1100001))),
        "the state of an earlier round": error(state=lambda before, after: before.state),
        "a fold one row late": error(state=folded(1)),
    }
    assert min(errors.values()) > LEAST, errors
    assert error(state=folded(0)) < TOLERANCE


def check_bits(text: str, numerics: Numerics, dims: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    tokens = [token(rng, text, dims) for _ in range(3 * EVERY)]

    def outputs(name: str, pieces: list[int], others: Sequence[int] = ()) -> np.ndarray:
        """Run a text as a prompt in pieces, then in rounds that follow it, and return the outputs of its tokens."""
        rounds = DeltaRounds(name, text, numerics=numerics, dims=dims)
        for slot in others:
            rounds.prompt(slot, [20 + slot])
        rounds.prompt(1, pieces, tokens)
        while len(rounds.committed[1]) < len(tokens) - rounds.nodes:
            rounds.follow(1, tokens, others)
        assert rounds.error < TOLERANCE
        return np.stack(rounds.outputs)

    runs = [
        outputs("chain", [90]),
        outputs("chain", [7, 40, 41]),
        outputs("chain", [10]),
        outputs("tree", [45], [0, 2]),
    ]
    common = min(map(len, runs))
    assert common > 2 * EVERY
    for other in runs[1:]:
        np.testing.assert_array_equal(other[:common], runs[0][:common])


@pytest.mark.parametrize("text", ["usual", "decays near 0", "no rates"])
def test_deterministic_outputs_have_the_same_bits_in_prompts_chains_and_trees(text: str) -> None:
    check_bits(text, Numerics("reference", deterministic=True), (KEY_DIM, DIM))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 128), (64, 192)], ids=str)
@pytest.mark.parametrize("text", ["usual", "decays near 0"])
def test_deterministic_outputs_on_a_gpu_have_the_same_bits_in_prompts_chains_and_trees(
    text: str, dims: tuple[int, int]
) -> None:
    check_bits(text, Numerics(deterministic=True), dims)
