"""What a user may ask of one request. No jax here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jspec.engine.generation_config import recommended
from jspec.engine.limits import (
    MAX_LOGPROBS,
    are_ids,
    are_texts,
    are_words,
    is_bias,
    is_finite,
    is_in,
    is_int,
    is_schema,
)

GRAMMARS = ("regex", "json_schema", "grammar")  # the fields of which one may give the text a grammar


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Defaults are vLLM's.

    Attributes:
        max_tokens: tokens to emit at most (a request also ends when it reaches the engine's ``max_len``).
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 is off.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 is off.
        min_p: keep tokens at least min_p times as likely as the likeliest; 0 is off.
        seed: 0 <= seed < 2**64; None draws one from the engine's seed.
        stop: a text or several that end the request; what is met first is cut off with all behind it. The token with
            which it is complete is the last of ``token_ids``.
        stop_token_ids: end (and are kept in ``token_ids``, not in the text).
        ignore_eos: do not end at the model's end-of-sequence tokens.
        repetition_penalty: logits of tokens in prompt or output are divided by it where positive, else multiplied; 1 is
            off.
        presence_penalty, frequency_penalty: taken from the logits of tokens in the output, once and as often as they
            occur; 0 is off.
        logit_bias: added to tokens' logits.
        bad_words: never completed, in prompt and output together; texts or token ids. A text stands for the tokenizer's
            own spellings with and without a blank in front.
        allowed_token_ids: the only tokens that may come; None is off.
        min_tokens: until so many are emitted, no token that would end the request may come, and no stop string counts.
        regex: a regular expression (of the library outlines_core, without look-around and anchors) that the whole text
            matches, in which nothing but a token that ends the request can follow its end. The text is cut where
            max_tokens or a stop string ends it first. Tokens that end the request come where the text may end only.
        json_schema: a schema, or its text, that the whole text fits; likewise. Not one with keywords that cannot be
            followed (`jspec.engine.grammar.json_schema`). Kept as text. One that holds itself is followed as
            ``grammar`` is.
        grammar: a context-free grammar, in the form of Lark's that the library llguidance reads, that the whole text
            matches; likewise. A round with such a request takes two launches, between which the host finds what may
            follow each node of the draft (`jspec.step.split_decode`).
        processor_args: numbers for the engine's ``logits_processor``, as many as its ``processor_args`` says, or none,
            which is zeros.
        draft: False for no speculation in this request, an int caps the accepted draft length.
        logprobs: so many of the likeliest tokens in each token's place, with their log-probabilities; 0: of the token
            alone; None: off. Raw or processed, as the engine's ``logprobs_mode`` says.
        prompt_logprobs: likewise for each of the prompt's tokens, always raw; the prompt is computed anew for it,
            whatever is cached.
        priority: requests with lower numbers are served first, those with the same in the order they came.
        n: completions of the prompt, which share its pages (by the engine's ``prefix_cache``); completion i has the
            seed ``sample_seed(seed, i)``.

    Raises:
        ValueError: naming the field, its value and what is allowed.
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
    json_schema: str | Mapping[str, Any] | None = None
    grammar: str | None = None
    processor_args: tuple[float, ...] = ()
    draft: bool | int = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            if isinstance(getattr(self, name), (list, set, frozenset, np.ndarray)):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.processor_args, (list, np.ndarray)):
            object.__setattr__(self, "processor_args", tuple(self.processor_args))
        if isinstance(self.stop, (str, list)) or self.stop is None:
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        if isinstance(self.bad_words, (list, tuple)):
            words = (tuple(word) if isinstance(word, (list, np.ndarray)) else word for word in self.bad_words)
            object.__setattr__(self, "bad_words", tuple(words))
        if isinstance(self.json_schema, Mapping) and is_schema(self.json_schema):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # its owner may change it later
        limits = (
            ("max_tokens", is_int(self.max_tokens) and self.max_tokens >= 1, "an int >= 1"),
            ("temperature", is_finite(self.temperature) and self.temperature >= 0, "a finite number >= 0"),
            ("top_k", is_int(self.top_k) and self.top_k >= -1, "an int >= -1 (0 or -1: off)"),
            ("top_p", is_finite(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", is_finite(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]"),
            (
                "seed",
                self.seed is None or (is_int(self.seed) and 0 <= self.seed < 2**64),
                "None or in [0, 2**64)",
            ),
            ("stop", are_texts(self.stop), "a text or a list of texts, none empty"),
            ("stop_token_ids", are_ids(self.stop_token_ids), "a tuple of token ids >= 0"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "a bool"),
            ("repetition_penalty", is_in(self.repetition_penalty, 1e-3, 1e3), "in [0.001, 1000] (1: off)"),
            ("presence_penalty", is_in(self.presence_penalty, -2, 2), "in [-2, 2] (0: off)"),
            ("frequency_penalty", is_in(self.frequency_penalty, -2, 2), "in [-2, 2] (0: off)"),
            ("logit_bias", is_bias(self.logit_bias), "None or {token id >= 0: a number in [-100, 100]}"),
            ("bad_words", are_words(self.bad_words), "a list of texts or of lists of token ids >= 0, none empty"),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None or (are_ids(self.allowed_token_ids) and self.allowed_token_ids != ()),
                "None or a tuple of token ids >= 0, at least one",
            ),
            (
                "min_tokens",
                is_int(self.min_tokens) and is_in(self.min_tokens, 0, self.max_tokens),
                f"an int from 0 to max_tokens={self.max_tokens}",
            ),
            ("regex", self.regex is None or (isinstance(self.regex, str) and self.regex != ""), "None or a text"),
            ("json_schema", is_schema(self.json_schema), "None, a schema as a dict, or its text"),
            (
                "grammar",
                self.grammar is None or (isinstance(self.grammar, str) and self.grammar != ""),
                "None or a text",
            ),
            (
                "processor_args",
                isinstance(self.processor_args, tuple) and all(map(is_finite, self.processor_args)),
                "a tuple of finite numbers",
            ),
            (
                "draft",
                isinstance(self.draft, bool) or (is_int(self.draft) and self.draft >= 0),
                "a bool or int >= 0",
            ),
            *(
                (
                    name,
                    value is None or (is_int(value) and is_in(value, 0, MAX_LOGPROBS)),
                    f"None or 0 to {MAX_LOGPROBS}",
                )
                for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))
            ),
            ("priority", is_int(self.priority), "an int"),
            ("n", is_int(self.n) and self.n >= 1, "an int >= 1"),
        )
        for name, holds, allowed in limits:
            if not holds:
                raise ValueError(f"SamplingParams.{name}: expected {allowed}, got {getattr(self, name)!r}")
        self._check_grammar()

    def _check_grammar(self) -> None:
        clashes = {
            **{name: name != self.grammar_field and getattr(self, name) is not None for name in GRAMMARS},
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens > 0,
        }
        name = next((name for name, clashes_ in clashes.items() if clashes_), None)
        if self.grammar_field is not None and name is not None:
            raise ValueError(
                f"SamplingParams.{name}: expected its default beside {self.grammar_field}, which alone says what the "
                f"text is and where it ends, got {getattr(self, name)!r}"
            )

    @property
    def grammar_field(self) -> str | None:
        """The field that gives the text a grammar."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    @classmethod
    def from_generation_config(cls, path: str | Path, **fields: Any) -> SamplingParams:
        """As a checkpoint's generation_config.json recommends.

        Args:
            path: the file or its folder; what is read of it, and what is refused, says
                `jspec.engine.generation_config.recommended`. Ids that end a text are the engine's to know.
            fields: what is to be otherwise, by our names.
        """
        return cls(**{**recommended(path), **fields})

    @cached_property
    def controls_used(self) -> tuple[str, ...]:
        """The fields in use that edit logits before they are sampled from (`jspec.sampling.penalties`)."""
        on = dict(
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
        return tuple(name for name in on if on[name])


def sample_seed(seed: int, index: int) -> int:
    """The seed of one of the ``n`` completions of a request: the first has the request's own."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(index,)).generate_state(1, np.uint64)[0])
