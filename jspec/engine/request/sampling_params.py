"""The parameters of a request, and the checks of their values. Runs on the host, without jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from convert.fields import named
from jspec.core.config import MAX_INT, MAX_LOGPROBS
from jspec.core.foreign_names import names_checked
from jspec.core.shorten import short
from jspec.engine.grammar import json_schema
from jspec.engine.request.generation_config import recommended

MAX_COMPLETIONS = 1024  # largest n
MAX_STOPS = 64  # largest number of stop strings
MAX_TEXT = 1000  # largest number of characters of a stop string or a bad word
MAX_WORDS = 1024  # largest number of bad words
MAX_FLOAT = float(np.finfo(np.float32).max)  # the device has float32; a larger number would be infinite there
MAX_IDS = 2**20  # largest number of token ids in a field; every vocabulary is smaller
LIMITS = {  # largest number of entries of each field
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_WORDS,
    "logit_bias": MAX_IDS,
    "bad_words": MAX_WORDS,
    "allowed_token_ids": MAX_IDS,
    "processor_args": MAX_WORDS,
}
GRAMMARS = ("regex", "json_schema", "grammar")  # fields that constrain the text; at most one may be set


@names_checked({"Engine.generate": ("trace", "progress")})
@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one request: how to sample, what to allow and when to end. Defaults are vLLM's.

    Attributes:
        max_tokens: largest number of tokens to emit; None: as many as fit. A request also ends when it reaches the
            engine's ``max_len``.
        temperature: sampling temperature; 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 is off.
        top_p: keep the fewest most likely tokens whose probabilities add up to top_p or more; 1 is off.
        min_p: keep tokens whose probability is at least min_p times that of the most likely token; 0 is off.
        seed: seed of the request, 0 <= seed < 2**64; None: a seed drawn from the engine's seed.
        stop: one stop string or several, at most 64 of at most 1,000 characters. The text is cut before the first
            match; the token that completes the match is the last one in ``token_ids``. The text of a special token,
            which no output shows, also counts as an entry of ``stop_token_ids``.
        stop_token_ids: tokens that end the request; they appear in ``token_ids`` but not in the text.
        ignore_eos: whether to continue after the model's end-of-sequence tokens.
        repetition_penalty: factor for tokens in prompt or output: a positive logit is divided by the factor, a negative
            one multiplied; 1 is off.
        presence_penalty: number to subtract from the logit of each token that occurs in the output; 0 is off.
        frequency_penalty: number to subtract from a token's logit for each occurrence in the output; 0 is off.
        logit_bias: number to add to the logit, by token id; ids may be texts of digits, as JSON has them.
        bad_words: texts or token id lists, at most 1,024, and at most 128 of several tokens. Their last token is banned
            wherever it would complete the word, even if the word begins in the prompt. A text is banned in its
            tokenisations with and without a leading blank.
        allowed_token_ids: the only tokens that may be emitted; None is off.
        min_tokens: least number of tokens; before it, stop tokens are masked and stop strings do not match.
        regex: a regular expression (of the library outlines_core, without look-around and anchors) that the whole text
            matches; ``\\d`` is 0 to 9. Tokens that end the request are allowed only where the text may end; where
            it must end, no other tokens are allowed. max_tokens or a stop string may cut the text earlier.
        json_schema: a JSON schema, as a mapping, as JSON text or as a pydantic class, that the whole output satisfies;
            it ends as with ``regex``. An object may have properties that the schema does not list unless
            `additionalProperties` is false, as it is in a pydantic class that does not say otherwise. Schemas with
            unsupported keywords are refused. Stored as text. A round with a schema that fits no table
            (`jspec.engine.grammar.schema_regex`) runs as with ``grammar``.
        grammar: a context-free grammar, in the Lark form that the library llguidance reads, that the whole text
            matches; it ends as with ``regex``. A round with a ``grammar`` runs as two programs; between them the host
            computes the token mask of each draft token (`jspec.step.split_decode`).
        thinking_budget: largest number of reasoning tokens, those of the prompt included, of models that reason between
            two markers of one token each, such as <think> and </think>; then the engine's ``thinking_end`` is forced,
            over all other controls. A request with a budget may reason before a ``regex``, ``json_schema`` or
            ``grammar``, which then begins after the end marker, as it does if the prompt ends inside reasoning.
            Without one of these a start marker anywhere in the output begins reasoning. Only the first reasoning is
            limited. None: no limit.
        prediction: text that the output will probably repeat, such as a file that is edited, or its token ids. The
            engine's look-up drafts from it (`jspec.draft.prediction`), so the output is the same and comes faster.
            The engine option ``predicted_tokens`` is the largest number of its tokens. None: no prediction.
        adapter: name of an adapter of the target (`Engine.load_adapter`); None: the target's own weights.
        processor_args: values for the engine's ``logits_processor``; their number is the engine option
            ``processor_args``. Empty: all zeros.
        skip_special_tokens: whether the text leaves out special tokens; stop tokens are always left out.
        visible_special_tokens: texts of special tokens that the text has even so, such as markers of a format.
        draft: whether to use draft tokens for this request; an int is the largest number to accept per round.
        logprobs: number of likeliest tokens whose log-probabilities are reported at each emitted token; 0: only the
            emitted token's; None: off. The engine's ``logprobs_mode`` decides whether they are raw or processed.
        prompt_logprobs: number of likeliest tokens whose log-probabilities are reported at each prompt token, always
            raw; 0: only the prompt token's; None: off. The prompt is then computed without the prefix cache.
        priority: requests with lower numbers are served first; requests with equal numbers in order of arrival.
        n: number of completions of the prompt, at most 1,024. They share the prompt's cache pages if the engine has
            ``prefix_cache``. Completion i has the seed ``sample_seed(seed, i)``.

    Raises:
        ValueError: a field has a wrong value; the message names the field, its value and the allowed values.
    """

    max_tokens: int | None = 16
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
    thinking_budget: int | None = None
    prediction: str | tuple[int, ...] | None = None
    adapter: str | None = None
    processor_args: tuple[float, ...] = ()
    skip_special_tokens: bool = True
    visible_special_tokens: tuple[str, ...] = ()
    draft: bool | int = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        for name in LIMITS:
            _check_size(name, getattr(self, name))
        for name, value in _normalised(self).items():
            object.__setattr__(self, name, value)
        for name, holds, allowed in RULES:
            if not holds(self):
                expected = allowed if isinstance(allowed, str) else allowed(self)
                raise ValueError(f"SamplingParams.{name}: expected {expected}, got {short(getattr(self, name))}")
        self._check_grammar()

    def _check_grammar(self) -> None:
        others = [name for name in GRAMMARS if name != self.grammar_field and getattr(self, name) is not None]
        if others:
            raise ValueError(
                f"SamplingParams.{others[0]}: expected only one of {', '.join(GRAMMARS)}, got {self.grammar_field} "
                "too; leave one of them out"
            )
        conflicts = {
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens > 0,
        }
        name = next((name for name, is_conflict in conflicts.items() if is_conflict), None)
        if self.grammar_field is not None and name is not None:
            raise ValueError(
                f"SamplingParams.{name}: expected its default beside {self.grammar_field}, which alone says what the "
                f"text is and where it ends, got {short(getattr(self, name))}"
            )

    @property
    def grammar_field(self) -> str | None:
        """The name of the grammar field that is set ("regex", "json_schema" or "grammar"); None if none is set."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    @classmethod
    def from_generation_config(cls, path: str | Path, **fields: Any) -> SamplingParams:
        """Make the parameters that a checkpoint's generation_config.json recommends.

        Args:
            path: the file or its folder, read by `jspec.engine.request.generation_config.recommended`. The engine
                itself reads the file's EOS ids.
            fields: parameters that override the file's.
        """
        values = {**recommended(path), **fields}
        with named(path):
            return cls(**values)

    @property
    def cuts_used(self) -> bool:
        """Whether unlikely tokens are cut before sampling, which takes the logits of the whole vocabulary."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def controls_used(self) -> tuple[str, ...]:
        """The names of the set fields that need logits to be edited before sampling (`jspec.sampling.penalties`)."""
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
            thinking_budget=self.thinking_budget is not None,
        )
        return tuple(name for name in is_set if is_set[name])


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of completion ``index`` of a request; completion 0 has the request's own seed."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])


def _check_size(name: str, value: Any) -> None:
    """Check how many entries a field has, and how long its texts and lists are, before anything reads the entries.

    Raises:
        ValueError: the field has too many entries, or one of them is too long.
    """
    size = 1 if isinstance(value, str) else _length(value)
    if size > LIMITS[name]:
        raise ValueError(f"SamplingParams.{name}: expected at most {LIMITS[name]} entries, got {size}")
    entries = value if isinstance(value, (list, tuple)) else [value] if isinstance(value, str) else ()
    longest = max(map(_length, entries), default=0)
    if longest > MAX_TEXT:
        raise ValueError(f"SamplingParams.{name}: expected entries of a length of at most {MAX_TEXT}, got {longest}")


def _length(value: Any) -> int:
    """Return the length of a text or a container; 0 for other values, which other checks refuse."""
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if isinstance(value, (str, list, tuple, set, frozenset, dict)) else 0


def _normalised(params: SamplingParams) -> dict[str, Any]:
    """Return the fields to store in another form than given, such as sequences as tuples and a schema as text.

    Values of a wrong type stay as given, for `RULES` to refuse.
    """
    values: dict[str, Any] = {}
    if isinstance(params.visible_special_tokens, list):
        values["visible_special_tokens"] = tuple(params.visible_special_tokens)
    for name in ("stop_token_ids", "allowed_token_ids", "prediction"):
        if isinstance(getattr(params, name), (list, set, frozenset)) or is_row(getattr(params, name)):
            values[name] = tuple(getattr(params, name))
    if isinstance(params.processor_args, list) or is_row(params.processor_args):
        values["processor_args"] = tuple(params.processor_args)
    if isinstance(params.stop, (str, list)) or params.stop is None:
        values["stop"] = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    if isinstance(params.bad_words, (list, tuple)):
        values["bad_words"] = tuple(
            tuple(word) if isinstance(word, list) or is_row(word) else word for word in params.bad_words
        )
    if params.json_schema is not None:
        values["json_schema"] = json_schema.text_of(params.json_schema)
    for name, most in (("regex", json_schema.MAX_CHARACTERS), ("grammar", json_schema.MAX_GRAMMAR)):
        if isinstance(getattr(params, name), str):  # stored as given; only checked, as `text_of` checks a schema
            json_schema.check_text(name, getattr(params, name), most)
    if isinstance(params.logit_bias, Mapping):
        copied = {_id_of(key): bias for key, bias in params.logit_bias.items()}  # keys from JSON are texts
        # If two keys give one id, such as 5 and "5", keep the texts: `RULES` then refuses them.
        values["logit_bias"] = copied if len(copied) == len(params.logit_bias) else dict(params.logit_bias)
    return values


def _id_of(key: object) -> object:
    """Return the token id that a text of at most 10 digits gives; any other key as it is."""
    return int(key) if isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdecimal() else key


def is_row(value: object) -> bool:
    """Return whether the value is an array of one axis."""
    return isinstance(value, np.ndarray) and value.ndim == 1


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
    """Return whether ``value``, ``least`` and ``most`` are finite numbers and least <= value <= most."""
    return all(map(is_finite, (value, least, most))) and bool(least <= value <= most)


def are_ids(value: object) -> bool:
    return isinstance(value, tuple) and all(is_int(token) and token >= 0 for token in value)


def are_texts(value: object) -> bool:
    """Whether the value is a tuple of non-empty texts."""
    return isinstance(value, tuple) and all(
        isinstance(text, str) and text != "" and json_schema.half_character(text) is None for text in value
    )


def is_bias(value: object) -> bool:
    """Return whether the value is None or maps token ids to numbers in [-100, 100], the range of OpenAI's interface."""
    if not isinstance(value, Mapping):
        return value is None
    return are_ids(tuple(value)) and all(is_in(bias, -100, 100) for bias in value.values())


def are_words(value: object) -> bool:
    """Return whether the value is a tuple whose entries are non-empty texts or non-empty tuples of token ids."""
    if not isinstance(value, tuple):
        return False
    return all(
        word.strip() != "" and json_schema.half_character(word) is None
        if isinstance(word, str)
        else are_ids(word) and word != ()
        for word in value
    )


def is_int_from(least: int, value: object) -> bool:
    return is_int(value) and value >= least  # type: ignore[operator]


def _is_budget(value: object) -> bool:
    return is_int(value) and is_in(value, 0, MAX_INT)


def is_logprobs(value: object) -> bool:
    return value is None or (is_int(value) and is_in(value, 0, MAX_LOGPROBS))


def is_text_or_none(value: object) -> bool:
    """Return whether the value is None or a non-empty text."""
    return value is None or (isinstance(value, str) and value != "")


Rule = tuple[str, Callable[[SamplingParams], bool], str | Callable[[SamplingParams], str]]
RULES: tuple[Rule, ...] = (  # field, test of its value, description of the allowed values
    ("max_tokens", lambda p: p.max_tokens is None or is_int_from(1, p.max_tokens), "an int >= 1 or None"),
    ("temperature", lambda p: is_in(p.temperature, 0, MAX_FLOAT), "a finite number >= 0, at most 3.4e38 (float32)"),
    ("top_k", lambda p: is_int_from(-1, p.top_k), "an int >= -1 (0 or -1: off)"),
    ("top_p", lambda p: is_finite(p.top_p) and 0 < p.top_p <= 1, "in (0, 1]"),
    ("min_p", lambda p: is_in(p.min_p, 0, 1), "in [0, 1]"),
    ("adapter", lambda p: p.adapter is None or (isinstance(p.adapter, str) and p.adapter != ""), "a name or None"),
    ("seed", lambda p: p.seed is None or (is_int_from(0, p.seed) and p.seed < 2**64), "None or in [0, 2**64)"),
    ("stop", lambda p: are_texts(p.stop), "a text or a list of texts of whole characters, none empty"),
    ("stop_token_ids", lambda p: are_ids(p.stop_token_ids), "a tuple of token ids >= 0"),
    ("ignore_eos", lambda p: isinstance(p.ignore_eos, bool), "a bool"),
    ("repetition_penalty", lambda p: is_in(p.repetition_penalty, 1e-3, 1e3), "in [0.001, 1000] (1: off)"),
    ("presence_penalty", lambda p: is_in(p.presence_penalty, -2, 2), "in [-2, 2] (0: off)"),
    ("frequency_penalty", lambda p: is_in(p.frequency_penalty, -2, 2), "in [-2, 2] (0: off)"),
    ("logit_bias", lambda p: is_bias(p.logit_bias), "None or {token id >= 0: a number in [-100, 100]}"),
    ("bad_words", lambda p: are_words(p.bad_words), "a list of whole texts or of lists of token ids >= 0, none empty"),
    (
        "allowed_token_ids",
        lambda p: p.allowed_token_ids is None or (are_ids(p.allowed_token_ids) and p.allowed_token_ids != ()),
        "None or a tuple of token ids >= 0, at least one",
    ),
    (
        "min_tokens",
        lambda p: is_int_from(0, p.min_tokens) and (p.max_tokens is None or p.min_tokens <= p.max_tokens),
        lambda p: f"an int from 0 to max_tokens={short(p.max_tokens)}",
    ),
    ("regex", lambda p: is_text_or_none(p.regex), "None or a text"),
    ("grammar", lambda p: is_text_or_none(p.grammar), "None or a text"),
    (
        "thinking_budget",
        lambda p: p.thinking_budget is None or _is_budget(p.thinking_budget),
        f"None or 0 to {MAX_INT}",
    ),
    (
        "prediction",
        lambda p: p.prediction is None or isinstance(p.prediction, str) or are_ids(p.prediction),
        "None, a text or a list of token ids >= 0",
    ),
    (
        "processor_args",
        lambda p: (
            isinstance(p.processor_args, tuple) and all(is_in(x, -MAX_FLOAT, MAX_FLOAT) for x in p.processor_args)
        ),
        "a tuple of finite numbers within float32's 3.4e38",
    ),
    ("skip_special_tokens", lambda p: isinstance(p.skip_special_tokens, bool), "a bool"),
    ("visible_special_tokens", lambda p: are_texts(p.visible_special_tokens), "a tuple of texts, none empty"),
    ("draft", lambda p: isinstance(p.draft, bool) or is_int_from(0, p.draft), "a bool or int >= 0"),
    ("logprobs", lambda p: is_logprobs(p.logprobs), f"None or 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", lambda p: is_logprobs(p.prompt_logprobs), f"None or 0 to {MAX_LOGPROBS}"),
    ("priority", lambda p: is_int(p.priority), "an int"),
    ("n", lambda p: is_int(p.n) and is_in(p.n, 1, MAX_COMPLETIONS), f"an int from 1 to {MAX_COMPLETIONS}"),
)
