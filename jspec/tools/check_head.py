"""Which options a draft head wants (`jspec info --check`): the file's own against others that exporters confuse.

Two quantities are measured. The agreement is the share of first draft tokens that are the target's argmax, at every
place of a given text. The mean acceptance length is that of greedy decoding with chains, over a few hundred tokens.
Advice rests on the agreement: it has ten times the samples, two settings are compared place by place, and long chains
in one repetitive text cannot make up for misses. The acceptance length decides only where the agreement cannot tell, as
for what is fed back behind the first draft token. Texts are short for a reason: beyond the length that a head was
trained on, a wrong rope theta may do better by either quantity than the right one.
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
from jspec.tools.sample_text import TEXT
from jspec.tools.table import table

LENGTH = 4  # draft tokens a round
PROMPT = 64  # tokens in front of what is decoded
PROMPTS = 4
WINDOWS = 16  # cuts of the text, at most
FIRST = 8  # position of the first root in a cut
MAX_TOKENS = 48
CLEAR = 3.0  # standard errors by which a setting is clearly better
OFFICIAL_THETA = 10000.0
OWN = "as the file says"
ELSE = (
    "if drafts are still refused, check the prompt template (give a text as the model is used) and that the draft was "
    "trained for this very target."
)


@dataclass(frozen=True)
class Setting:
    """A drafter and the target's states that it is given; settings that differ in these alone share the drafter."""

    name: str
    drafter: Drafter
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Material:
    """Texts with the target's part of them: cuts of a given text, then greedy texts of the target's own."""

    texts: Texts
    start: tuple[int, ...]
    stepwise: tuple[bool, ...]


@dataclass(frozen=True)
class Measurement:
    """A setting's results."""

    name: str
    hits: Bool[np.ndarray, "places"]  # the first draft token is the target's argmax
    lengths: Int[np.ndarray, "rounds"]  # tokens a round, the bonus token counted

    @property
    def agreement(self) -> float:
        return float(self.hits.mean())

    @property
    def mean_acceptance_length(self) -> float:
        return float(self.lengths.mean())

    def beats(self, other: Measurement) -> bool:
        """Whether it is better by more than chance, `CLEAR` standard errors.

        By the agreement: of the places where one of the two is right, as many should be the one's as the other's
        (McNemar's test). Where both are right at the same places: by the acceptance lengths.
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
    """Measures a draft head on its target, as its file says and with other options; of others than EAGLE heads that.

    Args:
        head: an EAGLE head, Medusa heads or a draft model; folder or hub id, as `target`.
        tokenizer: "bytes" for byte-level models; None: the target folder's.
        text: its first `WINDOWS` cuts of ``PROMPT + max_tokens`` tokens are read; None: an English and Python text.
        max_tokens: decoded behind each of `PROMPTS` prompts; ``PROMPT + max_tokens`` should not exceed the length that
            the head was trained on.

    Returns:
        A table and one sentence of advice.

    Raises:
        ValueError, NotImplementedError, FileNotFoundError: what does not load, does not fit together, or a text that
            is too short.
    """
    if max_tokens < 2 * LENGTH:
        raise ValueError(f"max_tokens: expected at least {2 * LENGTH}, two full rounds, got {max_tokens}; raise it")
    model, words = load_target(target, tokenizer)
    settings = settings_of(auto.load_drafter(head, length=LENGTH), model)
    runs = {setting.drafter: Replay(setting.drafter, model) for setting in settings}  # what does not fit raises here
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
    """A target with its tokenizer, or the one that is named."""
    found = load.load(path, dtype=dtype)
    model = Model.from_weights(found.config, found.weights)
    words = load_tokenizer(found.folder) if tokenizer is None else tokenizer
    words = load_tokenizer(words) if isinstance(words, str) else words
    if words is None:
        raise ValueError(f'{found.folder}: expected a tokenizer in the folder, got none; pass --tokenizer "bytes"')
    return model, words


def settings_of(drafter: Drafter, target: Model) -> list[Setting]:
    """The drafter as it is; of an EAGLE head each of its other settings too, named as the argument that loads it."""
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
    """One lower, one higher, in reverse, as far as there are such states."""
    lower, higher = (tuple(layer + step for layer in layers) for step in (-1, 1))
    others = dict.fromkeys((lower, higher, layers[::-1]))
    return [other for other in others if other != layers and min(other) >= 0 and max(other) <= last]


def _changes(config: HeadConfig, target: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other values of the head's options, by the argument's name and as fields of its config."""
    for theta in dict.fromkeys((OFFICIAL_THETA, target.config.rope.theta)):
        if theta != config.rope.theta:
            yield f"rope_theta={theta:g}", {"rope": replace(config.rope, theta=theta)}
    if isinstance(config, Eagle3Config):
        for name in ("norm_output", "norm_before_residual"):
            value = not getattr(config, name)
            yield f"{name}={value}", {name: value}


def windows(text: str, tokenizer: Tokenizer, size: int) -> Int[np.ndarray, "cuts size"]:
    """Cuts of a text, one behind the other, each behind the tokens that every text of the model begins with.

    Raises:
        ValueError: the text is shorter than one.
    """
    begin = tokenizer.encode("")
    ids = tokenizer.encode(text)[len(begin) :]
    body = size - len(begin)
    count = min(len(ids) // body, WINDOWS)
    if not count:
        raise ValueError(f"text: expected at least {body} tokens, got {len(ids)}; give a longer one or less max_tokens")
    return np.asarray([[*begin, *ids[i * body : (i + 1) * body]] for i in range(count)], np.int32)


def prepare(target: Model, cuts: Int[np.ndarray, "cuts size"], settings: Sequence[Setting]) -> Material:
    """Everything that is asked of the target, for all settings at once."""
    greedy = continue_greedily(target, cuts[:PROMPTS, :PROMPT], cuts.shape[1] - PROMPT)
    return Material(
        texts=observe(target, np.concatenate([cuts, greedy]), [layer for one in settings for layer in one.layers]),
        start=(FIRST,) * len(cuts) + (PROMPT,) * len(greedy),
        stepwise=(True,) * len(cuts) + (False,) * len(greedy),
    )


def measure(setting: Setting, run: Replay, material: Material) -> Measurement:
    """One setting, by its drafter's replay."""
    rounds = run(material.texts, layers=setting.layers, start=material.start, stepwise=material.stepwise)
    stepwise = np.asarray(material.stepwise)
    return Measurement(
        setting.name,
        hits=rounds.hits[rounds.is_round & stepwise],
        lengths=rounds.accept_len[rounds.is_round & ~stepwise] + 1,
    )


def report(measured: Sequence[Measurement]) -> str:
    """The table of all settings, the file's own first, and the advice."""
    best = max(measured, key=lambda one: (one.agreement, one.mean_acceptance_length))
    rows = [["setting", "mean acceptance length", "first draft agrees", ""]]
    for one in measured:
        marks = [word for word, is_it in (("file", one is measured[0]), ("best", one is best)) if is_it]
        rows.append([one.name, f"{one.mean_acceptance_length:.2f}", f"{one.agreement:.1%}", ", ".join(marks)])
    return f"{table(rows)}\n{advice(measured)}"


def advice(measured: Sequence[Measurement]) -> str:
    """One sentence; another setting is named only if it is clearly better than the file's own, the first."""
    own, *others = measured
    better = [one for one in others if one.beats(own)]
    if not better:
        return f"{'No other setting is clearly better' if others else 'It has no other settings'}; {ELSE}"
    best = max(better, key=lambda one: (one.agreement, one.mean_acceptance_length))
    return (
        f"{best.name} is clearly better than what the file says (first drafts agree at {best.agreement:.1%} against "
        f"{own.agreement:.1%}, mean acceptance length {best.mean_acceptance_length:.2f} against "
        f"{own.mean_acceptance_length:.2f}): pass it when loading the head, or correct the head's config.json."
    )
