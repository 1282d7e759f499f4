"""The options of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from jspec.core.shorten import short

METHODS = ("eagle3", "dflash", "dspark", "medusa")
LOSS_KINDS = ("soft", "lk")
OPTIMIZERS = ("adamw", "muon")
RANGES = {  # for each number, the least value, and whether the value itself is allowed
    "steps": (1, True),
    "epochs": (0, False),
    "length": (32, True),
    "batch": (1, True),
    "ttt": (1, True),
    "decay": (0, False),
    "learning_rate": (0, False),
    "warmup": (0, True),
    "final": (0, True),
    "weight_decay": (0, True),
    "clip": (0, False),
    "draft_vocab": (1, True),
    "held_out": (0, True),
    "eval_every": (1, True),
    "eval_rows": (1, True),
    "seed": (0, True),
    "rope_theta": (0, False),
    "layers": (1, True),
    "intermediate_size": (1, True),
    "anchors": (1, True),
    "gamma": (0, False),
    "mask_token": (0, True),
    "markov_rank": (1, True),
    "devices": (1, True),
    "max_tokens": (1, True),
    "temperature": (0, True),
}
BLOCKS = ("dflash", "dspark")  # methods that draft blocks
HAVE = {  # for each option that not all methods have, those that have it
    "decay": ("eagle3", "medusa"),
    "loss": ("eagle3",),
    "draft_vocab": ("eagle3",),
    "rope_theta": ("eagle3", *BLOCKS),
    "feature_layers": ("eagle3", *BLOCKS),
    "intermediate_size": ("eagle3", *BLOCKS),
    "copy_layers": ("eagle3",),
    "anchors": BLOCKS,
    "gamma": BLOCKS,
    "mask_token": BLOCKS,
    "markov_rank": ("dspark",),
    "keep_activations": ("eagle3",),
    "eagle31": ("eagle3",),
}
SHAPE: tuple[str, ...] = ("draft_vocab", "rope_theta", "feature_layers", "layers", "intermediate_size", "copy_layers")
SHAPE += ("mask_token", "markov_rank", "eagle31")
SHARES = ("warmup", "final", "held_out")  # parts of a whole, at most 1


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a training run.

    Attributes:
        method: one of `METHODS`.
        steps: number of updates; None: as many as ``epochs`` take.
        epochs: how often the data is read, if ``steps`` is None.
        length: tokens of a row; longer documents are divided into parts, of which none sees those before it.
        batch: rows of an update.
        ttt: draft tokens that the loss covers: steps of EAGLE-3's training-time test, tokens that a DFlash or DSpark
            block drafts, or Medusa heads.
        decay: EAGLE-3 and Medusa: factor of the loss of each further draft token.
        loss: EAGLE-3: "soft": cross entropy with the target's probabilities; "lk": the loss of
            `jspec.train.losses.lk`.
        optimizer: "adamw", or "muon" for the matrices but the output head's (`jspec.train.optimizer`).
        learning_rate: largest learning rate.
        warmup: share of the updates in which the rate rises from 0.
        final: part of the rate that is left at the end of a cosine.
        beta1, beta2: AdamW's.
        weight_decay: AdamW's and Muon's.
        clip: largest norm of a gradient; larger ones are scaled down to it.
        draft_vocab: number of tokens that the head drafts, the most frequent ones of the data; None: 32000, or all of a
            smaller vocabulary.
        held_out: share of the documents that are evaluated instead of trained on; 0: no evaluation, and the last head
            is kept.
        eval_every: updates between two evaluations and checkpoints.
        eval_rows: most rows of an evaluation.
        seed: seed of the weights and of the order of the data.
        rope_theta: rotary base of the head.
        feature_layers: indices of the target's states that the head reads; None: 2, N / 2 and N - 3 of N layers for
            EAGLE-3, or others of fewer than 7 layers, and five from 2 to N - 2 for DFlash and DSpark. Medusa reads the
            state after the final norm.
        layers: number of the head's layers, or of a Medusa head's blocks; None: 1, for DFlash and DSpark 5.
        intermediate_size: channels of each layer's feed-forward; None: as many as in the target's first layer. Medusa
            has none.
        copy_layers: EAGLE-3: begin with the weights of the target's last layers (`jspec.train.copied`).
        anchors: DFlash and DSpark: blocks of a row; None: one for 8 tokens.
        gamma: DFlash and DSpark: depths over which the weight of the loss falls by e; None: for DFlash half the block,
            for DSpark the number of draft tokens.
        mask_token: DFlash and DSpark: id of the mask token; None: the last one of the vocabulary.
        markov_rank: DSpark: channels of the Markov head, at most those of a hidden state; None: 256, or all of these.
        keep_activations: EAGLE-3: keep what all steps compute until the gradient needs it, instead of computing a step
            again: fewer operations, and more memory.
        devices: number of devices, between which the rows of a batch are divided.
        eagle31: EAGLE-3: train an EAGLE-3.1 head: the normed output is fed on, and each state of the target is normed.
        regenerate: whether the target writes the answers of the data first (`jspec.train.regenerate`).
        max_tokens: most tokens of such an answer.
        temperature: temperature of such an answer.
        init: folder of a head to go on with, which has its own `SHAPE`; None: random weights.
    """

    method: str = "eagle3"
    steps: int | None = None
    epochs: float = 1.0
    length: int = 2048
    batch: int = 8
    ttt: int = 7
    decay: float = 0.8
    loss: str = "soft"
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    warmup: float = 0.015
    final: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 0.5
    draft_vocab: int | None = None
    held_out: float = 0.02
    eval_every: int = 500
    eval_rows: int = 32
    seed: int = 0
    rope_theta: float = 10000.0
    feature_layers: tuple[int, ...] | None = None
    layers: int | None = None
    intermediate_size: int | None = None
    copy_layers: bool = False
    anchors: int | None = None
    gamma: float | None = None
    mask_token: int | None = None
    markov_rank: int | None = None
    keep_activations: bool = False
    devices: int = 1
    eagle31: bool = False
    regenerate: bool = False
    max_tokens: int = 512
    temperature: float = 0.8
    init: str | None = None

    def __post_init__(self) -> None:
        if self.feature_layers is not None:
            object.__setattr__(self, "feature_layers", _indices(self.feature_layers))
        for name, choices in (("method", METHODS), ("loss", LOSS_KINDS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in choices:
                raise _wrong(name, f"one of {', '.join(choices)}", getattr(self, name))
        types = {field.name: str(field.type) for field in fields(self)}
        for name, (least, is_allowed) in RANGES.items():
            value, is_int = getattr(self, name), "int" in types[name]
            if value is None and "None" in types[name]:
                continue
            if isinstance(value, bool) or not isinstance(value, int if is_int else int | float):
                raise _wrong(name, "an int" if is_int else "a number", value)
            if not least <= value < math.inf or (value == least and not is_allowed):
                raise _wrong(name, f"at least {least}" if is_allowed else f"more than {least}", value)
        for name in SHARES:
            if getattr(self, name) > 1:
                raise _wrong(name, "at most 1", getattr(self, name))
        if self.length % 16:
            raise _wrong("length", "a multiple of 16", self.length)
        if self.batch % self.devices:
            raise _wrong("batch", f"a multiple of devices ({self.devices})", self.batch)
        if self.ttt > self.length - 2:
            raise _wrong("ttt", f"at most {self.length - 2}, the tokens that a row of length has to predict", self.ttt)
        if self.anchors is not None and self.anchors > self.length:
            raise _wrong("anchors", f"at most length ({self.length})", self.anchors)

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def refuse_unused(config: TrainConfig, names: Iterable[str]) -> None:
    """Raise ValueError if an option has no effect beside the others.

    Args:
        config: all options.
        names: names of the options that the caller gave; None and False ask for nothing.
    """
    for name in names:
        value, others = getattr(config, name), HAVE.get(name, METHODS)
        if value is None or value is False:
            continue
        if config.method not in others:
            known = f"with method {config.method!r} (those of {', '.join(others)} have it)"
            raise _unused(name, known, value, "choose such a method")
        if config.init is not None and name in SHAPE:
            raise _unused(name, "with init, whose head has its own", value, "leave out init")
        if name in ("max_tokens", "temperature") and not config.regenerate:
            raise _unused(name, "without regenerate, because no answers are written", value, "pass regenerate")
        if name == "epochs" and config.steps is not None:
            raise _unused(name, f"with steps ({config.steps}), which say when to end", value, "leave out steps")
        if name == "eval_rows" and config.held_out == 0:
            raise _unused(name, "without held-out documents", value, "hold out some (held_out)")


def _unused(name: str, why: str, got: Any, remedy: str) -> ValueError:
    return ValueError(f"train: {name}: expected none {why}, got {short(got)}; leave it out, or {remedy}")


def _indices(value: Any) -> tuple[int, ...]:
    """Return a list or tuple of indices as a tuple."""
    if not isinstance(value, list | tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise _wrong("feature_layers", "a list of ints", value)
    return tuple(value)


def _wrong(name: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"train: {name}: expected {expected}, got {short(got)}")
