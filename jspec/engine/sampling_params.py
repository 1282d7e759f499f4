"""The sampling parameters of a request, and the checks of their values. No jax here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jspec.core.config import MAX_LOGPROBS
from jspec.engine.generation_config import recommended
from jspec.engine.grammar import json_schema

GRAMMARS = ("regex", "json_schema", "grammar")  # fields that constrain the text; at most one may be set


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request: sampling, constraints and end. Defaults are vLLM's.

    Attributes:
        max_tokens: largest number of tokens to emit (a request also ends when it reaches the engine's ``max_len``).
        temperature: sampling temperature; 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 is off.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 is off.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 is off.
        seed: seed of the request, 0 <= seed < 2**64; None: a seed drawn from the engine's seed.
        stop: one stop string or several. The text is cut before the first match; the token that completes the match is
            the last of ``token_ids``.
        stop_token_ids: tokens that end the request; kept in ``token_ids``, left out of the text.
        ignore_eos: whether to continue after the model's end-of-sequence tokens.
        repetition_penalty: factor for tokens in prompt or output: a positive logit is divided by the factor, a negative
            one multiplied; 1 is off.
        presence_penalty: number subtracted from the logit of each token that occurs in the output; 0 is off.
        frequency_penalty: number subtracted from a token's logit once per occurrence in the output; 0 is off.
        logit_bias: number to add to the logit, by token id.
        bad_words: texts or token id lists whose last token is banned wherever it would complete the word, also if the
            word begins in the prompt. A text means its tokenisations with and without a leading blank.
        allowed_token_ids: the only tokens that may be emitted; None is off.
        min_tokens: number of tokens before which stop tokens are masked and stop strings do not match.
        regex: a regular expression (of the library outlines_core, without look-around and anchors; ``\\d`` is 0 to 9)
            that the whole text matches. Tokens that end the request are allowed exactly where the text may end, and are
            the only tokens allowed where the text must end. max_tokens or a stop string may cut the text earlier.
        json_schema: a JSON schema, as a mapping, its text or a pydantic class; the whole text is an instance of it. The
            rules of ``regex`` hold. Schemas with unsupported keywords are refused. Stored as text. A schema that fits
            no table (`jspec.engine.grammar.schema_regex`) is followed as ``grammar`` is.
        grammar: a context-free grammar, in the Lark form that the library llguidance reads, that the whole text
            matches; same rules as ``regex``. A round with such a request runs as two launches; between them the host
            computes the mask of each draft node (`jspec.step.split_decode`).
        processor_args: values for the engine's ``logits_processor``, as many as the engine's ``processor_args``; empty:
            all zeros.
        draft: whether to use draft tokens for this request; an int is the most draft tokens to accept per round.
        logprobs: number of likeliest tokens whose log-probabilities are reported at each emitted token; 0: only the
            emitted token's; None: off. The engine's ``logprobs_mode`` decides whether they are raw or processed.
        prompt_logprobs: number of likeliest tokens whose log-probabilities are reported at each prompt token, always
            raw; 0: only the prompt token's; None: off. The prompt is then computed without the prefix cache.
        priority: priority; requests with lower numbers are served first, those with equal numbers in order of arrival.
        n: number of completions of the prompt, which share its pages (by the engine's ``prefix_cache``); completion i
            has the seed ``sample_seed(seed, i)``.

    Raises:
        ValueError: a field has a wrong value; the message names the field, its value and the allowed values.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    regex: str | None = None
    json_schema: str | Mapping[str, Any] | type | None = None
    grammar: str | None = None
    processor_args: tuple[float, ...] = ()
    draft: bool | int = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        for name, value in _normalised(self).items():
            object.__setattr__(self, name, value)
        for name, holds, allowed in RULES:
            if not holds(self):
                expected = allowed if isinstance(allowed, str) else allowed(self)
                raise ValueError(f"SamplingParams.{name}: expected {expected}, got {getattr(self, name)!r}")
        self._check_grammar()

    def _check_grammar(self) -> None:
        conflicts = {
            **{name: name != self.grammar_field and getattr(self, name) is not None for name in GRAMMARS},
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens > 0,
        }
        name = next((name for name, is_conflict in conflicts.items() if is_conflict), None)
        if self.grammar_field is not None and name is not None:
            raise ValueError(
                f"SamplingParams.{name}: expected its default beside {self.grammar_field}, which alone says what the "
                f"text is and where it ends, got {getattr(self, name)!r}"
            )

    @property
    def grammar_field(self) -> str | None:
        """Name of the grammar field that is set ("regex", "json_schema" or "grammar"); None if none is set."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    @classmethod
    def from_generation_config(cls, path: str | Path, **fields: Any) -> SamplingParams:
        """Make the parameters that a checkpoint's generation_config.json recommends.

        Args:
            path: the file or its folder, read by `jspec.engine.generation_config.recommended`. EOS ids are not read
                here, because the engine reads them.
            fields: parameters that override those of the file.
        """
        return cls(**{**recommended(path), **fields})

    @cached_property
    def controls_used(self) -> tuple[str, ...]:
        """Names of the set fields that edit logits before sampling (`jspec.sampling.penalties`)."""
        is_set = dict(
            repetition_penalty=self.repetition_penalty != 1,
            presence_penalty=self.presence_penalty != 0,
            frequency_penalty=self.frequency_penalty != 0,
            logit_bias=bool(self.logit_bias),
            bad_words=bool(self.bad_words),
            allowed_token_ids=self.allowed_token_ids is not None,
            min_tokens=self.min_tokens > 0,
            regex=self.regex is not None,
            json_schema=self.json_schema is not None,
            grammar=self.grammar is not None,
        )
        return tuple(name for name in is_set if is_set[name])


def sample_seed(seed: int, index: int) -> int:
    """Seed of completion ``index`` of a request; the first completion has the request's own seed."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])


def _normalised(params: SamplingParams) -> dict[str, Any]:
    """Values of the fields that are stored in another form: sequences as tuples, a schema as text."""
    values: dict[str, Any] = {}
    for name in ("stop_token_ids", "allowed_token_ids"):
        if isinstance(getattr(params, name), (list, set, frozenset, np.ndarray)):
            values[name] = tuple(getattr(params, name))
    if isinstance(params.processor_args, (list, np.ndarray)):
        values["processor_args"] = tuple(params.processor_args)
    if isinstance(params.stop, (str, list)) or params.stop is None:
        values["stop"] = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    if isinstance(params.bad_words, (list, tuple)):
        values["bad_words"] = tuple(
            tuple(word) if isinstance(word, (list, np.ndarray)) else word for word in params.bad_words
        )
    if params.json_schema is not None:
        values["json_schema"] = json_schema.text_of(params.json_schema)
    for name in ("regex", "grammar"):
        if isinstance(getattr(params, name), str):
            json_schema.check_text(name, getattr(params, name))
    if isinstance(params.logit_bias, Mapping):
        values["logit_bias"] = dict(params.logit_bias)  # a copy, as the caller may change the original later
    return values


def is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


def is_in(value: Any, least: Any, most: Any) -> bool:
    """Whether all three are finite numbers and least <= value <= most."""
    return all(map(is_finite, (value, least, most))) and bool(least <= value <= most)


def are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(is_int(token) and token >= 0 for token in value)


def are_texts(value: object) -> bool:
    """Whether the value is a tuple of non-empty texts."""
    return isinstance(value, tuple) and all(isinstance(text, str) and text != "" for text in value)


def is_bias(value: object) -> bool:
    """Whether the value is None or maps token ids to numbers in OpenAI's range."""
    if not isinstance(value, Mapping):
        return value is None
    return are_ids(tuple(value)) and all(is_in(bias, -100, 100) for bias in value.values())


def are_words(value: object) -> bool:
    """Whether the value is a tuple of non-empty texts and non-empty token id tuples."""
    if not isinstance(value, tuple):
        return False
    return all(word.strip() != "" if isinstance(word, str) else are_ids(word) and word != () for word in value)


def is_int_from(least: int, value: object) -> bool:
    return is_int(value) and value >= least  # type: ignore[operator]


def is_logprobs(value: object) -> bool:
    return value is None or (is_int(value) and is_in(value, 0, MAX_LOGPROBS))


def is_text_or_none(value: object) -> bool:
    """Whether the value is None or a non-empty text."""
    return value is None or (isinstance(value, str) and value != "")


Rule = tuple[str, Callable[[SamplingParams], bool], str | Callable[[SamplingParams], str]]
RULES: tuple[Rule, ...] = (  # field, test of its value, description of the allowed values
    ("max_tokens", lambda p: is_int_from(1, p.max_tokens), "an int >= 1"),
    ("temperature", lambda p: is_finite(p.temperature) and p.temperature >= 0, "a finite number >= 0"),
    ("top_k", lambda p: is_int_from(-1, p.top_k), "an int >= -1 (0 or -1: off)"),
    ("top_p", lambda p: is_finite(p.top_p) and 0 < p.top_p <= 1, "in (0, 1]"),
    ("min_p", lambda p: is_in(p.min_p, 0, 1), "in [0, 1]"),
    ("seed", lambda p: p.seed is None or (is_int_from(0, p.seed) and p.seed < 2**64), "None or in [0, 2**64)"),
    ("stop", lambda p: are_texts(p.stop), "a text or a list of texts, none empty"),
    ("stop_token_ids", lambda p: are_ids(p.stop_token_ids), "a tuple of token ids >= 0"),
    ("ignore_eos", lambda p: isinstance(p.ignore_eos, bool), "a bool"),
    ("repetition_penalty", lambda p: is_in(p.repetition_penalty, 1e-3, 1e3), "in [0.001, 1000] (1: off)"),
    ("presence_penalty", lambda p: is_in(p.presence_penalty, -2, 2), "in [-2, 2] (0: off)"),
    ("frequency_penalty", lambda p: is_in(p.frequency_penalty, -2, 2), "in [-2, 2] (0: off)"),
    ("logit_bias", lambda p: is_bias(p.logit_bias), "None or {token id >= 0: a number in [-100, 100]}"),
    ("bad_words", lambda p: are_words(p.bad_words), "a list of texts or of lists of token ids >= 0, none empty"),
    (
        "allowed_token_ids",
        lambda p: p.allowed_token_ids is None or (are_ids(p.allowed_token_ids) and p.allowed_token_ids != ()),
        "None or a tuple of token ids >= 0, at least one",
    ),
    (
        "min_tokens",
        lambda p: is_int(p.min_tokens) and is_in(p.min_tokens, 0, p.max_tokens),
        lambda p: f"an int from 0 to max_tokens={p.max_tokens}",
    ),
    ("regex", lambda p: is_text_or_none(p.regex), "None or a text"),
    ("grammar", lambda p: is_text_or_none(p.grammar), "None or a text"),
    (
        "processor_args",
        lambda p: isinstance(p.processor_args, tuple) and all(map(is_finite, p.processor_args)),
        "a tuple of finite numbers",
    ),
    ("draft", lambda p: isinstance(p.draft, bool) or is_int_from(0, p.draft), "a bool or int >= 0"),
    ("logprobs", lambda p: is_logprobs(p.logprobs), f"None or 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", lambda p: is_logprobs(p.prompt_logprobs), f"None or 0 to {MAX_LOGPROBS}"),
    ("priority", lambda p: is_int(p.priority), "an int"),
    ("n", lambda p: is_int_from(1, p.n), "an int >= 1"),
)
