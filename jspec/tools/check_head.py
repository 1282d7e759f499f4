"""`jspec info --check`: compare a draft head's options as its config.json has them with values that exporters confuse.

Two quantities are measured for each setting:

- agreement: share of first draft tokens equal to the target's argmax, over all positions of a given text;
- mean acceptance length: of greedy decoding with chains, over a few hundred tokens.

The advice rests on the agreement: it has ten times as many samples, two settings are compared position by position, and
long accepted chains in one repetitive text cannot hide misses. The acceptance length decides only if the agreements are
equal, for example between options that act only after the first draft token. The texts are short because beyond the
length that a head was trained on, a wrong rope theta may score higher than the right one on both quantities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jspec.draft import auto
from jspec.draft.base import Drafter
from jspec.draft.eagle import EagleDrafter
from jspec.draft.head_config import Eagle3Config, HeadConfig
from jspec.engine.tokenizer import Tokenizer, load_tokenizer
from jspec.models import load
from jspec.models.decoder import Model
from jspec.tools.replay import Replay, Texts, continue_greedily, observe
from jspec.tools.table import table

TEXT = (Path(__file__).parent / "sample_text.txt").read_text(encoding="utf-8")  # English prose, then Python
LENGTH = 4  # draft tokens a round
PROMPT = 64  # tokens of a prompt
PROMPTS = 4  # number of prompts
WINDOWS = 16  # maximum number of windows of the text
FIRST = 8  # position of the first root in a window
MAX_TOKENS = 48
CLEAR = 3.0  # standard errors; a setting that is better by more is clearly better
OFFICIAL_THETA = 10000.0
OWN = "as the file says"
OTHER_CAUSES = (
    "if drafts are still refused, check the prompt template (give a text as the model is used) and that the draft was "
    "trained for this very target."
)


@dataclass(frozen=True)
class Setting:
    """A drafter and the target's hidden states that it reads; settings that differ only in these share the drafter.

    Attributes:
        name: as in the report: "as the file says", or the argument that changes the option.
        layers: indices of the hidden states, in the order in which they are concatenated.
    """

    name: str
    drafter: Drafter
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Material:
    """Texts with the target's outputs: first windows of the given text, then greedy continuations by the target.

    Attributes:
        start: position of the first root of each text.
        stepwise: per text, whether every position is a root (windows) or the roots are those of decoding.
    """

    texts: Texts
    start: tuple[int, ...]
    stepwise: tuple[bool, ...]


@dataclass(frozen=True)
class Measurement:
    """The results of one setting."""

    name: str
    hits: Bool[np.ndarray, "positions"]  # whether the first draft token is the target's argmax
    lengths: Int[np.ndarray, "rounds"]  # tokens a round, including the bonus token

    @property
    def agreement(self) -> float:
        return float(self.hits.mean())

    @property
    def mean_acceptance_length(self) -> float:
        return float(self.lengths.mean())

    def beats(self, other: Measurement) -> bool:
        """Whether this setting is better than `other` by more than `CLEAR` standard errors.

        Agreement decides by McNemar's test: of the positions where exactly one of the two is right, each should have
        half. If both are right at the same positions, the mean acceptance lengths decide.
        """
        won, lost = np.sum(self.hits & ~other.hits), np.sum(other.hits & ~self.hits)
        if won + lost > 0:
            return bool(won - lost > CLEAR * np.sqrt(won + lost))
        error = np.sqrt(sum(np.var(one.lengths) / len(one.lengths) for one in (self, other)))
        return bool(self.mean_acceptance_length - other.mean_acceptance_length > CLEAR * error)


def check(
    head: str | Path,
    target: str | Path,
    *,
    tokenizer: Tokenizer | str | None = None,
    text: str | None = None,
    max_tokens: int = MAX_TOKENS,
) -> str:
    """Measure a drafter on its target: with the options of its file and, for EAGLE heads, with other options.

    Args:
        head: folder or hub id of an EAGLE head, Medusa heads or a draft model.
        target: folder or hub id of the target.
        tokenizer: "bytes" for byte-level models; None takes the tokenizer of the target's folder.
        text: read in at most `WINDOWS` windows of ``PROMPT + max_tokens`` tokens; None takes the built-in text.
        max_tokens: tokens decoded after each of `PROMPTS` prompts; ``PROMPT + max_tokens`` should not exceed the length
            that the head was trained on.

    Returns:
        A table and one sentence of advice.

    Raises:
        ValueError: head, target and tokenizer do not match, `max_tokens` is too small, or the text is too short.
        NotImplementedError: an unsupported checkpoint.
        FileNotFoundError: no such folder.
    """
    if max_tokens < 2 * LENGTH:
        raise ValueError(f"max_tokens: expected at least {2 * LENGTH}, two full rounds, got {max_tokens}; raise it")
    model, words = load_target(target, tokenizer)
    settings = settings_of(auto.load_drafter(head, length=LENGTH), model)
    runs = {setting.drafter: Replay(setting.drafter, model) for setting in settings}  # raises if a head does not match
    cuts = windows(TEXT if text is None else text, words, PROMPT + max_tokens)
    if cuts.max() >= model.config.vocab_size:
        raise ValueError(
            f"tokenizer: expected ids below the target's {model.config.vocab_size}, got {cuts.max()}; use its own"
        )
    material = prepare(model, cuts, settings)
    return report([measure(setting, runs[setting.drafter], material) for setting in settings])


def load_target(
    path: str | Path, tokenizer: Tokenizer | str | None, *, dtype: str | None = None
) -> tuple[Model, Tokenizer]:
    """Load a target and a tokenizer.

    Args:
        tokenizer: a tokenizer, its folder, or "bytes"; None takes the tokenizer of the target's folder.

    Raises:
        ValueError: the folder has no tokenizer.
    """
    found = load.load(path, dtype=dtype)
    model = Model.from_weights(found.config, found.weights)
    words = load_tokenizer(found.folder) if tokenizer is None else tokenizer
    words = load_tokenizer(words) if isinstance(words, str) else words
    if words is None:
        raise ValueError(f'{found.folder}: expected a tokenizer in the folder, got none; pass --tokenizer "bytes"')
    return model, words


def settings_of(drafter: Drafter, target: Model) -> list[Setting]:
    """The drafter as loaded; for an EAGLE head also each other setting, named as the argument that selects it."""
    layers = drafter.feature_layers(target)
    settings = [Setting(OWN, drafter, layers)]
    if not isinstance(drafter, EagleDrafter):
        return settings
    others = _other_layers(layers, target.config.num_layers + 1)
    settings += [Setting(f"feature_layers={other}", drafter, other) for other in others]
    for name, change in _changes(drafter.head.config, target):
        changed = replace(drafter.head, config=drafter.head.config.resized(**change))
        settings.append(Setting(name, type(drafter)(changed, drafter.tree), layers))
    return settings


def _other_layers(layers: tuple[int, ...], last: int) -> list[tuple[int, ...]]:
    """Feature layers all one lower, all one higher, and in reverse order, if such hidden states exist."""
    lower, higher = (tuple(layer + step for layer in layers) for step in (-1, 1))
    others = dict.fromkeys((lower, higher, layers[::-1]))
    return [other for other in others if other != layers and min(other) >= 0 and max(other) <= last]


def _changes(config: HeadConfig, target: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other values of a head's options: the argument as text, and the changed fields of its config."""
    for theta in dict.fromkeys((OFFICIAL_THETA, target.config.rope.theta)):
        if theta != config.rope.theta:
            yield f"rope_theta={theta:g}", {"rope": replace(config.rope, theta=theta)}
    if isinstance(config, Eagle3Config):
        for name in ("norm_output", "norm_before_residual"):
            value = not getattr(config, name)
            yield f"{name}={value}", {name: value}


def windows(text: str, tokenizer: Tokenizer, size: int) -> Int[np.ndarray, "windows size"]:
    """Cut a text into consecutive windows; each starts with the tokens that the tokenizer puts before any text (BOS).

    Args:
        size: tokens of a window, including those.

    Raises:
        ValueError: the text is shorter than one window.
    """
    begin = tokenizer.encode("")
    ids = tokenizer.encode(text)[len(begin) :]
    body = size - len(begin)
    count = min(len(ids) // body, WINDOWS)
    if not count:
        raise ValueError(f"text: expected at least {body} tokens, got {len(ids)}; give a longer one or less max_tokens")
    return np.asarray([[*begin, *ids[i * body : (i + 1) * body]] for i in range(count)], np.int32)


def prepare(target: Model, cuts: Int[np.ndarray, "windows size"], settings: Sequence[Setting]) -> Material:
    """Run the target once for all settings: its greedy texts, and its choices and hidden states at every position."""
    greedy = continue_greedily(target, cuts[:PROMPTS, :PROMPT], cuts.shape[1] - PROMPT)
    return Material(
        texts=observe(target, np.concatenate([cuts, greedy]), [layer for one in settings for layer in one.layers]),
        start=(FIRST,) * len(cuts) + (PROMPT,) * len(greedy),
        stepwise=(True,) * len(cuts) + (False,) * len(greedy),
    )


def measure(setting: Setting, run: Replay, material: Material) -> Measurement:
    """Measure one setting by replaying its drafter."""
    rounds = run(material.texts, layers=setting.layers, start=material.start, stepwise=material.stepwise)
    stepwise = np.asarray(material.stepwise)
    return Measurement(
        setting.name,
        hits=rounds.hits[rounds.is_round & stepwise],
        lengths=rounds.accept_len[rounds.is_round & ~stepwise] + 1,
    )


def report(measured: Sequence[Measurement]) -> str:
    """The table of all settings, starting with the file's own, and the advice."""
    best = max(measured, key=lambda one: (one.agreement, one.mean_acceptance_length))
    rows = [["setting", "mean acceptance length", "first draft agrees", ""]]
    for one in measured:
        marks = ["file"] * (one is measured[0]) + ["best"] * (one is best)
        rows.append([one.name, f"{one.mean_acceptance_length:.2f}", f"{one.agreement:.1%}", ", ".join(marks)])
    return f"{table(rows)}\n{advice(measured)}"


def advice(measured: Sequence[Measurement]) -> str:
    """One sentence of advice; it names another setting only if that is clearly better than the file's, the first."""
    own, *others = measured
    better = [one for one in others if one.beats(own)]
    if not better:
        return f"{'No other setting is clearly better' if others else 'It has no other settings'}; {OTHER_CAUSES}"
    best = max(better, key=lambda one: (one.agreement, one.mean_acceptance_length))
    return (
        f"{best.name} is clearly better than what the file says (first drafts agree at {best.agreement:.1%} against "
        f"{own.agreement:.1%}, mean acceptance length {best.mean_acceptance_length:.2f} against "
        f"{own.mean_acceptance_length:.2f}): pass it when loading the head, or correct the head's config.json."
    )
