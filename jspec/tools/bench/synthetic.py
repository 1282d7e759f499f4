"""Synthetic acceptance: drafts of random weights are accepted by lot, at stated rates.

For measurements alone. The rule lives in a round that the bench puts together from the stages of `jspec.step`; neither
`Program` nor `Engine` knows of it, so nothing that serves users can be put in this mode.

A rate is the share of rounds that accept the draft token at a position, and so all before it: rates .75, .55, .42, .31
give chains of 1 to 4 tokens the mean acceptance lengths 1.75, 2.30, 2.72 and 3.03.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec import verify
from jspec.core.ancestors import ancestors, depths
from jspec.core.records import Draft, SlotState, SlotView, StepOutput, Verdict
from jspec.core.tree import ROOT_ONLY, Tree
from jspec.step import decode
from jspec.step.program import Params, Program, view_of

Rates = tuple[float, ...]
RATES: Rates = (0.75, 0.55, 0.42, 0.31)  # published for EAGLE-3 on MT-Bench


def check_rates(rates: Sequence[float]) -> Rates:
    """The rates, if they can be a drafter's.

    Raises:
        ValueError: none, one outside 0 to 1, or one above that of the position before.
    """
    falling = all(later <= earlier for earlier, later in itertools.pairwise(rates))
    if not rates or not all(0 <= rate <= 1 for rate in rates) or not falling:
        raise ValueError(f"positions: expected shares from 0 to 1 that never rise, such as .75,.55, got {list(rates)}")
    return tuple(rates)


def rates_of_length(length: float, tree: Tree | None) -> Rates:
    """Rates of a mean acceptance length: whole positions are always accepted, the next one by the rest.

    So does vLLM's ``synthetic_acceptance_length``: 2.5 is 1, .5, 0.

    Raises:
        ValueError: the tree cannot yield so many tokens a round, or it is less than one.
    """
    depth = (tree or ROOT_ONLY).depth
    if not 1 <= length <= depth + 1:
        raise ValueError(f"length: expected 1 to {depth + 1} tokens a round of {tree or ROOT_ONLY}, got {length:g}")
    return tuple(min(max(length - position, 0.0), 1.0) for position in range(1, depth + 1))


def rates_of_tree(rates: Rates, tree: Tree | None) -> Rates:
    """The first of the rates, as many as the tree is deep.

    Raises:
        ValueError: there are too few.
    """
    depth = (tree or ROOT_ONLY).depth
    if len(rates) < depth:
        raise ValueError(
            f"positions: expected {depth} for {tree}, got {len(rates)}; state more or take a shorter draft"
        )
    return rates[:depth]


def mean_length(rates: Rates) -> float:
    """Tokens a round, the target's own counted."""
    return 1 + math.fsum(rates)


def draw(rates: Rates, batch: int, tokens: int, seed: int) -> Int[np.ndarray, "rounds batch"]:
    """How many draft tokens each row accepts, round by round, until every row has emitted ``tokens``.

    Args:
        rates: of the tree's positions.
        tokens: that each row emits; what its last round has beyond them is cut.
    """
    chance = np.random.default_rng(seed).random((tokens, batch, 1))  # a round emits at least one token
    accepted = np.asarray(np.sum(chance < np.array(rates), axis=-1), np.int32)
    emitted = np.cumsum(accepted + 1, axis=0)
    return accepted[: 1 + np.sum(emitted.min(axis=1) < tokens)]


def impose(verdict: Verdict, draft: Draft, view: SlotView, tree: Tree, accepted: Int[Array, "batch"]) -> Verdict:
    """The verdict that accepts so many draft tokens of each row, whatever the target says.

    The first of the nodes that lie so deep is accepted; the verdict's last token follows it.

    Args:
        verdict: of the program's own rule.
        accepted: draft tokens to accept, at most the tree's depth.
    """
    ancestor_mask = ancestors(draft.parents)
    within = draft.valid & (depths(ancestor_mask) <= accepted[:, None])
    best = jnp.argmax(jnp.where(within, depths(ancestor_mask), -1), axis=-1).astype(jnp.int32)
    newest = jnp.take_along_axis(verdict.tokens, jnp.maximum(verdict.counts - 1, 0)[:, None], axis=1)[:, 0]
    return verify.verdict_of(best, newest, draft, ancestor_mask, view, tree)


def synthetic_step(
    program: Program,
    params: Params,
    state: SlotState,
    slots: Int[Array, "batch"],
    accepted: Int[Array, "batch"],
) -> tuple[SlotState, StepOutput]:
    """One round as `jspec.step.spec_round` runs it, its own accept rule included, but with the verdict imposed.

    Args:
        state: donated.
        accepted: as for `impose`.
    """
    view = view_of(state, slots, program)
    draft, draft_state = decode.draft_stage(program, params, state, view)
    out, target = decode.verify_stage(program, params, state, view, draft)
    verdict = decode.accept_stage(program, out, view, draft)
    with jax.named_scope("impose"):
        verdict = impose(verdict, draft, view, program.drafter.tree, accepted)
    state = replace(state, target=target, draft=draft_state)
    state = decode.commit_stage(program, params, state, view, draft, verdict, out)
    return state, StepOutput(report=decode.report_stage(view, draft, verdict)[None], trace=None)
