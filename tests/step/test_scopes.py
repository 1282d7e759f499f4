"""Test that every operation of a step is in the named scope of its stage, so that profiles are readable."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec import Tree
from jspec.core.prefill_input import PrefillInput
from jspec.step.decode import spec_step
from jspec.step.prefill import prefill_step
from jspec.step.program import Params, Program, init_state
from jspec.tools.bench import random_models as shapes
from jspec.tools.bench import step as rounds

pytestmark = pytest.mark.once

SHAPE = "tiny"
STAGES = ["view", "draft", "verify", "accept", "commit", "trace", "report"]  # in the order in which they run
OWN = "broadcast_in_dim"  # the operation that adds the axis of rounds


def build(tree: Tree | None) -> tuple[Program, Params, Any]:
    """Return a program, and the shapes of its weights and state."""
    target = jax.eval_shape(partial(shapes.random_target, SHAPE, "float32"))
    head = jax.eval_shape(partial(shapes.random_head, SHAPE, "float32"))
    program, params, pool = rounds.build(rounds.StepCase(SHAPE, 1, 64, tree, dtype="float32"), target, head)
    return program, params, jax.eval_shape(lambda p: init_state(program, p, pool), params)


SLOT = jax.ShapeDtypeStruct((1,), jnp.int32)  # input of a step of one batch row


def lowered_paths(step: Any, params: Params, state: Any, inputs: Any) -> list[str]:
    """Return the names of a program's operations and functions with their scopes."""
    lowered = jax.jit(step).lower(params, state, inputs)
    return re.findall(r'loc\("([^"]*)"', lowered.as_text(debug_info=True))


def inside(paths: Sequence[str], prefix: str) -> list[list[str]]:
    """Select names that have a prefix; return each without the prefix, split into scopes."""
    return [path[found.end() :].split("/") for path in paths if (found := re.match(prefix, path))]


def round_names(tree: Tree | None, rounds: int = 1) -> list[list[str]]:
    program, params, state = build(tree)
    paths = lowered_paths(partial(spec_step, replace(program, rounds=rounds, trace=True)), params, state, SLOT)
    if rounds == 1:
        return [name for name in inside(paths, r"jit\(spec_step\)/") if name[0] != OWN]
    # The loop's body is a separate function: jax 0.10 restarts its names, jax 0.11 puts the call before them.
    return [
        name for name in inside(paths, r"(jit\(spec_step\)/while/body/((closed_call|eval_jaxpr)/)?)?") if len(name) > 1
    ]


def has(names: Sequence[list[str]], path: str) -> bool:
    words = path.split("/")
    return any(name[: len(words)] == words for name in names)


@pytest.mark.parametrize("tree", [None, Tree.chain(2), Tree.topk(8, 3, 2)], ids=str)
def test_spec_step_of_one_round_has_every_operation_in_a_stage_scope(tree: Tree | None) -> None:
    names = round_names(tree)
    assert {name[0] for name in names} == set(STAGES)
    expected = ["verify/layer0", "verify/layer7", "verify/head"]
    if tree is not None:
        expected += ["draft/root", "draft/draft1/head", "commit/fuse"]
    if tree == Tree.topk(8, 3, 2):
        expected += ["draft/draft2/head", "draft/select"]
    assert not [path for path in expected if not has(names, path)]


def test_spec_step_of_several_rounds_has_a_named_scope_for_each_stage() -> None:
    assert {name[0] for name in round_names(Tree.chain(2), rounds=3)} >= set(STAGES)


@pytest.mark.parametrize("tree", [None, Tree.chain(2)], ids=str)
def test_prefill_step_of_a_prompt_has_every_operation_in_a_named_scope(tree: Tree | None) -> None:
    program, params, state = build(tree)
    prompt = PrefillInput.shapes(8, slots=state.root.shape[0], pages=state.page_table.shape[1])
    names = inside(lowered_paths(partial(prefill_step, program), params, state, prompt), r"jit\(prefill_step\)/")
    assert {name[0] for name in names} == {"prefill"}
    expected = ["admit", "view", "target/layer7", "target/head", "first_token"]
    expected += [] if tree is None else ["draft/fuse"]
    assert not [path for path in expected if not has(names, f"prefill/{path}")]


@pytest.mark.parametrize("rounds", [1, 3])
def test_spec_step_without_named_scopes_has_no_stage_names(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    assert not {name[0] for name in round_names(None, rounds)} & set(STAGES)
