"""The calls with which a trainer gives an engine new weights."""

from __future__ import annotations

import threading
import time

from jspec.core.config import EngineConfig
from jspec.core.shorten import short
from jspec.draft.base import Drafter
from jspec.engine.callers.engine_thread import EngineThread
from jspec.engine.run.weight_update import WeightUpdate, check_mode
from jspec.step.memory import tree_bytes
from jspec.step.new_weights import WeightSource, new_weights
from jspec.step.on_mesh import spans_processes


class WeightCalls:
    """Replaces the weights of one engine; calls of several threads are carried out one after another."""

    def __init__(self, threads: EngineThread, config: EngineConfig) -> None:
        self._threads, self._config = threads, config
        self._lock = threading.Lock()

    def update(
        self, weights: WeightSource, requests: str, drafter: Drafter | str | None, *, copy: bool, version: int | None
    ) -> WeightUpdate:
        """Carry out `jspec.Engine.update_weights`."""
        began, core = time.perf_counter(), self._threads.core
        check_mode("update_weights", requests)
        if version is not None and type(version) is not int:
            raise TypeError(f"update_weights: version: expected an int or None, got {short(version)}")
        program = core.runner.program
        if spans_processes(program.mesh):
            raise NotImplementedError(
                "update_weights: expected an engine whose devices are all of this process, got one with devices of "
                "several; make a new engine in all processes"
            )
        with self._lock:
            proposes, params = new_weights(
                weights, drafter, core.runner.program, core.runner.params, self._config, copy=copy
            )

            def swap() -> dict[str, int]:
                core.runner.use(proposes, params)
                core.use_version(core.weight_version + 1 if version is None else version)
                return {"version": core.weight_version, "pages_forgotten": core.scheduler.reset_prefix_cache()}

            settled, swapped = self._threads.settled(requests, swap)
        return WeightUpdate(seconds=time.perf_counter() - began, nbytes=tree_bytes(params), **settled, **swapped)
