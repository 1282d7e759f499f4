"""Measures the CPU time of an engine's turns with programs that compute nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from jspec import Engine, SamplingParams, Tree
from jspec.core.records import StepOutput
from jspec.draft.eagle import Eagle3
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.request.request import Request
from jspec.step.executable_key import ExecutableKey
from jspec.tools.bench import random_models

WARM_UP, STEPS, TOKEN = 5, 50, 5
SPARE = 4  # steps for which a request has tokens left


def max_tokens(depth: int, steps: int) -> int:
    return (steps + SPARE) * (depth + 1)


def ready_engine(rows: int, context: int, depth: int, ids: Sequence[int] = ()) -> Engine:
    """Return an engine whose programs compute nothing; the ready result of a step accepts half of the chain.

    Args:
        rows: number of slots.
        context: largest number of tokens of a prompt.
        depth: depth of the chain.
        ids: tokens that are emitted in turns; none: always the same token.
    """
    head = random_models.random_head("least", "float32")
    head = replace(head, config=replace(head.config, feature_layers=(0, 1, 2)))  # of a target with one layer
    engine = Engine(
        random_models.random_target("least", "float32"),
        drafter=Eagle3(head, Tree.chain(depth)),
        slots=rows,
        buckets=(rows,),
        prefill_buckets=(2048,),
        prefill_budget=rows * context,  # no row decodes before the prompts of all rows are prefilled
        max_len=context + max_tokens(depth, WARM_UP + STEPS),
        log_interval=None,
    )
    ids = ids or [TOKEN] * (depth + 1)
    answers: dict[str, Callable[..., Any]] = {
        "prefill": _answer(rows, depth, 0, ids),
        "round": _answer(rows, depth, (depth + 1) // 2, ids),
        "update_page_table": lambda table, new: table,
        "write_pending_rows": lambda params, state, request: state,
    }
    programs: Any = engine.core.runner.programs

    def compile_nothing(keys: Iterable[ExecutableKey], *_: Any, **__: Any) -> None:
        programs.compiled.update({key: answers[key.kind] for key in keys})

    programs.compile = compile_nothing
    return engine


def _answer(rows: int, length: int, accepted: int, ids: Sequence[int]) -> Callable[..., Any]:
    """Return a program whose results, ready at once, emit the next tokens of ``ids`` in every row.

    Args:
        length: depth of the tree.
        accepted: number of draft tokens that each row accepts.
    """
    rest = [-1] * (length - accepted) + [accepted + 1, accepted, length, 0]
    count = accepted + 1
    lines = [[*ids[at : at + count], *rest] for at in range(0, len(ids) - accepted, count)]
    reports = [np.array([[line] * rows], np.int32) for line in lines]
    outputs = cycle(StepOutput(report=one, trace=None) for one in reports)  # type: ignore[arg-type]
    return lambda params, state, packed: (state, next(outputs))


def cpu_seconds(engines: Sequence[Engine], contexts: Sequence[int], depth: int, blocks: int) -> np.ndarray:
    """Return the median CPU seconds of a turn, [engines, blocks]; all rows of an engine have its context's length.

    The engines alternate turn by turn, so a slow phase of the machine affects all of them.
    """
    return np.stack([_block(engines, contexts, depth) for _ in range(blocks)], axis=-1)


def _block(engines: Sequence[Engine], contexts: Sequence[int], depth: int) -> np.ndarray:
    with ExitStack() as stack:
        hands = [stack.enter_context(ByHand(engine)) for engine in engines]
        requests = [_begin(hand, context, depth) for hand, context in zip(hands, contexts, strict=True)]
        seconds = []
        for _ in range(WARM_UP + STEPS):
            for hand in hands:
                began = time.thread_time()
                hand.step()
                seconds.append(time.thread_time() - began)
        for hand, rows in zip(hands, requests, strict=True):
            assert all(request.finish_reason is None for request in rows), "all rows were active"
            for request in rows:
                hand.abort(request)
                hand.result(request)
    return np.median(np.reshape(seconds, (-1, len(engines)))[WARM_UP:], axis=0)


def _begin(hand: ByHand, context: int, depth: int) -> list[Request]:
    """Submit a random prompt for each slot and return the requests once a round of each was read.

    Rounds wait for their programs, which another thread prepares when the first token arrives.
    """
    rng = np.random.default_rng(context)
    params = SamplingParams(max_tokens=max_tokens(depth, WARM_UP + STEPS), temperature=0.0, ignore_eos=True)
    vocab = random_models.TARGETS["least"].vocab_size
    slots = hand.engine.config.slots
    requests = [hand.submit(rng.integers(0, vocab, context).tolist(), params) for _ in range(slots)]
    while not all(len(request.token_ids) > 1 for request in requests):
        hand.step()
    return requests
