"""Runs `jspec info --check`, which measures whether a draft head's config.json has the right options.

Exporters confuse some options of EAGLE heads. The head is measured with several settings: the options of its
config.json, and other values of the options that are often confused. Two quantities are measured for each setting:

- agreement: share of first draft tokens equal to the target's argmax, over all positions of a given text;
- mean acceptance length: tokens per round of greedy decoding with chains, over a few hundred tokens.

The advice depends on the agreement. It has ten times as many samples as the acceptance length, it compares two settings
position by position, and long accepted chains in one repetitive text do not hide misses. The acceptance length decides
only if the agreements are equal, for example between options that act only after the first draft token. The texts are
short: beyond the length on which a head was trained, a wrong rope theta may score higher than the right one.
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
from jspec.draft.head_config import Eagle3Config, HeadConfig, PEagleConfig
from jspec.engine.text.tokenizer import Tokenizer, load_tokenizer, warn_if_replaced
from jspec.models import load
from jspec.models.decoder import Model
from jspec.tools.info_command import MAX_TOKENS, PROMPTS
from jspec.tools.replay import Replay, ReplayedTexts, continue_greedily, observe
from jspec.tools.table import table

TEXT = (Path(__file__).parent / "sample_text.txt").read_text(encoding="utf-8")  # English prose, then Python
LENGTH = 4  # draft tokens per round
PROMPT = 64  # tokens per prompt
WINDOWS = 16  # maximum number of windows of the text
FIRST = 8  # position of the first root token in a window
CLEAR = 3.0  # a setting is clearly better if it is better by this many standard errors
OFFICIAL_THETA = 10000.0  # rope theta of the EAGLE authors' code
OWN = "as the file says"  # name of the setting with the options of config.json
OTHER_CAUSES = (
    "if drafts are still refused, check the prompt template (give a text as the model is used) and that the draft was "
    "trained for this very target."
)


@dataclass(frozen=True)
class HeadSetting:
    """A drafter with one choice of its options.

    Attributes:
        name: name in the report: "as the file says", or the argument of `from_pretrained` that selects the option.
        drafter: drafter with these options; settings that differ only in their layers have the same drafter.
        layers: indices of the target's hidden states that the head reads, in the order of concatenation.
    """

    name: str
    drafter: Drafter
    layers: tuple[int, ...]


@dataclass(frozen=True)
class MeasuredTexts:
    """The texts on which all settings are measured; windows of the given text come before greedy texts of the target.

    Attributes:
        texts: the texts, with the target's outputs.
        start: position of the first root (the token that a chain follows), per text.
        stepwise: per text, whether every position is a root (windows), or only the roots of greedy decoding (False).
    """

    texts: ReplayedTexts
    start: tuple[int, ...]
    stepwise: tuple[bool, ...]


@dataclass(frozen=True)
class Measurement:
    """The results of one setting."""

    name: str  # name of the setting
    hits: Bool[np.ndarray, "positions"]  # whether the first draft token is the target's argmax
    lengths: Int[np.ndarray, "rounds"]  # tokens per round, with the bonus token

    @property
    def agreement(self) -> float:
        return float(self.hits.mean())

    @property
    def mean_acceptance_length(self) -> float:
        return float(self.lengths.mean())

    def beats(self, other: Measurement) -> bool:
        """Return whether this setting is better than `other` by more than `CLEAR` standard errors.

        Agreement decides by McNemar's test, which counts the positions where exactly one setting is right; two equally
        good settings would each be right at half of them. If there is no such position, the mean acceptance length
        decides.
        """
        won, lost = np.sum(self.hits & ~other.hits), np.sum(other.hits & ~self.hits)
        if won + lost > 0:
            return bool(won - lost > CLEAR * np.sqrt(won + lost))
        error = np.sqrt(sum(np.var(result.lengths) / len(result.lengths) for result in (self, other)))
        return bool(self.mean_acceptance_length - other.mean_acceptance_length > CLEAR * error)


def check(
    head: str | Path,
    target: str | Path,
    *,
    tokenizer: Tokenizer | str | None = None,
    text: str | None = None,
    max_tokens: int = MAX_TOKENS,
) -> str:
    """Measure a drafter on its target with the options of its config.json and, for EAGLE heads, with other options.

    Args:
        head: folder or hub id of an EAGLE head, Medusa heads or a draft model.
        target: folder or hub id of the target.
        tokenizer: a tokenizer, its folder, or "bytes" for byte-level models; None: the tokenizer in the target's
            folder.
        text: text to measure on, which is cut into at most `WINDOWS` windows of ``PROMPT + max_tokens`` tokens; None:
            the built-in text.
        max_tokens: number of tokens decoded after each of `PROMPTS` prompts; ``PROMPT + max_tokens`` should not exceed
            the length on which the head was trained.

    Returns:
        A table of the settings' results, and one sentence of advice.

    Raises:
        ValueError: head, target and tokenizer do not match, `max_tokens` is too small, or the text is too short.
        NotImplementedError: a checkpoint is not supported.
        FileNotFoundError: a folder does not exist.
    """
    if max_tokens < 2 * LENGTH:
        raise ValueError(f"max_tokens: expected at least {2 * LENGTH}, two full rounds, got {max_tokens}; raise it")
    model, words = load_target(target, tokenizer)
    settings = settings_of(auto.load_drafter(head, length=LENGTH), model)
    runs = {setting.drafter: Replay(setting.drafter, model) for setting in settings}  # raises for a wrong head
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
    """Load a target and its tokenizer.

    Args:
        path: folder or hub id of the target.
        tokenizer: a tokenizer, its folder, or "bytes"; None: the tokenizer in the target's folder.
        dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.

    Raises:
        ValueError: the target's folder has no tokenizer.
    """
    checkpoint = load.load(path, dtype=dtype)
    model = Model.from_weights(checkpoint.config, checkpoint.weights)
    tokenizer = load_tokenizer(checkpoint.folder) if tokenizer is None else tokenizer
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if tokenizer is None:
        raise ValueError(f'{checkpoint.folder}: expected a tokenizer in the folder, got none; pass --tokenizer "bytes"')
    warn_if_replaced(tokenizer, checkpoint.folder)
    return model, tokenizer


def settings_of(drafter: Drafter, target: Model) -> list[HeadSetting]:
    """Make the settings to measure: the loaded drafter and, for EAGLE heads, one for each other option value."""
    layers = drafter.feature_layers(target)
    settings = [HeadSetting(OWN, drafter, layers)]
    if not isinstance(drafter, EagleDrafter):
        return settings
    others = _other_layers(layers, target.config.num_layers + 1)
    settings += [HeadSetting(f"feature_layers={other}", drafter, other) for other in others]
    for name, change in _changes(drafter.head.config, target):
        changed = replace(drafter.head, config=drafter.head.config.resized(**change))
        settings.append(HeadSetting(name, type(drafter)(changed, drafter.tree), layers))
    return settings


def _other_layers(layers: tuple[int, ...], last: int) -> list[tuple[int, ...]]:
    """List other feature layers to try: all indices minus 1, all plus 1, and the reverse order.

    Args:
        layers: indices of the target's hidden states that the head reads.
        last: largest index of a hidden state of the target.
    """
    lower, higher = (tuple(layer + step for layer in layers) for step in (-1, 1))
    others = dict.fromkeys((lower, higher, layers[::-1]))
    return [other for other in others if other != layers and min(other) >= 0 and max(other) <= last]


def _changes(config: HeadConfig, target: Model) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each other setting of a head, and the fields of the head's config that it changes."""
    for theta in dict.fromkeys((OFFICIAL_THETA, target.config.rope.theta)):
        if theta != config.rope.theta:
            yield f"rope_theta={theta:g}", {"rope": replace(config.rope, theta=theta)}
    if isinstance(config, Eagle3Config):
        fed_back = [] if isinstance(config, PEagleConfig) else ["norm_output"]
        for name in (*fed_back, "norm_before_residual"):
            value = not getattr(config, name)
            yield f"{name}={value}", {name: value}


def windows(text: str, tokenizer: Tokenizer, size: int) -> Int[np.ndarray, "windows size"]:
    """Cut a text into consecutive windows of tokens; each begins with the tokenizer's first tokens (BOS).

    Args:
        text: text to cut.
        tokenizer: tokenizer of the target.
        size: number of tokens per window, with the BOS tokens.

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


def prepare(target: Model, cuts: Int[np.ndarray, "windows size"], settings: Sequence[HeadSetting]) -> MeasuredTexts:
    """Make the texts, and run the target on them once for all settings.

    Args:
        target: the target.
        cuts: windows of the given text; the beginnings of some are the prompts of the greedy texts.
        settings: all settings, whose hidden states are stored.
    """
    greedy = continue_greedily(target, cuts[:PROMPTS, :PROMPT], cuts.shape[1] - PROMPT)
    layers = [layer for setting in settings for layer in setting.layers]
    return MeasuredTexts(
        texts=observe(target, np.concatenate([cuts, greedy]), layers),
        start=(FIRST,) * len(cuts) + (PROMPT,) * len(greedy),
        stepwise=(True,) * len(cuts) + (False,) * len(greedy),
    )


def measure(setting: HeadSetting, run: Replay, material: MeasuredTexts) -> Measurement:
    """Measure one setting.

    Args:
        setting: setting to measure.
        run: replay of the setting's drafter.
        material: texts to measure on.
    """
    rounds = run(material.texts, layers=setting.layers, start=material.start, stepwise=material.stepwise)
    stepwise = np.asarray(material.stepwise)
    return Measurement(
        setting.name,
        hits=rounds.hits[rounds.is_round & stepwise],
        lengths=rounds.accept_len[rounds.is_round & ~stepwise] + 1,
    )


def report(measured: Sequence[Measurement]) -> str:
    """Return the table of all results and the advice; the first result is that of the options in config.json."""
    best = max(measured, key=lambda result: (result.agreement, result.mean_acceptance_length))
    rows = [["setting", "mean acceptance length", "first draft agrees", ""]]
    for result in measured:
        marks = ["file"] * (result is measured[0]) + ["best"] * (result is best)
        rows.append([result.name, f"{result.mean_acceptance_length:.2f}", f"{result.agreement:.1%}", ", ".join(marks)])
    return f"{table(rows)}\n{advice(measured)}"


def advice(measured: Sequence[Measurement]) -> str:
    """Return one sentence of advice, which recommends another setting only if it is clearly better than config.json's.

    Args:
        measured: results of all settings; the first has the options of config.json.
    """
    file_result, *others = measured
    better = [result for result in others if result.beats(file_result)]
    if not better:
        return f"{'No other setting is clearly better' if others else 'It has no other settings'}; {OTHER_CAUSES}"
    best = max(better, key=lambda result: (result.agreement, result.mean_acceptance_length))
    return (
        f"{best.name} is clearly better than what the file says (first drafts agree at {best.agreement:.1%} against "
        f"{file_result.agreement:.1%}, mean acceptance length {best.mean_acceptance_length:.2f} against "
        f"{file_result.mean_acceptance_length:.2f}): pass it when loading the head, or correct the head's config.json."
    )
