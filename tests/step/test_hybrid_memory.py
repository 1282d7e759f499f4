"""Test what the memory plan says of published hybrids against sums by hand, and against the arrays of their layers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jspec import Tree
from jspec.core.config import EngineConfig
from jspec.core.tree import ROOT_ONLY
from jspec.draft.base import NoDraft
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.params import abstract_weights, model_params
from jspec.step.memory import DeviceMemory, MemoryPlanner, fit, tree_bytes
from jspec.step.program import Params, Program
from jspec.tools.bench import random_models

SLOTS, COPIES, PAGES, PAGE = 3, 4, 20, 16
KIB, MIB = 2**10, 2**20


def planner_of(c: ModelConfig, tree: Tree, memory: int = 2**40) -> tuple[MemoryPlanner, PoolShape]:
    """Return the planner of a device with so many bytes, all of which it may use, and the pools of an engine."""
    sizes: dict[str, Any] = dict(slots=SLOTS, max_len=64, page_size=PAGE, pages=PAGES)
    config = EngineConfig(**sizes, buckets=(SLOTS,), prefill_buckets=(16,), memory_fraction=1.0)
    target = Model.from_weights(c, abstract_weights(model_params(c), "bfloat16"))
    program = Program(NoDraft(), (), config.accept, "reference", controls=config.controls)
    params = Params(target=target, draft=())
    planner = MemoryPlanner(program, params, config, DeviceMemory(memory, 0, is_reported=True))
    return planner, replace(PoolShape.of(config, tree, "bfloat16"), copies=COPIES)


@pytest.mark.parametrize(
    ("shape", "state", "record", "row", "token"),
    [
        ("qwen3.8-27b", 144, 777, 960, 64),
        ("qwen3.5-35b-a3b", 60, 363.75, 480, 20),
        ("nemotron3-nano", 46, 235.75, 276, 6),
    ],
)
@pytest.mark.parametrize(
    ("tree", "records"), [(ROOT_ONLY, 32), (Tree.chain(4), 64), (Tree.topk(7, 3, 4), 64), (Tree.topk(47, 6, 8), 96)]
)
def test_memory_plan_has_states_records_and_inputs_of_slots_and_pages_of_tokens(
    shape: str, state: float, record: float, row: float, token: float, tree: Tree, records: int
) -> None:
    """Sizes of all layers: MiB of a state in float32; KiB of a record, of a row of inputs, of a token in pages.

    A slot has a multiple of 32 records, at least 31 and one for each node of a round. It has rows of inputs for the
    nodes and three tokens before them; it and each copy of a state have three more, of the tokens before the state.
    """
    c = random_models.TARGETS[shape]
    planner, pool = planner_of(c, tree)
    plan = planner.plan(pool)
    slot = state * MIB + KIB * (record * records + row * (tree.nodes + 3 + 3))
    assert plan.states == SLOTS * slot + COPIES * (state * MIB + KIB * row * 3)
    assert plan.target_pool == PAGES * PAGE * KIB * token

    def made(copies: int) -> int:
        return tree_bytes(
            jax.eval_shape(lambda: [layer.mixer.state(replace(pool, copies=copies), "bfloat16") for layer in c.layers])
        )

    assert made(COPIES) == plan.states + plan.target_pool
    assert made(0) == SLOTS * (slot - 3 * KIB * row) + plan.target_pool, "without copies no inputs before a state"


@pytest.mark.parametrize(("missing", "slots", "copies"), [(0, 2, 3), (9.3, 2, 2), (35, 1, 0)])
def test_error_names_how_many_slots_and_kept_states_fit(missing: float, slots: int, copies: int) -> None:
    """In three layers a kept state takes 9.2 MiB, a slot 10.9; with two slots two states are kept, with one one."""
    c = random_models.target_config("qwen3.8-27b:4")
    planner, pool = planner_of(c, ROOT_ONLY)
    small, _ = planner_of(c, ROOT_ONLY, planner.plan(pool).total - 1 - int(missing * MIB))
    with pytest.raises(ValueError, match="out of memory: max_len=64, slots=3, cached_states=4 and 20 pages") as caught:
        fit(small, pool)
    found = dict(re.findall(r"lower (\w+) to at most (\d+)", str(caught.value)))
    assert (found["slots"], found["cached_states"]) == (str(slots), str(copies))
    fit(small, replace(pool, copies=copies))
    with pytest.raises(ValueError, match="out of memory"):
        fit(small, replace(pool, copies=copies + 1))


def test_page_of_targets_has_the_states_of_a_slot_with_and_without_states_for_draft_tokens() -> None:
    c = random_models.TARGETS["qwen3.8-27b"]

    def slot(nodes: int) -> float:
        pool = PoolShape(1, 1, 1, 1, "bfloat16", "bfloat16", round_rows=nodes, state_dtype="bfloat16", copies=1)
        mixers = [layer.mixer for layer in c.layers if not layer.mixer.has_pages]
        return tree_bytes(jax.eval_shape(lambda: [mixer.state(pool, "bfloat16") for mixer in mixers])) / MIB - copy

    state, row = 144, 960 / 1024
    copy = state + 3 * row
    rows = {
        "jspec": [slot(1), slot(5), slot(48)],
        "vLLM": [copy, 5 * copy],
        "SGLang": [copy, *(copy + nodes * state + (nodes + 2) * row for nodes in (5, 48))],  # windows of inputs overlap
    }
    text = (Path(__file__).parents[2] / "notebooks" / "targets.md").read_text()
    for name, wanted in rows.items():
        (cells,) = re.findall(rf"^\| {name}[^|]*\|(.*)\|$", text, re.M)
        assert re.findall(r"[\d,]+", cells) == [f"{value:,.0f}" for value in wanted], name
    assert f"copies of {copy:.0f} MiB" in text
