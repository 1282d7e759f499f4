"""Engines that several test files share, compiled once per process, and engines that run the programs of others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec import Eagle3, Engine, Model, Tree
from jspec.core import prompt_blocks
from jspec.draft.named import DrafterSource
from jspec.step import side
from jspec.step.executable_key import ExecutableKey
from jspec.step.executables import Executables
from tests.support import costs, tiny

VOCAB, MAX_LEN, LENGTH = 16, 48, 3
SLOTS = 4  # of `byte_engine`
PLAIN_OPTIONS: dict[str, Any] = dict(slots=8, max_len=MAX_LEN, buckets=(8,), prefill_buckets=(MAX_LEN,))
BYTE_OPTIONS: dict[str, Any] = dict(
    slots=SLOTS, buckets=(SLOTS,), prefill_buckets=(32,), max_len=64, page_size=4, tokenizer="bytes", controls=False
)

TAKEN = 1e-6  # seconds that it takes to take a known program

_known: list[tuple[Any, dict[ExecutableKey, Any]]] = []
_making = threading.Lock()


def make(model: Model, drafter: DrafterSource = None, **options: Any) -> Engine:
    """Make an engine that, instead of compiling a program again, takes that of an earlier engine of this function.

    Programs are the same if all that they depend on is equal (`settings_of`). A test that changes code that is traced
    makes its engines without this function.
    """
    with _making, pytest.MonkeyPatch.context() as patch:
        patch.setattr(side, "Executables", KnownExecutables)
        return Engine(model, drafter=drafter, **options)


def forget_programs() -> None:
    """Let later engines compile their programs again; those of earlier engines stay as long as these."""
    _known.clear()


class KnownExecutables(Executables):
    """Executables that are not compiled again if an earlier object with the same settings has compiled them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        settings = settings_of(self)
        found = [known for other, known in _known if other == settings]
        self._of_settings: dict[ExecutableKey, Any] = found[0] if found else {}
        if not found:
            _known.append((settings, self._of_settings))

    def _lower(self, key: ExecutableKey) -> Any:
        if key in self._of_settings:
            self.lower_seconds[self._name(key)] = TAKEN
            return key, None
        return key, super()._lower(key)

    def _compile_one(self, name: str, lowered: Any) -> Any:
        key, text = lowered
        if text is None:
            jax.monitoring.record_event_duration_secs("/jspec/compile/known", 0.0)  # for the fixture `compilations`
            self.seconds[name] = TAKEN
        else:
            self._of_settings[key] = super()._compile_one(name, text)
        return self._of_settings[key]


def settings_of(programs: Executables) -> Any:
    """Return all that executables depend on: settings, options, and the shapes and devices of weights and state."""
    program, config = programs._program, programs._config
    fields = {name: value for name, value in vars(program).items() if name not in ("drafter", "accept")}
    objects = [(type(each), _with_bytes(vars(each))) for each in (program.drafter, program.accept)]
    leaves, structure = jax.tree.flatten((programs._adapted, programs._shapes))
    shapes = [(leaf.shape, leaf.dtype, leaf.weak_type, leaf.sharding) for leaf in leaves]
    drafting = None if programs._drafting is None else settings_of(programs._drafting)
    chosen = config.rounds_per_dispatch, config.logprobs_mode, prompt_blocks.BLOCK
    return fields, objects, structure, shapes, chosen, program.compiler_options, drafting


def _with_bytes(values: Any) -> Any:
    """Return the structure and the leaves of a tree, with arrays as bytes, which can be compared."""
    leaves, structure = jax.tree.flatten(values)
    arrays = (jax.Array, np.ndarray)
    return structure, [
        (leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()) if isinstance(leaf, arrays) else leaf for leaf in leaves
    ]


@cache
def target() -> Model:
    return tiny.model(VOCAB, layers=1)


@cache
def hybrid() -> Model:
    return tiny.hybrid(VOCAB)


class TargetKind(NamedTuple):
    """A target, and the number of tokens with which all prompts of a test begin."""

    make: Callable[[], Model]
    header: int = 0


ATTENTION, HYBRID = TargetKind(target), TargetKind(hybrid, header=40)  # a state is kept at 32 tokens


@cache
@costs.shared()
def eagle3(*, rounds: int, page_size: int) -> Engine:
    """Return an engine with a random EAGLE-3 head and two slots."""
    head = tiny.eagle_head(target(), draft_vocab=12, feature_layers=(0, 1))
    return make(
        target(),
        Eagle3(head, Tree.chain(LENGTH)),
        slots=2,
        max_len=MAX_LEN,
        page_size=page_size,
        buckets=(2,),
        prefill_buckets=(6, 16),
        rounds_per_dispatch=rounds,
    )


@cache
@costs.shared()
def plain() -> Engine:
    """Return an engine without drafter that prefills each prompt in one chunk."""
    return make(target(), **PLAIN_OPTIONS)


@cache
@costs.shared()
def shared_bytes() -> Engine:
    """Return the one `byte_engine` that several files share."""
    return byte_engine()


def byte_engine(mesh: Mesh | None = None, **options: Any) -> Engine:
    """Make an engine of four slots that reads and writes bytes, with a random EAGLE-3 head."""
    model = tiny.model(256, layers=1)
    head = tiny.eagle_head(model, draft_vocab=200, feature_layers=(0, 1))
    return make(model, Eagle3(head, Tree.chain(LENGTH)), mesh=mesh, **(BYTE_OPTIONS | options))
