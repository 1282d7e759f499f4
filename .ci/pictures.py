"""Draws the site's pictures of a round and of an engine's memory from the code: `.venv/bin/python .ci/pictures.py`.

Stages and their order are those of a traced program, their words are docstrings, and the bytes are those of the memory
plan and of the least time of a step (`jspec bench step`). Nothing is computed or allocated, so a CPU will do.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jspec
from jspec.engine.run.build import engine_config
from jspec.models.parts.kv_pool import PoolShape
from jspec.step import decode
from jspec.step.memory import DeviceMemory, MemoryPlan, MemoryPlanner
from jspec.step.program import Params, Program, init_state, view_of
from jspec.tools.bench import random_models, roofline
from jspec.tools.report_figure import COLOURS, GREY

FOLDER = Path(__file__).resolve().parent.parent / "notebooks" / "pictures"
GIB, WIDTH, TREE = 2**30, 680, jspec.Tree.chain(4)
SHAPE, CONTEXT, BATCH = "llama3-8b", 1024, 1  # of the round's picture; tokens in the cache, rows
ENGINES = ((SHAPE, True), ("qwen3.8-27b", False), ("deepseek-v2-lite", False))  # shape, whether it has a head
SLOTS, MAX_LEN, PAGE, DEVICE = 32, 4096, 16, 80 * GIB
PARTS = ("target_weights", "draft_weights", "target_pool", "draft_pool", "states", "workspace")
FILLS = (*COLOURS, "#F0E442", GREY)  # of the parts


def planner(shape: str, has_head: bool) -> MemoryPlanner:
    """Return the planner of an engine of a named shape in bfloat16, whose weights are shapes alone."""
    target = jax.eval_shape(partial(random_models.random_target, shape, "bfloat16"))
    head = partial(random_models.random_head, shape, "bfloat16")
    drafter: Any = jspec.Eagle3(jax.eval_shape(head), TREE) if has_head else jspec.NGram(TREE)
    config = engine_config(dict(slots=SLOTS, max_len=MAX_LEN, page_size=PAGE), target.config)
    program = Program(drafter, drafter.feature_layers(target), config.accept, "reference")
    params = Params(target=target, draft=jax.eval_shape(drafter.bind, target))
    return MemoryPlanner(program, params, config, DeviceMemory(DEVICE, 0, is_reported=True))


def stages() -> list[str]:
    """Return the names of a round's stages in the order in which a traced program has them."""
    plan = planner(SHAPE, True)
    pool = PoolShape.of(plan.config, TREE, "bfloat16")
    state = jax.eval_shape(lambda params: init_state(plan.program, params, pool), plan.params)
    slots = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    traced = jax.make_jaxpr(partial(decode.spec_step, plan.program))(plan.params, state, slots)
    scopes = [str(equation.source_info.name_stack).partition("/")[0] for equation in traced.jaxpr.eqns]
    return [name for name, _ in groupby(filter(None, scopes))]


def bytes_read() -> dict[str, float]:
    """Return the least bytes that the stages with weights read in a round."""
    target, head = random_models.target_config(SHAPE), random_models.head_config(SHAPE)
    costs = {
        "draft": roofline.head_costs(head, BATCH, TREE, CONTEXT),
        "verify": roofline.verify_costs(target, BATCH, TREE.nodes, CONTEXT),
    }
    return {name: sum(cost.bytes for cost in of_stage) for name, of_stage in costs.items()}


def round_picture() -> str:
    """Return the picture of a round: a box for each stage, with what it does, reads and hands on."""
    read, y = bytes_read(), 24
    parts = [text(8, 14, f"one compiled program ({SHAPE}, batch {BATCH}, EAGLE-3, chain of {TREE.depth})")]
    for name in stages():
        function: Callable[..., Any] = view_of if name == "view" else getattr(decode, f"{name}_stage")
        lines = textwrap.wrap(str(inspect.getdoc(function)).partition("\n\n")[0], 64)
        height = 16 + 15 * len(lines)
        parts.append(box(8, y, WIDTH - 16, height, "none", stroke=COLOURS[name in read]))
        parts.append(text(18, y + 19, name, weight="bold"))
        parts += [text(100, y + 19 + 15 * number, line) for number, line in enumerate(lines)]
        if name in read:
            least = f"reads at least {read[name] / GIB:.1f} GiB"
            parts.append(text(WIDTH - 18, y + 19, least, anchor="end", fill=COLOURS[1]))
        parts.append(text(100, y + height + 14, f"↓ {inspect.signature(function).return_annotation}"))
        y += height + 20
    return svg(y, parts)


def memory_picture() -> str:
    """Return the picture of memory: what weights, caches, states and programs of three engines take."""
    scale, y, plans = (WIDTH - 16) / DEVICE, 52, {engine: plan_of(*engine) for engine in ENGINES}
    limit = max(plan.limit for plan in plans.values())
    given = (
        f"{SLOTS} slots of {MAX_LEN} tokens, bfloat16; outlined: {limit / GIB:.0f} of a device's {DEVICE / GIB:.0f} GiB"
    )
    parts = [text(8, 14, given)]
    for number, part in enumerate(PARTS):
        parts.append(box(8 + 112 * number, 24, 10, 10, FILLS[number]))
        parts.append(text(22 + 112 * number, 33, part.replace("_", " ")))
    for (shape, has_head), plan in plans.items():
        page, x = (plan.target_pool + plan.draft_pool) / plan.pages, 8.0
        name = f"{shape}, {'EAGLE-3' if has_head else 'n-gram'}: {plan.total / GIB:.1f} GiB"
        states = f", states of a slot {plan.states / SLOTS / 2**20:.0f} MiB with a round's rows" if plan.states else ""
        parts.append(text(8, y + 11, f"{name}; a page of {PAGE} tokens {page / 2**20:.2f} MiB{states}"))
        for number, part in enumerate(PARTS):
            width = getattr(plan, part) * scale
            parts.append(box(x, y + 18, width, 20, FILLS[number]))
            x += width
        parts.append(box(8, y + 18, limit * scale, 20, "none", stroke=GREY))
        y += 52
    return svg(y, parts)


def plan_of(shape: str, has_head: bool) -> MemoryPlan:
    """Return the memory plan of an engine with as many pages as its slots can fill."""
    made = planner(shape, has_head)
    return made.plan(PoolShape.of(made.config, TREE, "bfloat16"))


def text(x: float, y: float, words: str, *, weight: str = "normal", anchor: str = "start", fill: str = GREY) -> str:
    style = f'font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = "none") -> str:
    place = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"'
    return f'<rect {place} rx="2" fill="{fill}" stroke="{stroke}"/>'


def svg(height: float, parts: list[str]) -> str:
    """Return an SVG file of the pictures' width."""
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([start, *parts, "</svg>\n"])


def draw(folder: Path = FOLDER) -> None:
    """Write both pictures to a folder."""
    for name, picture in (("round", round_picture()), ("memory", memory_picture())):
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    draw()
