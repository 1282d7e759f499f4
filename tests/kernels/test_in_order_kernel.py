"""Test the deterministic kernel of the gated delta rule: interpreted against the reference, and its bits on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.numerics import Numerics
from jspec.models.parts import delta_state
from pallas_kernels.recurrent import delta_rounds, in_order_tokens
from pallas_kernels.recurrent.in_order_kernel import block_for, unsupported
from pallas_kernels.recurrent.records import EVERY, DeltaTokens
from tests.kernels import test_delta_prompts as prompts
from tests.kernels.test_delta_kernel import PUBLISHED, SLOTS, TREE, differences, mosaic, problem
from tests.support.mosaic import interpreted

OTHER = 64, 192  # channels of a key head and of a value head
TOLERANCE = 1e-5
CHAIN = [-1, 0, 1, 2, 3]
REFERENCE = {"implementation": "reference", "deterministic": True}


@mosaic
@pytest.mark.parametrize(
    ("parents", "lengths", "dims"),
    [
        pytest.param([-1], [40, 71], PUBLISHED, id="plain", marks=pytest.mark.long),
        pytest.param(CHAIN, [32, 63], PUBLISHED, id="chain"),
        pytest.param(TREE, [5, 66], OTHER, id="tree"),
    ],
)
def test_outputs_and_values_of_nodes(parents: list[int], lengths: list[int], dims: tuple[int, int]) -> None:
    *arguments, _ = problem(parents, lengths, [2, 0], dims)
    wanted = delta_rounds.verify_round(*arguments, deterministic=True)
    got = interpreted(in_order_tokens.verify, *arguments)
    outputs, values = differences(got, wanted)
    assert np.abs(wanted[0]).max() > 0.03
    assert outputs < TOLERANCE
    assert values < 2**-7, "a value may round to the other neighbour"
    state, ring, slots, lengths_, new, seen = arguments
    alone = jnp.broadcast_to(jnp.eye(len(parents), dtype=bool), seen.shape)
    wrong = {
        "a record less": (state, ring, slots, lengths_ - 1, new, seen),
        "another slot": (state, ring, slots[::-1], lengths_, new, seen),
    } | ({"no ancestors": (state, ring, slots, lengths_, new, alone)} if len(parents) > 1 else {})
    for name, changed in wrong.items():
        assert differences(got, delta_rounds.verify_round(*changed, deterministic=True))[0] > 1e-3, name


@mosaic
@pytest.mark.parametrize(("parents", "lengths"), [(CHAIN, [32, 63]), (TREE, [5, 66])], ids=["chain", "tree"])
def test_outputs_and_values_of_nodes_without_rates(parents: list[int], lengths: list[int]) -> None:
    *arguments, new, seen, _ = problem(parents, lengths, [2, 0], (128, 64))
    wanted = delta_rounds.verify_round(*arguments, new._replace(rates=None), seen, deterministic=True)
    got = interpreted(in_order_tokens.verify, *arguments, new._replace(rates=None), seen)
    outputs, values = differences(got, wanted)
    assert outputs < TOLERANCE and values == 0
    other = interpreted(in_order_tokens.verify, *arguments, new, seen)
    assert differences(other, wanted)[0] > 1e-3, "control: with rates"


@mosaic
def test_a_row_without_a_slot_changes_no_other_row() -> None:
    *arguments, _ = problem([-1, 0], [40, 71], [1, SLOTS])
    wanted = delta_rounds.verify_round(*arguments, deterministic=True)
    assert differences(interpreted(in_order_tokens.verify, *arguments), wanted, slice(1))[0] < TOLERANCE


@mosaic
def test_fold_advances_the_states_of_slots_that_exist_and_no_others() -> None:
    state, ring, *_ = problem([-1, 0], [0, 0], [0, 0])
    slots, first = jnp.array([2, SLOTS, 0]), jnp.array([EVERY, 0, 2 * EVERY])
    wanted, other = (delta_rounds.fold_round(state, ring, slots, at, **REFERENCE) for at in (first, first + EVERY))
    got = interpreted(in_order_tokens.fold, state, ring, slots, first)
    np.testing.assert_array_equal(got[1], state[1])
    assert jnp.abs(got - wanted).max() < TOLERANCE
    assert jnp.abs(got - other).max() > 1e-2


def prefill(name: str, dtype: str) -> tuple[Any, DeltaTokens, Any]:
    state, new, batch = prompts.problem(name, dtype)
    return state, new, replace(batch, numerics=Numerics("reference", deterministic=True))


def by_kernel(state: Any, new: DeltaTokens, batch: Any) -> prompts.PrefillResults:
    outputs, after = interpreted(delta_state._run_in_order, state, new, batch)
    return prompts.PrefillResults(outputs, after.state, after.records, batch)


@mosaic
@pytest.mark.parametrize(
    "name",
    [
        "starts off a block",
        *(pytest.param(of, marks=pytest.mark.long) for of in ("no state advances", "many short pieces")),
    ],
)
def test_pieces_of_prompts_have_the_outputs_states_and_records_of_the_reference(name: str) -> None:
    given = prefill(name, "float32")
    wanted = prompts.by_blocks(*given)
    got = by_kernel(*given)
    assert max(got.differences(wanted).values()) < TOLERANCE
    state, new, batch = given
    other = prompts.by_blocks(state, new._replace(decays=new.decays / 2), batch)
    assert max(got.differences(other).values()) > 1e-3, "control"


@mosaic
def test_prompts_without_slots_begin_with_no_text() -> None:
    state, new, batch = prefill("many short pieces", "float32")
    batch = replace(batch, slots=None)
    outputs, after = interpreted(delta_state._run_in_order, state, new, batch)
    wanted, _ = jax.jit(delta_state.run_tokens)(state, new, batch)
    is_token = np.asarray(delta_state.is_token(batch))
    got, wanted = (np.swapaxes(np.asarray(of), 1, 2)[is_token] for of in (outputs, wanted))
    assert np.abs(got - wanted).max() < TOLERANCE * np.abs(wanted).max()
    assert after is state


def arithmetic(printed: str) -> list[str]:
    """Return the float32 instructions of a kernel's PTX in order, with its registers numbered by their first use."""
    names: dict[str, str] = {}
    found = []
    for line in printed.splitlines():
        if match := re.match(r"\s*((?:fma|mul|add|sub|cvt|ex2)\.\S*(?:f32|bf16)\S*)\s+(.*);", line):
            operands = [name.strip() for name in match[2].split(",")]
            found.append(" ".join([match[1], *(names.setdefault(name, str(len(names))) for name in operands)]))
    return found


@mosaic
def test_all_forms_compiled_for_h200_spill_nothing_and_have_the_same_arithmetic(
    compile_with_ptxas_output: Any,
) -> None:
    """Were products and sums of records or of prompts fused otherwise than those of nodes, bits would differ."""
    verify, fold = (jax.jit(partial(run, interpret=False)) for run in (in_order_tokens.verify, in_order_tokens.fold))

    @jax.jit
    def run_prompts(state: Any, new: DeltaTokens, batch: Any) -> Any:
        return delta_state._run_in_order(state, new, batch, interpret=False)

    def nodes(count: int, dims: tuple[int, int] = PUBLISHED) -> Any:
        return jax.eval_shape(lambda: problem([*range(-1, count - 1)], [40, 71], [2, 0], dims)[:-1])

    rows = [jax.ShapeDtypeStruct((4, heads, 16, 128), jnp.bfloat16) for heads in (2, 2, 4)]
    new = DeltaTokens(*rows, *[jax.ShapeDtypeStruct((4, 4, 16), jnp.float32)] * 2)
    state, batch = jax.eval_shape(
        lambda: (prompts.state_of_zeros("bfloat16", (2, 4), PUBLISHED), prompts.batch_of([(0, 0, 0)], 4))
    )
    runs = {count: (verify, nodes(count)) for count in (1, 5, 64)}
    runs |= {"fold": (fold, nodes(1)[:4]), "prompts": (run_prompts, (state, new, batch))}
    runs["other heads"] = verify, nodes(5, OTHER)
    found = {}
    for name, (function, arguments) in runs.items():
        _, printed = compile_with_ptxas_output(function, *arguments)
        assert re.findall(r"\b(\d+) bytes spill stores", printed) == ["0"], name
        found[name] = arithmetic(printed)
    other = found.pop("other heads")
    assert sum(line.startswith("fma") for line in other) > 80
    for name, instructions in found.items():
        assert instructions == found[1] != other, name


def test_sizes_without_a_form_are_named() -> None:
    assert unsupported(128, 128) is None and unsupported(64, 192) is None
    assert "got 256 and 128" in str(unsupported(256, 128))
    assert "got 128 and 80" in str(unsupported(128, 80))  # Nemotron Nano 9B v2
    assert block_for(5, 128, "bfloat16") == 32
    assert block_for(256, 128, "bfloat16") == 256
    with pytest.raises(NotImplementedError, match="no room for a round of 256 tokens; draft fewer"):
        block_for(256, 128, "float32")


def paths_to_leaves(parents: list[int]) -> list[list[int]]:
    def path(node: int) -> list[int]:
        return [] if node < 0 else [*path(parents[node]), node]

    return [path(node) for node in range(len(parents)) if node not in parents]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [PUBLISHED, OTHER], ids=str)
@pytest.mark.parametrize("count", [5, 33, 64])
def test_bits_of_a_node_on_a_gpu_depend_on_its_path_alone(count: int, dims: tuple[int, int]) -> None:
    """Each path of a tree of the second sequence also runs as a chain, by itself."""
    parents = [-1, *np.random.default_rng(0).integers(0, np.arange(1, count))]
    state, ring, slots, lengths, new, seen, _ = problem(parents, [40, 69], [2, 0], dims)
    assert in_order_tokens.has_kernel(ring)
    run = jax.jit(partial(in_order_tokens.verify, interpret=False))
    outputs, records = run(state, ring, slots, lengths, new, seen)
    wanted = jax.jit(partial(delta_rounds.verify_round, deterministic=True))(state, ring, slots, lengths, new, seen)
    assert differences((outputs, records), wanted)[0] < 2e-4, "a value may round to the other neighbour"
    for path in paths_to_leaves(parents)[:8]:
        nodes = jnp.array(path)
        chain = DeltaTokens(*(of[1:, :, nodes] for of in new))
        causal = jnp.tri(len(path), dtype=bool)[None]
        alone, kept = run(state, ring, slots[1:], lengths[1:], chain, causal)
        np.testing.assert_array_equal(alone[0], outputs[1][:, nodes])
        np.testing.assert_array_equal(kept.values[0], records.values[1][:, nodes])
