"""Trains a draft head between rollouts, so that it follows a target that reinforcement learning changes.

The data are the completions of the rollouts just made, the teacher is the target that comes next, and the loss is that
of `jspec.train.fit` at a constant learning rate. Rows have one shape and the target is an argument of the compiled
update, so later calls compile nothing.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.shorten import short
from jspec.draft.base import Drafter
from jspec.draft.beside import Beside
from jspec.draft.named import DrafterSource, make_drafter
from jspec.engine.request.request import Completion
from jspec.models.decoder import Model
from jspec.step.new_weights import WeightSource, model_of
from jspec.step.weights import check_live, config_changes, shape_changes
from jspec.train.config import TrainConfig, refuse_unused
from jspec.train.data import LEAST, Document
from jspec.train.loop import Meter, loss_error
from jspec.train.material import Divided, rows_of
from jspec.train.measured import Figures
from jspec.train.method import Method, refuse_quantized
from jspec.train.methods import METHODS, check_depth
from jspec.train.pack import Order, Packed, pack_in_memory, useful_parts
from jspec.train.program import TrainingProgram, UpdateReport, mesh_of
from jspec.train.run import out_of_memory_named

OPTIONS = (
    *("epochs", "length", "batch", "ttt", "decay", "loss", "optimizer", "learning_rate", "beta1", "beta2"),
    *("weight_decay", "clip", "seed", "anchors", "gamma", "keep_activations", "devices"),
)
CONSTANT: dict[str, Any] = {"warmup": 0.0, "final": 1.0}  # the learning rate of each update, whatever their number
ADVICE = 'draft with jspec.Suffix(tree, scope="engine"), which learns from earlier rollouts without training'
REMEDIES = {  # of drafters whose weights are not a head's
    "MTP": "train the layer with the target and pass jspec.MTP(head, tree) to update_weights(drafter=)",
    "DraftModel": "train the model by itself and pass jspec.DraftModel(model, tree) to update_weights(drafter=)",
}


@dataclass(frozen=True)
class HeadUpdate:
    """What a call of `HeadTrainer.update` did.

    Attributes:
        figures: what was measured over all its updates, each before its change: mean loss, hits by draft position,
            predicted acceptance.
        losses: mean loss of each update.
        rows: number of packed rows.
        tokens: number of tokens that the updates read, prompts too, and again in each epoch.
        completions: number of completions.
        divided: number of those longer than a row; none of their parts sees those before it.
        left_out: number of completions of which no part was used: too short, or without a token of their own.
        left_out_tokens: number of tokens in parts that were not used; those of ``left_out`` are among them.
    """

    figures: Figures
    losses: tuple[float, ...]
    rows: int
    tokens: int
    completions: int
    divided: int
    left_out: int
    left_out_tokens: int


class HeadTrainer:
    """Trains the head of a drafter on completions, for a target that changes.

    Between calls the weights and the optimiser's state, in float32, stay on the head's device, or on all of
    ``devices``. So does the target of the last call, until its owner donates it or the next call names another.
    `Engine.sleep` frees the engine's pools for the time of an update.

    Args:
        drafter: an `Eagle3`, `DFlash`, `DSpark` or `Medusa`, alone or in a `Beside`, or a path as for
            `jspec.Engine(drafter=)`; its own arrays stay as they are.
        target: the target that the head was trained for: a `Model` on one device or a path. Its states are the head's
            inputs, so its dtype and quantisation should be those of the engine.
        options: those of `OPTIONS`, fields of `TrainConfig`. ``epochs`` is how often a call reads its completions (1),
            ``ttt`` by default the number of tokens that the drafter drafts. The learning rate is constant.

    Raises:
        TypeError, ValueError: the drafter has no head that can be trained, it does not fit the target, or an option is
            wrong or has no effect.
    """

    def __init__(self, drafter: DrafterSource, target: Model | str | Path, **options: Any) -> None:
        target = target if isinstance(target, Model) else Model.from_pretrained(target)
        loaded = make_drafter(drafter, dtype=str(target.dtype))
        self._drafter, part, kind = _trainable(loaded)
        check_live("HeadTrainer: target", target)
        check_live("HeadTrainer: drafter", getattr(part, kind.field))
        self._trained = _with(part, kind.field, jax.tree.map(jnp.array, getattr(part, kind.field)))  # copies
        _check_on_one_device(target, self._head)
        refuse_quantized("HeadTrainer: drafter", self._trained, self._head)
        self._config = _config_of(self._trained, self._head, kind, options)
        device = jax.tree.leaves(self._head)[0].sharding
        self._target: Model = jax.device_put(target, device)
        head = kind.with_shared(self._trained, self._target)
        joined = {field.name: (getattr(self._head, field.name), getattr(head, field.name)) for field in fields(head)}
        shared = [name for name, (before, after) in joined.items() if before is None and after is not None]
        self._method = kind(self._config, shared)
        mesh = mesh_of(self._config.devices)
        self._program = TrainingProgram(self._method, self._target, head, steps=1, mesh=mesh)
        self._lock = threading.Lock()  # an update gives the arrays of the state away
        state = self._program.start(head)
        # Committed to the device, as an update returns it: otherwise the second update would be compiled again.
        self._state = jax.device_put(state, device) if mesh is None else state

    @property
    def drafter(self) -> Drafter:
        """The drafter with the weights so far, in its own dtypes, for ``update_weights(drafter=)``.

        They are copies, which later updates leave as they are. Threads may ask for it while another one updates.
        """
        with self._lock:
            return self._drafter_now()

    def _drafter_now(self) -> Drafter:
        trained = self._state.weights
        names = [field.name for field in fields(trained) if field.name in self._method.frozen]
        old, structure = jax.tree.flatten(self._head.replace(**dict.fromkeys(names)))
        new = [_copied(*leaves) for leaves in zip(jax.tree.leaves(trained), old, strict=True)]
        kept = {name: getattr(self._head, name) for name in names}
        drafter = _with(self._trained, self._method.field, jax.tree.unflatten(structure, new).replace(**kept))
        return _with(self._drafter, "model", drafter) if isinstance(self._drafter, Beside) else drafter

    def update(self, completions: Iterable[Completion] | Completion, target: WeightSource | None = None) -> HeadUpdate:
        """Train on completions, with the target's states and probabilities at their tokens as the teacher.

        Tokens of the completions count in the loss, those of prompts are only read. Completions are packed into rows of
        ``length`` tokens; a longer one, prompt included, is divided into parts that do not see each other. The batches
        are those of `jspec.train.fit` for the same rows; the last one is filled with rows of the next epoch.

        Args:
            completions: results of an engine, or one; further samples of a prompt count once.
            target: the weights that come next, as for `Engine.update_weights`, brought to the dtype and the device of
                the first target; None: those of the last call.

        Raises:
            TypeError, ValueError: an argument is of another kind, or the target is not like the first.
            Exception: that of a completion that failed.
            LossError: the loss or the gradient of an update is not finite, which left the weights as they were; the
                other updates of the call changed them.
        """
        documents = _documents(completions, self._target.config.vocab_size)
        packed, counts = _packed(documents, self._config.length)
        order = Order(len(packed), self._config.seed)
        steps = math.ceil(self._config.epochs * len(packed) / self._config.batch)
        batches = [order.batch(step, self._config.batch) for step in range(steps)]
        with self._lock, out_of_memory_named(self._config):
            self._use(target)
            reports = [self._run(packed, batch) for batch in batches]
            meter, losses = _measured(packed, batches, reports)
        assert meter.total is not None
        return HeadUpdate(meter.total.figures(), losses, len(packed), meter.tokens, **counts)

    @property
    def _head(self) -> Any:
        return getattr(self._trained, METHODS[self._trained.method].field)

    def _use(self, target: WeightSource | None) -> None:
        """Let updates run with a target."""
        place = "HeadTrainer.update: target"
        if target is None:
            check_live(f"{place}: None", self._target)
            return
        check_live(place, target)
        new = model_of(place, target, self._target)
        if changes := config_changes(new, self._target) or shape_changes(new, self._target):
            raise ValueError(
                f"{place}: expected a model like the first, got another ({changes}); make a new HeadTrainer for it"
            )
        self._target = new
        self._program.use(new, self._method.with_shared(self._trained, new))

    def _run(self, packed: Packed, batch: np.ndarray) -> UpdateReport:
        self._state, report = self._program.update(self._state, rows_of(packed, batch, len(batch)))
        return report


def _trainable(drafter: Drafter | None) -> tuple[Drafter, Any, type[Method]]:
    """Return a drafter, its part that has a head, and the method that trains the head.

    Raises:
        ValueError: it has none.
    """
    part = drafter.model if isinstance(drafter, Beside) else drafter
    kind = METHODS.get(getattr(part, "method", ""))
    if drafter is None or part is None or kind is None:
        names = "Eagle3, DFlash, DSpark or Medusa"
        remedy = REMEDIES.get(type(part).__name__, ADVICE)
        raise ValueError(f"HeadTrainer: drafter: expected {names}, got {short(drafter)}; {remedy}")
    return drafter, part, kind


def _check_on_one_device(target: Model, head: Any) -> None:
    for name, mesh in (("target", target.mesh), ("drafter", getattr(head, "mesh", None))):
        if mesh is not None:
            raise ValueError(f"HeadTrainer: {name}: expected weights on one device, got some over {mesh}; load them so")


def _config_of(drafter: Any, head: Any, kind: type[Method], options: dict[str, Any]) -> TrainConfig:
    """Return the options of a trainer; raise ValueError if one is unknown, wrong or has no effect."""
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise ValueError(f"HeadTrainer: {unknown[0]}: expected the options {', '.join(OPTIONS)}, got another")
    deepest = drafter.max_depth(head)
    ttt = {"ttt": drafter.tree.depth if deepest is None else deepest}
    config = TrainConfig(method=drafter.method, **{**CONSTANT, **ttt, **options})
    refuse_unused(config, options)
    if deepest is not None:
        check_depth(deepest, config.ttt, "drafter")
    return config


def _documents(completions: Iterable[Completion] | Completion, vocab: int) -> list[Document]:
    """Return each sample's prompt and tokens as a document in which the tokens count."""
    samples: dict[int, Completion] = {}
    for completion in [completions] if isinstance(completions, Completion) else completions:
        if not isinstance(completion, Completion):
            raise TypeError(f"HeadTrainer.update: expected completions of an engine, got {short(completion)}")
        samples |= {id(sample): sample for sample in completion.raise_for_error().samples}
    documents = [
        Document.of([*sample.prompt_token_ids, *sample.token_ids], len(sample.prompt_token_ids))
        for sample in samples.values()
    ]
    largest = max((int(document.tokens.max()) for document in documents if len(document.tokens)), default=0)
    if largest >= vocab:
        raise ValueError(
            f"HeadTrainer.update: expected token ids below {vocab}, the target's vocabulary, got {largest}"
        )
    return documents


def _packed(documents: Sequence[Document], length: int) -> tuple[Packed, dict[str, int]]:
    """Pack documents into rows; return these, and counts of documents and of tokens as in `HeadUpdate`."""
    parts, numbers, divided, left_out = list[Document](), list[int](), Divided(length), 0
    for number, document in enumerate(documents):
        useful = useful_parts(document, length)
        divided.count(len(document.tokens), len(document.tokens) - sum(len(part.tokens) for part in useful))
        left_out += not useful
        parts += useful
        numbers += [number] * len(useful)
    if not parts:
        raise ValueError(
            f"HeadTrainer.update: expected completions with {LEAST} tokens or more, prompt included, within rows of "
            f"{length}, got {len(documents)} without such; give others, or raise length above the prompts"
        )
    counts = dict(completions=divided.documents, divided=divided.long, left_out=left_out)
    return pack_in_memory(parts, numbers, length), counts | {"left_out_tokens": divided.left_out}


def _measured(
    packed: Packed, batches: Sequence[np.ndarray], reports: Sequence[UpdateReport]
) -> tuple[Meter, tuple[float, ...]]:
    """Wait for updates; return what they measured, and the loss of each.

    Raises:
        LossError: one was not finite.
    """
    meter = Meter()
    for step, (batch, report) in enumerate(zip(batches, reports, strict=True)):
        if not bool(report.is_finite):
            raise loss_error(step, "completions", packed.lines_of(batch))
        meter.add(report.measured, int((packed.segments[batch] > 0).sum()))
    return meter, tuple(report.measured.figures().loss for report in reports)


def _copied(trained: jax.Array, old: Any) -> jax.Array:
    """Return a copy of a trained weight in the dtype and on the device of the old one."""
    return jax.device_put(jnp.array(trained, old.dtype, copy=True), old.sharding)


def _with(drafter: Drafter, name: str, value: Any) -> Any:
    """Return a copy of a drafter with another head or part."""
    other = copy.copy(drafter)
    object.__setattr__(other, name, value)
    return other
