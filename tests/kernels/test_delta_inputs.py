"""Test the kernels of a round from projected rows to outputs, interpreted, against XLA's operations."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.ancestors import ancestors
from jspec.core.numerics import Numerics
from jspec.core.records import TokenBatch
from jspec.models.mixers.gated_delta import GatedDelta
from jspec.models.mixers.mamba2 import Mamba2
from jspec.models.mixers.recurrent import Recurrent
from jspec.models.parts import delta_nodes
from jspec.models.parts.delta_state import DeltaState
from jspec.models.parts.kv_pool import PoolShape
from pallas_kernels.attention.ancestor_bits import ancestor_bits
from pallas_kernels.recurrent import inputs_kernel
from tests.support.mosaic import interpreted

mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")
SLOTS = 3
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 4, 8]
MIXER = GatedDelta(key_heads=2, value_heads=4, key_dim=128, value_dim=128, taps=4)
MAMBA = Mamba2(key_heads=2, value_heads=8, key_dim=128, value_dim=64, taps=4, conv_bias=True)


def problem(
    parents: list[int], lengths: list[int], slots: list[int], mixer: Recurrent = MIXER, all_slots: int = SLOTS
) -> tuple[Any, ...]:
    """Draw the state of all slots, projected rows and gates of a round's nodes, weights and the batch."""
    rng, count, batch = np.random.default_rng(0), len(parents), len(slots)
    pool = PoolShape(all_slots, 2, 16, 256, "bfloat16", "bfloat16")
    state = mixer.state(replace(pool, round_rows=count, state_dtype="bfloat16"), "bfloat16")

    def drawn(path: Any, array: Any) -> Any:
        values = rng.standard_normal(array.shape) * 0.3
        return jnp.asarray(-abs(values) if "decays" in str(path) else values, array.dtype)

    state = jax.tree_util.tree_map_with_path(drawn, state)
    assert isinstance(state, DeltaState)
    projected = jnp.asarray(rng.standard_normal((batch, count, mixer.conv_size + mixer.value_size)), jnp.bfloat16)
    gates = jnp.asarray(rng.standard_normal((batch, count, (1 + mixer.corrects) * mixer.value_heads)), jnp.float32)
    layer = SimpleNamespace(
        conv=jnp.asarray(rng.standard_normal((mixer.conv_size, mixer.taps)) * 0.5, jnp.bfloat16),
        a_log=jnp.asarray(rng.standard_normal(mixer.value_heads), jnp.float32),
        dt_bias=jnp.asarray(rng.standard_normal(mixer.value_heads), jnp.float32),
        conv_bias=None if mixer.corrects else jnp.asarray(rng.standard_normal(mixer.conv_size), jnp.bfloat16),
    )
    seen = ancestors(np.broadcast_to(np.array(parents, np.int32), (batch, count)))
    first = jnp.asarray(lengths, jnp.int32)
    chain = parents == list(range(-1, count - 1))
    tokens = TokenBatch(
        tokens=jnp.zeros((batch, count), jnp.int32),
        positions=first[:, None] + jnp.asarray(seen.sum(-1) - 1, jnp.int32),
        valid=jnp.broadcast_to(jnp.arange(batch)[:, None] != 2, (batch, count)),
        first_row=first,
        page_table=jnp.zeros((batch, 1), jnp.int32),
        bits=None if chain else ancestor_bits(jnp.broadcast_to(jnp.array(parents, jnp.int32), (batch, count))),
        numerics=Numerics("reference"),
        slots=jnp.asarray(slots, jnp.int32),
    )
    return layer, projected, gates, state, tokens


def run_kernels(
    mixer: Recurrent, layer: Any, projected: Any, gates: Any, state: Any, batch: Any, **options: Any
) -> Any:
    options |= dict(bias=layer.conv_bias, corrects=mixer.corrects)
    factors = mixer._factors_and_decays(layer, gates)
    (outputs, values), state = delta_nodes.run_nodes(state, projected, *factors, layer.conv, batch, **options)
    return jnp.swapaxes(outputs, 1, 2), values, state


def by_operations(mixer: Recurrent, layer: Any, *arguments: Any) -> tuple[Any, Any, DeltaState]:
    """Return the outputs of the nodes [batch, heads, nodes, channels], their values and the state, by XLA alone."""
    (outputs, values), state = mixer._run(layer, *arguments)
    return jnp.swapaxes(outputs, 1, 2), values, state


def differences(got: tuple[Any, ...], wanted: tuple[Any, ...]) -> list[float]:
    """Return the largest difference of each array, relative to the largest number."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    arrays = [(np.float64(new), np.float64(expected)) for new, expected in pairs]
    return [float(np.abs(new - expected).max() / np.abs(expected).max()) for new, expected in arrays]


@mosaic
@pytest.mark.parametrize(
    ("parents", "lengths"),
    [([-1], [40, 1]), ([-1, 0, 1, 2, 3], [2, 63]), (TREE, [0, 66])],
    ids=["plain", "chain", "tree"],
)
@pytest.mark.parametrize("mixer", [MIXER, MAMBA], ids=["delta net", "mamba"])
def test_outputs_records_and_inputs_of_nodes(parents: list[int], lengths: list[int], mixer: Recurrent) -> None:
    layer, *arguments = problem(parents, [*lengths, 33], [2, 0, 1], mixer)
    got = interpreted(partial(run_kernels, mixer, layer), *arguments)
    outputs, *kept = differences(got, by_operations(mixer, layer, *arguments))
    assert outputs < 2**-8, "a key, a query or a value may round to the other neighbour"
    assert max(kept) < 2**-7
    projected, gates, old, batch = arguments
    wrong = {
        "the taps in the opposite order": (SimpleNamespace(**{**vars(layer), "conv": layer.conv[:, ::-1]}), batch),
        "a token more before": (layer, replace(batch, first_row=batch.first_row + 1, positions=batch.positions + 1)),
        "another slot": (layer, replace(batch, slots=batch.slots[::-1])),
        "a chain": (layer, replace(batch, bits=None, positions=batch.first_row[:, None] + np.arange(len(parents)))),
    }
    for name, (other, changed) in wrong.items():
        if name != "a chain" or batch.bits is not None:
            assert differences(got, by_operations(mixer, other, projected, gates, old, changed))[0] > 2**-5, name


@mosaic
@pytest.mark.parametrize(("count", "more", "length"), [(5, 3, 40), (33, 7, 63)])
def test_padding_and_nodes_without_a_budget_leave_committed_rows_as_they_are(
    count: int, more: int, length: int
) -> None:
    """A ring has rows for the nodes alone: were padding after them written, it would overwrite committed rows."""
    layer, projected, gates, state, batch = problem([-1, *[0] * (count - 1)], [length, 33], [2, 0])
    batch = replace(batch, valid=batch.valid.at[:, 2].set(False))  # left out of a budget; later ones are not
    arguments = *(jnp.pad(of, ((0, 0), (0, more), (0, 0))) for of in (projected, gates)), state, batch.pad(more)
    wanted, _, wanted_state = by_operations(MIXER, layer, *arguments)
    got, _, after = interpreted(partial(run_kernels, MIXER, layer), *arguments)
    nodes = [node for node in range(count) if node != 2]
    assert differences((got[:, :, nodes], state), (wanted[:, :, nodes], state))[0] < 2**-8
    for new, expected, old in zip(*map(jax.tree.leaves, (after, wanted_state, state)), strict=True):
        for slot, first in ((2, length), (0, 33)):
            rows = [row for row in range(new.shape[1]) if row != (first + 2) % new.shape[1]]
            np.testing.assert_allclose(np.float32(new[slot])[rows], np.float32(expected[slot])[rows], atol=2e-2)
        np.testing.assert_array_equal(np.float32(new[1]), np.float32(old[1]))


@mosaic
@pytest.mark.parametrize("mixer", [MIXER, MAMBA], ids=["delta net", "mamba"])
def test_a_key_that_is_not_finite_is_kept_as_zero_and_ends_its_token_alone(mixer: Recurrent) -> None:
    layer, projected, gates, old, batch = problem([-1, 0, 1], [40, 2, 33], [2, 0, 1], mixer)
    spoilt = projected.at[0, 2, mixer.key_size].set(jnp.inf)
    got, _, state = interpreted(partial(run_kernels, mixer, layer), spoilt, gates, old, batch)
    wanted, *_ = by_operations(mixer, layer, projected, gates, old, batch)
    heads = mixer.value_heads // mixer.key_heads
    assert np.isnan(got[0, :heads, 2]).all() and np.isfinite(got[0, heads:]).all()
    assert max(differences((got[0, :, :2], got[1]), (wanted[0, :, :2], wanted[1]))) < 2**-8
    assert np.isfinite(np.float32(state.records.keys)).all()


@mosaic
def test_layers_share_what_is_lowered_of_a_kernel() -> None:
    layer, *arguments = problem([-1, 0], [40, 2, 33], [2, 0, 1])
    traced = jax.make_jaxpr(lambda *of: [run_kernels(MIXER, layer, *of) for _ in range(2)])(*arguments)
    calls = [step.params["jaxpr"] for step in traced.eqns if step.params.get("name") in ("prepare", "verify")]
    assert len(calls) == 4
    assert len(set(map(id, calls))) == 2


@mosaic
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize(
    "mixer",
    [replace(MIXER, key_heads=16, value_heads=48), replace(MAMBA, key_heads=8, value_heads=64)],
    ids=["Qwen3.8-27B", "Nemotron 3 Nano"],
)
def test_kernel_compiled_for_h200_spills_nothing(count: int, mixer: Recurrent, compile_with_ptxas_output: Any) -> None:
    layer, *arguments = problem(list(range(-1, count - 1)), [40, 71], [2, 0], mixer)
    shapes = jax.eval_shape(lambda: arguments)
    program, printed = compile_with_ptxas_output(jax.jit(partial(run_kernels, mixer, layer)), *shapes)
    assert [launch.kind for launch in program.launches].count("kCustomCall") == 2
    reports = re.findall(r"\b(\d+) bytes spill stores", printed)
    assert len(reports) == 2 and set(reports) == {"0"}


def test_rounds_that_exceed_shared_memory_have_no_form() -> None:
    assert inputs_kernel.has_form(64, 3 * 128, 4)
    assert inputs_kernel.has_form(64, 5 * 128, 4)
    assert not inputs_kernel.has_form(64, 6 * 128, 4), "234,504 bytes of 232,448 when compiled"
    assert not inputs_kernel.has_form(5, 3 * 128, 3), "rows of 12 bytes"


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 5, 8, 33, 64])
@pytest.mark.parametrize("mixer", [replace(MIXER, key_heads=4, value_heads=12), MAMBA], ids=["delta net", "mamba"])
def test_outputs_records_and_inputs_of_nodes_on_a_gpu(count: int, mixer: Recurrent) -> None:
    parents = [-1, *np.random.default_rng(0).integers(0, np.arange(1, count))] if count > 1 else [-1]
    layer, *arguments = problem([int(parent) for parent in parents], [40, 1, 71], [2, 0, 1], mixer)
    assert delta_nodes.takes_kernels(arguments[2], arguments[0], mixer.taps, arguments[3])
    wanted = jax.jit(partial(by_operations, mixer, layer))(*arguments)
    outputs, *kept = differences(jax.jit(partial(run_kernels, mixer, layer))(*arguments), wanted)
    assert outputs < 2**-7 and max(kept) < 2**-7
