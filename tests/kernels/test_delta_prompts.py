"""Test the kernels of the gated delta rule for prompts, interpreted, against the blocks of the reference."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.numerics import Numerics
from jspec.core.records import PromptBatch
from jspec.models.parts.conv_state import ConvState
from jspec.models.parts.delta_prompts import has_kernel, most_chunks, run_prompts
from jspec.models.parts.delta_state import DeltaState, run_tokens
from jspec.models.parts.kv_pool import PoolShape
from pallas_kernels.recurrent.records import DeltaTokens
from tests.support.h200 import h200_mesh
from tests.support.mosaic import interpreted

KEY_HEADS, HEADS, KEY_DIM, DIM, SLOTS, BLOCK = 2, 6, 64, 128, 4, 16
mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")
# Pieces (slot, start, end); that of slot `SLOTS` is padding.
PIECES = {
    "starts off a block": [(2, 40, 150), (0, 0, 64), (SLOTS, 0, 0)],
    "no state advances": [(1, 33, 60), (0, 96, 97)],
    "many short pieces": [(0, 63, 65), (1, 0, 3), (3, 31, 33), (SLOTS, 0, 0)],
    "a long piece": [(3, 5, 200), (SLOTS, 0, 0)],
}


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    rows = rng.standard_normal(shape)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def state_of_zeros(dtype: str, heads: tuple[int, int], dims: tuple[int, int] = (KEY_DIM, DIM)) -> DeltaState:
    pool = replace(PoolShape(SLOTS, 2, 16, 512, dtype, dtype, round_rows=5), state_dtype=dtype)
    return DeltaState.zeros(pool, heads, dims, ConvState.zeros(pool, 1, 2))


def state_of(rng: np.random.Generator, dtype: str) -> DeltaState:
    """Draw states and records of all slots."""
    state = state_of_zeros(dtype, (KEY_HEADS, HEADS))
    ring = state.records._replace(
        keys=jnp.asarray(unit(rng, *state.records.keys.shape), dtype),
        values=jnp.asarray(rng.standard_normal(state.records.values.shape), dtype),
        decays=jnp.asarray(-rng.exponential(0.1, state.records.decays.shape), jnp.float32),
    )
    return state._replace(records=ring, state=jnp.asarray(rng.standard_normal(state.state.shape) * 0.1, jnp.float32))


def batch_of(pieces: list[tuple[int, int, int]], padding: int = 1) -> PromptBatch:
    """Lay out pieces in blocks, with blocks of padding behind them."""
    blocks, newest, row = [], [], 0
    for index, (_, start, end) in enumerate(pieces):
        firsts = range(start, end, BLOCK)
        blocks += [(index, first) for first in firsts]
        newest.append(max(row + end - start - 1, 0))
        row += len(firsts) * BLOCK
    blocks += [(len(pieces), 0)] * padding
    piece, first = (jnp.array(of) for of in zip(*blocks, strict=True))
    slots, starts, ends = (jnp.array(of) for of in zip(*pieces, strict=True))
    positions = first[:, None] + jnp.arange(BLOCK)
    return PromptBatch(
        tokens=jnp.zeros_like(positions),
        positions=positions,
        valid=jnp.ones(positions.shape, bool),
        first_row=first,
        page_table=jnp.zeros((len(blocks), 1), jnp.int32),
        bits=None,
        numerics=Numerics("reference"),
        slots=slots,
        piece=piece,
        starts=starts,
        ends=ends,
        newest=jnp.array(newest),
    )


def tokens_of(rng: np.random.Generator, batch: PromptBatch, dtype: str, text: str = "usual") -> DeltaTokens:
    """Draw the inputs of tokens; rows of padding have NaN."""
    count = len(batch.tokens)
    keys = np.eye(KEY_DIM)[0] + np.zeros((count, KEY_HEADS, BLOCK, 1)) if text == "equal keys" else None
    decays = -rng.exponential(0.1, (count, HEADS, BLOCK))
    if text == "decays near 0":
        decays = -rng.uniform(0, 50, decays.shape) * np.where(rng.random(decays.shape) < 0.1, 320, 1)
    if text == "equal keys":
        decays = np.zeros_like(decays)
    rates = np.ones_like(decays) if text == "equal keys" else rng.random(decays.shape)
    is_token = np.asarray(batch.is_used & (batch.piece < len(batch.starts))[:, None])
    rows = {
        "queries": unit(rng, count, KEY_HEADS, BLOCK, KEY_DIM) * KEY_DIM**-0.5,
        "keys": unit(rng, count, KEY_HEADS, BLOCK, KEY_DIM) if keys is None else keys,
        "values": rng.standard_normal((count, HEADS, BLOCK, DIM)),
        "decays": decays,
        "rates": rates,
    }
    dtypes = dict.fromkeys(("queries", "keys", "values"), dtype)
    return DeltaTokens(
        **{
            name: jnp.asarray(
                np.where(is_token.reshape(count, 1, BLOCK, *(1,) * (of.ndim - 3)), of, np.nan),
                dtypes.get(name, "float32"),
            )
            for name, of in rows.items()
        }
    )


class PrefillResults:
    """What a prefill computes, without what is undefined."""

    def __init__(self, outputs: Any, state: Any, ring: Any, batch: PromptBatch) -> None:
        is_token = np.asarray(batch.is_used & (batch.piece < len(batch.starts))[:, None])
        self.outputs = np.swapaxes(np.asarray(outputs, np.float64), 1, 2)[is_token]
        self.state = np.asarray(state, np.float64)
        self.records = [np.asarray(of.astype(jnp.float32), np.float64) for of in ring]

    def differences(self, wanted: PrefillResults) -> dict[str, float]:
        """Return the largest differences relative to the largest number of each array."""

        def of(got: np.ndarray, right: np.ndarray) -> float:
            error = np.abs(got - right).max() / np.abs(right).max()
            return float(error) if np.isfinite(error) else np.inf

        records = max(map(of, self.records, wanted.records))
        return {"outputs": of(self.outputs, wanted.outputs), "state": of(self.state, wanted.state), "records": records}


def by_blocks(state: DeltaState, new: DeltaTokens, batch: PromptBatch) -> PrefillResults:
    outputs, after = jax.jit(run_tokens)(state, new, batch)
    return PrefillResults(outputs, after.state, after.records, batch)


def by_kernels(state: DeltaState, new: DeltaTokens, batch: PromptBatch) -> PrefillResults:
    return PrefillResults(*interpreted(run_prompts, state.state, state.records, new, batch), batch)


def problem(name: str, dtype: str, text: str = "usual") -> tuple[DeltaState, DeltaTokens, PromptBatch]:
    rng, batch = np.random.default_rng(0), batch_of(PIECES[name])
    return state_of(rng, dtype), tokens_of(rng, batch, dtype, text), batch


@mosaic
@pytest.mark.parametrize("name", PIECES)
def test_pieces_have_the_outputs_states_and_records_of_the_reference(name: str) -> None:
    given = problem(name, "float32")
    differences = by_kernels(*given).differences(by_blocks(*given))
    assert max(differences.values()) < 1e-5, differences


@mosaic
@pytest.mark.parametrize("text", ["decays near 0", "equal keys"])
def test_texts_have_the_outputs_states_and_records_of_the_reference(text: str) -> None:
    given = problem("starts off a block", "float32", text)
    differences = by_kernels(*given).differences(by_blocks(*given))
    assert max(differences.values()) < 1e-5, differences


@mosaic
@pytest.mark.parametrize("name", ["starts off a block", "no state advances"])
def test_pieces_without_rates_have_the_outputs_states_and_records_of_the_reference(name: str) -> None:
    state, new, batch = problem(name, "float32")
    right, got = (run(state, new._replace(rates=None), batch) for run in (by_blocks, by_kernels))
    assert max(got.differences(right).values()) < 1e-5
    assert max(by_kernels(state, new, batch).differences(right).values()) > 1e-2, "control: with rates"


@mosaic
def test_results_in_bfloat16_differ_from_the_reference_by_its_rounding() -> None:
    """Values may round to the other neighbour, and their readers differ by as much."""
    given = problem("starts off a block", "bfloat16")
    differences = by_kernels(*given).differences(by_blocks(*given))
    assert max(differences.values()) < 2**-7, differences


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_no_division_of_blocks_among_pieces_has_more_chunks_than_the_tables(rows: int, pieces: int) -> None:
    """Pieces begin up to 31 tokens behind a state; the largest number of chunks by trying all divisions."""

    def chunks(blocks: int) -> int:
        return -(-(blocks * rows + 31) // 64) if blocks else 0

    most = [0] * 33  # by number of blocks
    for _ in range(pieces):
        most = [max(most[rest] + chunks(blocks - rest) for rest in range(blocks + 1)) for blocks in range(33)]
    assert [most_chunks(blocks, rows, pieces) for blocks in range(1, 33)] == most[1:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PIECES)
def test_pieces_on_a_gpu_differ_from_the_reference_by_the_rounding_of_bfloat16(name: str) -> None:
    state, new, batch = problem(name, "bfloat16")
    assert has_kernel(state.records, batch)
    by_default, wanted = (
        by_blocks(state, new, replace(batch, numerics=Numerics(implementation)))
        for implementation in ("auto", "reference")
    )
    differences = by_default.differences(wanted)
    assert max(differences.values()) < 2**-6, differences


@mosaic
def test_results_differ_if_a_piece_or_its_window_is_another_one() -> None:
    state, new, batch = problem("starts off a block", "float32")
    right = by_blocks(state, new, batch)
    assert batch.slots is not None
    faults = {
        "slots swapped": (state, new, replace(batch, slots=batch.slots[jnp.array([1, 0, 2])])),
        "a token's decay": (state, new._replace(decays=new.decays.at[2, 0, 3].add(-0.5)), batch),
        "a token's key": (state, new._replace(keys=new.keys.at[1, :, 0].multiply(-1)), batch),
        "another window": (state._replace(records=state.records._replace(decays=state.records.decays * 2)), new, batch),
    }
    errors = {name: max(by_kernels(*fault).differences(right).values()) for name, fault in faults.items()}
    assert min(errors.values()) > 1e-3, errors


@mosaic
@pytest.mark.parametrize(("tokens", "has_rates"), [(16, True), (1024, True), (1024, False)])
def test_prefill_compiled_for_h200_is_two_kernels_that_spill_nothing_and_one_graph(
    tokens: int, has_rates: bool, compile_with_ptxas_output: Any
) -> None:
    """Products that wait for each other, of which ptxas tells, would leave the tensor cores idle."""
    count, blocks, shape = 4, tokens // BLOCK, jax.ShapeDtypeStruct
    (key_heads, heads), dim = ((16, 48), 128) if has_rates else ((8, 64), 64)  # without, those of Nemotron 3 Nano
    state = jax.eval_shape(lambda: state_of_zeros("bfloat16", (key_heads, heads), (128, dim)))
    rows = [shape((blocks, key_heads, BLOCK, 128), jnp.bfloat16)] * 2
    rows.append(shape((blocks, heads, BLOCK, dim), jnp.bfloat16))
    of_heads = shape((blocks, heads, BLOCK), jnp.float32)
    new = DeltaTokens(*rows, of_heads, of_heads if has_rates else None)
    batch = jax.eval_shape(lambda: batch_of([(slot, 0, 0) for slot in range(count)], blocks))
    batch = replace(batch, numerics=Numerics())

    @jax.jit
    def run(state: DeltaState, new: DeltaTokens, batch: PromptBatch) -> Any:
        return run_tokens(state, new, batch)

    program, printed = compile_with_ptxas_output(run, state, new, batch)
    kinds = [launch.kind for launch in program.launches]
    assert kinds.count("kCustomCall") == 2 and "kWhile" not in kinds
    assert len(program.graphs) == 1 and not program.outside_graphs
    reports = re.findall(r"\b(\d+) bytes spill stores", printed)
    assert len(reports) == 2 and set(reports) == {"0"} and "serialized" not in printed
    assert len(kinds) <= 34


def test_prefill_without_a_hopper_gpu_or_slots_or_with_other_dtypes_has_no_kernel() -> None:
    state, _, batch = problem("no state advances", "bfloat16")
    assert not has_kernel(state.records, batch), "the tests run on a CPU"
    with jax.sharding.use_abstract_mesh(h200_mesh().abstract_mesh):
        assert has_kernel(state.records, batch) == (jax.__version_info__ >= (0, 11))
        assert not has_kernel(state.records, replace(batch, slots=None))
        assert not has_kernel(state.records, replace(batch, numerics=Numerics(deterministic=True)))
        assert not has_kernel(problem("no state advances", "float32")[0].records, batch)
