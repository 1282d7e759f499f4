"""Scripts that run in each of several processes: ``python -m tests.support.process_scripts NAME PORT PROCESSES ID``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import jax
import numpy as np

from jspec import Completion, DraftModel, Eagle3, Engine, SamplingParams, distributed
from jspec.engine.schedule import sizes as round_sizes
from jspec.engine.schedule.sizes import RoundSize
from jspec.step import memory
from tests.support import engines, lettered, tiny
from tests.support.brittle import Fault
from tests.support.grammar_cases import MASKS, PROMPTS

DEVICES = 4
TEXT: dict[str, Any] = dict(tokenizer=lettered.tokenizer(), eos_ids=(lettered.END,))
FEW_PAGES = dict(pages=15)  # of four rows: not enough for two long requests
OPTIONS: dict[str, Any] = dict(
    slots=2, max_len=engines.MAX_LEN, page_size=4, buckets=(2,), prefill_buckets=(16,), compile_cache=False
)
LONG = [list(range(1, 12)) + [3] * 5] * 2
LONG_PARAMS = [
    SamplingParams(max_tokens=20, logit_bias={lettered.END: -100.0}, temperature=seed, seed=seed) for seed in range(2)
]
ASKED = PROMPTS + LONG
PARAMS = [replace(params, logprobs=None) for params in MASKS.params] + LONG_PARAMS
PLAIN = SamplingParams(max_tokens=12, temperature=0.0)


def say(value: Any) -> None:
    print("said", json.dumps(value), flush=True)


def engine(**options: Any) -> Engine:
    return Engine(engines.target(), **{"tensor_parallel": DEVICES, **OPTIONS, **options})


def drafting_engine() -> Engine:
    """Return an engine with a drafter, grammars, and too few pages for two long requests."""
    head = tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1))
    return engine(drafter=Eagle3(head, "chain:2"), **FEW_PAGES, **TEXT)


def tokens(done: list[Completion]) -> list[list[int]]:
    return [one.token_ids for one in done]


def everything() -> None:
    """Run requests of all kinds, before and after failed steps."""
    own = drafting_engine()
    if distributed.process_id():
        say(refusals(own))
        own.follow()
        say("followed")
        return
    for _ in range(2):
        say(tokens(own.generate(ASKED, PARAMS)))
    say({"preempted": own.metrics.num_preemptions, "cached": own.metrics.num_cached_tokens})
    for name, error in (("_read", OSError("a read failed")), ("_dispatch", OSError("a dispatch failed"))):
        original = getattr(own.core, name)
        setattr(own.core, name, Fault(original, 3, error))
        say([one.finish_reason for one in own.generate(PROMPTS[:2], PARAMS[:2])])
        setattr(own.core, name, original)
        say(tokens(own.generate(ASKED, PARAMS)))
    say(interrupts(own))
    say(tokens(own.generate(ASKED, PARAMS)))
    own.close()


def interrupts(own: Engine) -> int:
    """Interrupt calls at many moments, most of them while this thread waits for the devices; return how many."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    count = 0
    for delay in np.geomspace(0.001, 0.1, 12):
        signal.setitimer(signal.ITIMER_REAL, delay)
        try:
            own.generate(ASKED, PARAMS)
        except KeyboardInterrupt:
            count += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return count


def refusals(own: Engine) -> list[str]:
    """Return the errors of calls that belong in process 0."""
    errors = []
    calls: list[Callable[[], Any]] = [
        lambda: own.generate([1, 2]),
        lambda: own.warmup(),
        lambda: distributed.initialize("127.0.0.1:1", 2, 1),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def plain() -> None:
    """Run an engine whose programs are compiled ahead, after two that do not fit and one that is closed.

    The programs of the second one fit in process 0 alone.
    """
    measured = memory.measured
    if distributed.process_id():
        memory.measured = Fault(measured, 2, ValueError("the programs do not fit"))
    for options in ({"memory_fraction": 1e-9}, {"compile_ahead": True}):
        try:
            engine(**options)
        except ValueError as error:
            say(str(error))
    memory.measured = measured
    first = engine()
    if distributed.process_id():
        first.follow()
    else:
        first.close()
    own = engine(compile_ahead=True)
    if distributed.process_id():
        own.follow()
        return
    say(tokens(own.generate(PROMPTS, PLAIN)))
    own.close()


def sized() -> None:
    """Run rounds of all sizes in turns, timed ahead; some verify a part of the draft nodes."""
    round_sizes.BUDGET_ROWS = 2
    model = tiny.model(engines.VOCAB, layers=1, seed=3)
    own = engine(drafter=DraftModel(model, "topk:9,3,3"), adaptive=True, draft_nodes=(1, 2), compile_ahead=True)
    say(len(own.core.runner.round_seconds))
    if distributed.process_id():
        own.follow()
        return
    sizes = cycle([RoundSize(3, 1), RoundSize(3, 2), RoundSize(3), RoundSize(1), RoundSize(0)])
    own.policy.choose = lambda *_: next(sizes)  # type: ignore[method-assign]
    say(tokens(own.generate(PROMPTS, PLAIN)))
    say(sorted({key.nodes for key in own.core.runner.programs.compiled if key.nodes is not None}))
    own.close()


def altered() -> None:
    """Negative control: the other process has another token in each prompt."""
    own = engine()
    if distributed.process_id() == 0:
        say(tokens(own.generate(PROMPTS, PLAIN)))
        own.close()
        return
    side = own.core.runner.target_side
    run_here = side.run_here

    def altered_run(key: Any, *inputs: np.ndarray) -> Any:
        if key.kind == "prefill":
            pieces, prompt, *rest = inputs
            inputs = (pieces, (prompt + 1) % engines.VOCAB, *rest)
        return run_here(key, *inputs)

    side.run_here = altered_run  # type: ignore[method-assign]
    own.follow()


def skipping() -> None:
    """Negative control: one call is not sent to the other process."""
    own = engine()
    if distributed.process_id():
        own.follow()
        return
    job = distributed.current()
    assert job is not None
    send, count = job.send, 0

    def skip(message: Any) -> None:
        nonlocal count
        count += message.kind == "call"
        if count != 5 or message.kind != "call":
            send(message)

    job.send = skip  # type: ignore[method-assign]
    _generate_until_lost(own)


def killed(process_id: int) -> None:
    """Kill a process at its tenth call; the other one says how its requests end."""
    own = engine()
    if distributed.process_id() == process_id:
        side = own.core.runner.target_side
        run_here, left = side.run_here, 10

        def run(key: Any, *inputs: np.ndarray) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                say(time.time())
                os.kill(os.getpid(), signal.SIGKILL)
            return run_here(key, *inputs)

        side.run_here = run  # type: ignore[method-assign]
    if distributed.process_id():
        own.follow()
    else:
        _generate_until_lost(own)


def _generate_until_lost(own: Engine) -> None:
    own.submit(PROMPTS[0], PLAIN)  # waits while the two slots are in use
    done = own.generate(PROMPTS, PLAIN)
    say([[one.finish_reason, str(one.error)] for one in done])
    say(own.healthy)
    try:
        own.generate(PROMPTS[0])
    except RuntimeError as error:
        say(str(error))


def loaded(*folders: str) -> None:
    """Load a target from a folder in each process, or from the same one in all."""
    folder = folders[distributed.process_id() % len(folders)]
    own = Engine.from_pretrained(folder, tokenizer="bytes", tensor_parallel=2, slots=2, compile_cache=False)
    if distributed.process_id():
        own.follow()
        return
    say(own.generate("def main(", PLAIN)[0].token_ids)
    own.close()


def other_options() -> None:
    engine(slots=2 + distributed.process_id(), buckets=None)


def other_weights() -> None:
    Engine(tiny.model(engines.VOCAB, layers=1, seed=distributed.process_id()), tensor_parallel=DEVICES, **OPTIONS)


def other_program() -> None:
    """Each process has a logits processor of the same name, with another number in it."""
    number = float(distributed.process_id())

    def processor(logits: Any, context: Any) -> Any:
        return logits + number

    own = engine(logits_processor=processor)
    if distributed.process_id():
        own.follow()
        return
    try:
        own.generate(PROMPTS[0], PLAIN)
    except ValueError as error:
        say(str(error))
    own.close()


def apart() -> None:
    """Make a draft model on a device that has no target, of this process and of the other."""
    own = jax.local_devices()[-1]
    (other, *_) = [one for one in jax.devices() if one.process_index != own.process_index]
    for device in (own, other):
        try:
            engine(drafter=DraftModel(engines.target(), "chain:2", device=device), tensor_parallel=2)
        except ValueError as error:
            say(str(error))


def no_follower() -> None:
    """Process 1 ends without following."""
    own = engine()
    if distributed.process_id() == 0:
        _generate_until_lost(own)


def failing() -> None:
    """Process 1 fails before it makes an engine."""
    if distributed.process_id():
        raise KeyError("no such file")
    engine()


def frozen() -> None:
    """Process 1 is stopped, as if its host had lost its power."""
    if distributed.process_id():
        say(time.time())
        os.kill(os.getpid(), signal.SIGSTOP)
    engine()


def hanging() -> None:
    """Process 0 waits for something else while process 1 is killed."""
    if distributed.process_id():
        say(time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def ended(how: str) -> None:
    """Process 0 ends without closing its engine."""
    own = engine()
    if distributed.process_id():
        own.follow()
        say("followed")
        return
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "error":
        raise ValueError("the script is wrong")


SCRIPTS: dict[str, Callable[..., None]] = {
    **{run.__name__: run for run in (everything, plain, sized, loaded, altered, skipping, other_options)},
    **{run.__name__: run for run in (apart, other_weights, other_program, no_follower, failing, frozen, hanging)},
    **{f"killed {i}": lambda i=i: killed(i) for i in range(2)},  # type: ignore[misc]
    **{f"ended by {how}": lambda how=how: ended(how) for how in ("itself", "interrupt", "sigterm", "error")},  # type: ignore[misc]
}


if __name__ == "__main__":
    name, port, processes, own_id, *rest = sys.argv[1:]
    distributed.initialize(f"127.0.0.1:{port}", int(processes), int(own_id), timeout=60)
    SCRIPTS[name](*rest)
