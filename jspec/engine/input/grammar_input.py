"""Compiles the grammars of requests, and keeps compiled grammars for later requests.

A regular expression or a JSON schema of bounded depth becomes a table on the device. Any other grammar becomes a parser
on the host.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, final

from jspec.core.thinking import is_thought
from jspec.engine.grammar import disjoint, json_schema, schema_lark, schema_regex
from jspec.engine.grammar.builder import Builder
from jspec.engine.grammar.cfg_matcher import GuidanceVocabulary, LarkGrammar, compile_lark
from jspec.engine.grammar.expression import NoTable
from jspec.engine.grammar.regex_dfa import TooLarge
from jspec.engine.grammar.token_table import Grammar, compile_grammar
from jspec.engine.input.penalty_input import Words
from jspec.engine.request.request import Request
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CACHE_SIZE = 64  # number of compiled grammars that the host keeps
SECONDS_BEFORE_PARSER = 2.0  # seconds of CPU time to try a table, if a parser can follow the grammar too


@final
class GrammarInput:
    """Compiles the grammars that requests ask for, each distinct grammar once.

    Args:
        tokenizer: the engine's tokenizer; None: requests cannot have grammars.
        vocab_size: size of the model's vocabulary.
        cells: number of cells (states x token classes) of one table on the device; 0: no tables.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, cells: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._cells = cells
        proxy = weakref.proxy(self)  # a reference cycle would keep `self` and its processes until garbage collection
        self._run = Builder(lambda: (proxy._texts, vocab_size))
        self._compiled = lru_cache(CACHE_SIZE)(lambda *key: proxy._compile(*key))
        self._compiled_lark = lru_cache(CACHE_SIZE)(lambda *key: proxy._compile_lark(*key))

    def limit(self, seconds: float) -> None:
        """Lower the limit of CPU time for one grammar, in seconds."""
        self._run.seconds = min(self._run.seconds, seconds)

    def close(self) -> None:
        """End the processes that compile grammars; a later grammar starts a new process."""
        self._run.close()

    def of(self, params: SamplingParams, stop_ids: tuple[int, ...], words: Words) -> Grammar | LarkGrammar | None:
        """Return the compiled grammar of a request; None if the request has no grammar.

        Args:
            params: sampling parameters of the request.
            stop_ids: tokens that end the request; the grammar allows them exactly where its text may end.
            words: the request's bad words as token ids. A table excludes bad words of one token, and tokens outside of
                ``params.allowed_token_ids``.

        Raises:
            ValueError: the grammar cannot be served; the message names the field, its value and what is allowed.
            ImportError: a grammar library is missing.
            RuntimeError: the process that compiles grammars failed.
        """
        field = params.grammar_field
        if field is None:
            return None
        self._check(field, params, stop_ids, words)
        singles = tuple(word[0] for word in words if len(word) == 1)
        try:
            grammar = self._compiled(field, getattr(params, field), stop_ids, params.allowed_token_ids, singles)
        except ImportError as error:
            raise ImportError(f"{field}: {error}") from error
        if isinstance(grammar, LarkGrammar):
            _check_first_tokens(field, params, grammar)
        return grammar

    def _check(self, field: str, params: SamplingParams, stop_ids: Sequence[int], words: Words) -> None:
        if self._tokenizer is None:
            raise ValueError(f"{field}: needs a tokenizer; pass tokenizer= to the engine")
        if field == "regex" and not self._cells:
            raise ValueError(f"{field}: this engine was built with grammar_cells=0; build it with more cells")
        if not stop_ids:
            raise ValueError(
                f"{field}: needs a token that ends the request; pass eos_ids= to the engine, or stop_token_ids"
            )
        allowed = params.allowed_token_ids
        if allowed is not None and not set(allowed) & set(stop_ids):
            raise ValueError(
                f"allowed_token_ids: expected at least one of {tuple(stop_ids)} beside {field}, because its text ends "
                f"with such a token, got {allowed}"
            )
        wrong = next((word for word in words if word[-1] in stop_ids), None)
        if wrong is not None:
            raise ValueError(
                f"bad_words: expected none beside {field} that ends with one of {tuple(stop_ids)}, which end the "
                f"request, got {wrong}"
            )

    def _compile(
        self,
        field: str,
        value: str,
        stop_ids: tuple[int, ...],
        allowed: tuple[int, ...] | None,
        singles: tuple[int, ...],
    ) -> Grammar | LarkGrammar:
        """Compile a grammar to a table if one exists and fits, else to a parser."""
        source = f"{field}={value!r:.100}"
        regex, lark = _forms(field, value)
        if regex is not None and (self._cells or lark is None):
            banned = set(singles)
            if allowed is not None:
                banned |= set(range(self._vocab_size)) - set(allowed)
            try:
                seconds = None if lark is None else SECONDS_BEFORE_PARSER
                grammar = compile_grammar(source, regex, self._run, stop_ids, banned, self._cells, seconds=seconds)
                logger.info("%s: a table of %d states x %d classes of tokens", source, *grammar.next.shape)
                return grammar
            except TooLarge:
                if lark is None:
                    raise
        return self._compiled_lark(source, lark, stop_ids)

    def _compile_lark(self, source: str, lark: str, stop_ids: tuple[int, ...]) -> LarkGrammar:
        grammar = compile_lark(source, lark, self._vocabulary, stop_ids, self._run)
        logger.info("%s: fits no table; its rounds take two launches, and the host computes masks between them", source)
        return grammar

    @cached_property
    def _vocabulary(self) -> GuidanceVocabulary:
        return GuidanceVocabulary(self._texts, self._vocab_size)

    @cached_property
    def _texts(self) -> list[bytes | None]:
        token_bytes = getattr(self._tokenizer, "token_bytes", None)
        if token_bytes is None:
            raise ValueError(f"tokenizer: a grammar needs its token_bytes, got {self._tokenizer!r}")
        return token_bytes()


def _check_first_tokens(field: str, params: SamplingParams, grammar: LarkGrammar) -> None:
    """Refuse a request whose `allowed_token_ids` include no token that the grammar allows first."""
    allowed, first = params.allowed_token_ids, grammar.first_tokens()
    if allowed is not None and not set(allowed) & first:
        raise ValueError(
            f"allowed_token_ids: expected at least one token that {field} may begin with, for instance one of "
            f"{sorted(first)[:10]}, got {allowed}"
        )


def _forms(field: str, value: str) -> tuple[str | None, str | None]:
    """Return a grammar as a regular expression for a table, and as a Lark grammar for a parser.

    Each of the two is None if the grammar cannot be written so.

    Raises:
        ValueError: the grammar is a JSON schema, and is wrong.
    """
    if field != "json_schema":
        return (value, None) if field == "regex" else (None, value)
    return forms_of_schema(disjoint.with_any_of(json_schema.parse(value)))


def forms_of_schema(schema: Any) -> tuple[str | None, str | None]:
    """Return a checked JSON schema in the two forms of `_forms`; raise ValueError if it has neither."""
    try:
        regex = schema_regex.regex_of(schema)
    except NoTable:
        return None, schema_lark.lark_of(schema)
    try:
        return regex, schema_lark.lark_of(schema)
    except ValueError:
        return regex, None  # only a table can follow this schema


def follow(request: Request) -> None:
    """Advance a request's grammar state, or its parser, by the new tokens of its output.

    Raises:
        ValueError: the tokens violate the grammar, because every token that the grammar allows was banned.
    """
    if request.matcher is not None:
        request.matcher.follow(request.token_ids)
    if request.grammar is None:
        return
    done, thought, state = request.state.grammar_position
    for count, token in enumerate(request.token_ids[done:], done):
        before, thought = thought, request.thinking.follow(thought, token)
        if not is_thought(before, thought):
            state = request.grammar.follow([token], state)
        request.state.grammar_position = count + 1, thought, state
        if state < 0:
            raise ValueError(
                f"{request.grammar.source}: after {count} tokens bad_words={request.params.bad_words!r}, a thinking "
                "budget or the engine's logits_processor banned every token that the grammar allows; ban fewer, or "
                "words of one token"
                + ("" if request.params.thinking_budget is None else "; or leave thinking_budget out")
            )
