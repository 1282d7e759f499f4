"""The calls with which a trainer gives new weights to an engine, or to several equal ones, and takes their memory."""

from __future__ import annotations

import abc
import contextlib
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from jspec.core.foreign_names import keywords_checked
from jspec.core.shorten import short
from jspec.draft.base import Drafter
from jspec.engine.callers.engine_thread import EngineThread
from jspec.engine.run.weight_update import RequestsMode, WeightUpdate, check_mode
from jspec.step.memory import tree_bytes
from jspec.step.new_weights import WeightSource, new_weights
from jspec.step.on_mesh import spans_processes
from jspec.step.program import Params

WEIGHTS_ASLEEP = ("keep", "host", "drop")


class TrainerCalls(abc.ABC):
    """Replaces the weights of engines, and frees their memory between rollouts."""

    @property
    @abc.abstractmethod
    def _engines(self) -> Sequence[EngineThread]:
        """The threads of the engines that serve."""

    @abc.abstractmethod
    def _check_alive(self) -> None:
        """Raise a RuntimeError if the engine is closed or has failed."""

    @keywords_checked
    def update_weights(
        self,
        weights: WeightSource,
        *,
        requests: RequestsMode = "retract",
        drafter: Drafter | Literal["keep"] | None = None,
        copy: bool = True,
        version: int | None = None,
    ) -> WeightUpdate:
        """Replace the target's weights, between two steps; the engine compiles nothing, and forgets its prefix cache.

        Everything is checked first; a refused update changes nothing. Of several engines each is updated in turn. One
        that fails for good meanwhile is left out; after another error, or Ctrl-C, a note of the error says which
        versions the engines have, and a call with the same version brings the rest to it.

        Args:
            weights: a `Model`; a mapping of jax or numpy arrays by the names of a Hugging Face checkpoint; or a folder
                or hub id of a checkpoint. They are converted to the engine's dtype, devices and ``quantize=``.
            requests: what happens to requests under way. "retract": they keep their tokens and compute their cache rows
                anew; "keep": they also keep the rows of the old weights, so their later tokens have a mixture of both;
                "abort": they end with ``finish_reason="abort"``; "wait": they end under the old weights first, and
                requests that are submitted meanwhile begin under the new ones.
            drafter: a drafter like the engine's with other weights; None: its own weights stay. Either is bound to the
                new target, whose embedding and output head it may share. An `MTP`, whose layer a trainer updates with
                the target, must be given, or "keep" for the old one.
            copy: whether arrays that need no conversion are copied. A trainer that donates them to a program would
                delete an engine's weights that share their buffers.
            version: number of these weights in ``Completion.weight_versions``, above that of the last, so that spans of
                different weights differ; None: one more than the last.

        Raises:
            TypeError, ValueError: an argument is of another kind, or the weights are not like the engine's.
            NotImplementedError: the engine has devices of several processes.
        """
        began = time.perf_counter()
        check_mode("update_weights", requests)
        if not isinstance(copy, bool):
            raise TypeError(f"update_weights: copy: expected a bool, got {short(copy)}")
        with self._in_order("update_weights", requests) as engines:
            number = _checked_version(version, [engine.core.weight_version for engine in engines])
            prepared = [_prepare(engine, weights, drafter, copy) for engine in engines]  # before any is changed
            updates: list[WeightUpdate] = []
            for engine, made in zip(engines, prepared, strict=True):
                with _noting_versions(engines, engine):
                    updates.append(_swap(engine, *made, requests, number, is_new=isinstance(drafter, Drafter)))
            self._check_alive()
        return replace(sum(updates[1:], updates[0]), seconds=time.perf_counter() - began)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes, which requests under way keep; return the number of pages that became free."""
        self._check_alive()
        return sum(engine.between_steps(engine.core.scheduler.reset_prefix_cache) for engine in self._engines)

    @keywords_checked
    def sleep(
        self,
        *,
        weights: Literal["keep", "host", "drop"] = "keep",
        requests: Literal["retract", "abort", "wait"] = "retract",
    ) -> None:
        """Free the device memory of the KV pools and all other state until `wake_up`; compiled programs stay.

        Texts that a `Suffix` with scope="engine" has gathered are kept. A sleeping engine refuses new requests.

        Args:
            weights: "keep" on the devices; "host": in the host's memory; "drop": `update_weights` must give others
                before `wake_up`. Arrays that the caller holds too, such as those of a `Model`, are not freed.
            requests: as for `update_weights`; those that are retracted go on after `wake_up` with the same tokens.

        Raises:
            ValueError: an argument is none of these.
            NotImplementedError: the engine has devices of several processes.
        """
        check_mode("sleep", requests, ("retract", "abort", "wait"))
        if weights not in WEIGHTS_ASLEEP:
            names = ", ".join(map(repr, WEIGHTS_ASLEEP))
            raise ValueError(f"sleep: weights: expected one of {names}, got {short(weights)}")
        with self._in_order("sleep", requests) as engines:
            for engine in engines:
                engine.settled(requests, partial(engine.core.sleep, weights))

    @keywords_checked
    def wake_up(self) -> None:
        """Allocate the memory that `sleep` freed; do nothing if the engine does not sleep.

        Raises:
            RuntimeError: the weights were dropped, and no others were given.
            ValueError: the memory does not suffice; the engine still sleeps then.
        """
        with self._in_order("wake_up") as engines:
            for engine in engines:
                engine.between_steps(engine.core.wake)

    @property
    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps (`sleep`)."""
        return any(engine.core.is_asleep for engine in self._engines)

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token is computed with; 0 before the first update."""
        return min(engine.core.weight_version for engine in self._engines)

    @contextlib.contextmanager
    def _in_order(self, call: str, requests: str = "retract") -> Iterator[Sequence[EngineThread]]:
        """Wait for the calls of other threads, so that several engines get the same weights; give the engines.

        Raises:
            RuntimeError, NotImplementedError: the engines cannot carry out a call in this thread, or at all.
        """
        self._check_alive()
        engines = self._engines
        with contextlib.ExitStack() as locks:
            for engine in engines:
                engine.check_other_thread()
                if not engine.updating.acquire(blocking=not engine.is_current):
                    raise RuntimeError(f"{call}: expected no other such call while steps are made by hand, got one")
                locks.callback(engine.updating.release)
            for engine in engines:
                _check_call(engine, call, requests)
            yield engines


def _check_call(engine: EngineThread, call: str, requests: str) -> None:
    """Raise an error if an engine cannot carry out a call."""
    if spans_processes(engine.core.runner.program.mesh):
        raise NotImplementedError(
            f"{call}: expected an engine whose devices are all of this process, got one with devices of several; close "
            "it in all processes, and make a new one"
        )
    if requests == "wait" and (engine.is_current or engine.core.is_asleep):
        reason = "the engine sleeps" if engine.core.is_asleep else "this thread runs its steps"
        raise RuntimeError(
            f'{call}: requests="wait": expected an engine whose requests can end meanwhile, but {reason}; pass '
            'requests="retract"'
        )


def _checked_version(version: Any, current: Sequence[int]) -> int:
    """Return the number of new weights for engines whose weights have the given numbers."""
    if version is None:
        return 1 + max(current)
    try:
        number = operator.index(version if type(version) is not bool else None)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"update_weights: version: expected an int or None, got {short(version)}") from None
    if number <= min(current):
        raise ValueError(
            f"update_weights: version: expected a number above {min(current)}, that of the engine's weights, got "
            f"{number}; leave it out for one more"
        )
    return number


@contextlib.contextmanager
def _noting_versions(engines: Sequence[EngineThread], engine: EngineThread) -> Iterator[None]:
    """Let an update leave out an engine of several that fails for good; note at other errors what was updated."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and engine.has_failed and any(not other.has_failed for other in engines):
            return
        if len(engines) > 1:
            versions = ", ".join(str(other.core.weight_version) for other in engines)
            error.add_note(f"update_weights: the engines now have weights of versions {versions}; update them again")
        raise


def _prepare(
    engine: EngineThread, weights: WeightSource, drafter: Drafter | str | None, copy: bool
) -> tuple[Drafter, Params]:
    """Return the drafter and the weights that an engine will use."""
    runner = engine.core.runner
    return new_weights(weights, drafter, runner.program, runner.params, engine.config, copy=copy)


def _swap(
    engine: EngineThread, drafter: Drafter, params: Params, requests: str, version: int, *, is_new: bool
) -> WeightUpdate:
    """Let an engine use a drafter and bound weights; the seconds are not measured.

    Args:
        is_new: whether the drafter's own weights are new.
    """
    core = engine.core

    def swap() -> int:
        engine.acceptance_warner.on_update(drafter, is_new=is_new)
        core.runner.use(drafter, params)
        core.use_version(version)
        return core.scheduler.reset_prefix_cache()

    settled, forgotten = engine.settled(requests, swap)
    nbytes = tree_bytes(params)
    return WeightUpdate(version, seconds=0.0, nbytes=nbytes, pages_forgotten=forgotten, **settled)
