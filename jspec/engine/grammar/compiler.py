"""Compiles the grammars of requests, each distinct grammar once, and checks them against the engine's options.

A regular expression or a schema of bounded depth becomes a table on the device. Any other grammar becomes a parser on
the host.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import final

from jspec.engine.grammar import json_schema
from jspec.engine.grammar.cfg_matcher import LarkGrammar, Vocabularies, compile_lark, lark_of_schema
from jspec.engine.grammar.regex_dfa import Builder
from jspec.engine.grammar.token_table import Grammar, TokenTexts, check_size, compile_grammar, regex_of_schema
from jspec.engine.penalty_input import Words
from jspec.engine.request import Request
from jspec.engine.sampling_params import SamplingParams
from jspec.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CACHE_SIZE = 64  # number of compiled grammars that the host keeps


@final
class GrammarInput:
    """Compiles the grammars that requests ask for.

    Args:
        tokenizer: the engine's tokenizer; None: requests cannot have grammars.
        vocab_size: size of the model's vocabulary.
        cells: number of cells of one table on the device; 0: no tables.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, cells: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._cells = cells
        self._build = Builder()
        own = weakref.proxy(self)  # a cycle would keep this object and the builder's process until garbage collection
        self._compiled = lru_cache(CACHE_SIZE)(lambda *key: own._compile(*key))
        self._regex_of = lru_cache(CACHE_SIZE)(partial(regex_of_schema, build=self._build))
        self._compiled_lark = lru_cache(CACHE_SIZE)(lambda *key: own._compile_lark(*key))
        self._lark_of = lru_cache(CACHE_SIZE)(_lark_of)

    def close(self) -> None:
        """End the process that builds automata; a later grammar starts a new one."""
        self._build.close()

    def of(self, params: SamplingParams, stop_ids: tuple[int, ...], words: Words) -> Grammar | LarkGrammar | None:
        """Compile the grammar of a request; None if the request has no grammar.

        Args:
            stop_ids: tokens that end the request; the grammar allows these tokens exactly where its text may end.
            words: the request's bad words as token ids. A table bans bad words of a single token and tokens outside
                ``allowed_token_ids``.

        Raises:
            ValueError: the grammar cannot be served; the message names the field, its value and what is allowed.
            ImportError: a grammar library is missing.
        """
        field = params.grammar_field
        if field is None:
            return None
        value = getattr(params, field)
        source = f"{field}={value!r:.200}"
        lark = value if field == "grammar" else self._lark_of(value) if field == "json_schema" else None
        self._check(field, params, stop_ids, words, needs_table=lark is None)
        if lark is not None:
            grammar = self._compiled_lark(source, lark, stop_ids)
            _check_first_tokens(field, params, grammar)
            return grammar
        regex = value if field == "regex" else self._regex_of(value)
        singles = tuple(word[0] for word in words if len(word) == 1)
        return self._compiled(source, regex, stop_ids, params.allowed_token_ids, singles)

    def _check(
        self, field: str, params: SamplingParams, stop_ids: Sequence[int], words: Words, *, needs_table: bool
    ) -> None:
        if self._tokenizer is None:
            raise ValueError(f"{field}: needs a tokenizer; pass tokenizer= to the engine")
        if needs_table and not self._cells:
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
        source: str,
        regex: str,
        stop_ids: tuple[int, ...],
        allowed: tuple[int, ...] | None,
        singles: tuple[int, ...],
    ) -> Grammar:
        banned = set(singles)
        if allowed is not None:
            banned |= set(range(self._vocab_size)) - set(allowed)
        grammar = compile_grammar(source, regex, self._token_texts, stop_ids, banned, self._build)
        check_size(grammar, self._cells)
        logger.info("%s: a table of %d states x %d classes of tokens", source, *grammar.next.shape)
        return grammar

    def _compile_lark(self, source: str, lark: str, stop_ids: tuple[int, ...]) -> LarkGrammar:
        grammar = compile_lark(source, lark, self._vocabularies, stop_ids)
        logger.info("%s: fits no table; its rounds take two launches, and the host computes masks between them", source)
        return grammar

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self._texts, self._vocab_size)

    @cached_property
    def _vocabularies(self) -> Vocabularies:
        return Vocabularies(self._texts, self._vocab_size)

    @cached_property
    def _texts(self) -> list[bytes | None]:
        token_bytes = getattr(self._tokenizer, "token_bytes", None)
        if token_bytes is None:
            raise ValueError(f"tokenizer: a grammar needs its token_bytes, got {self._tokenizer!r}")
        return token_bytes()


def _check_first_tokens(field: str, params: SamplingParams, grammar: LarkGrammar) -> None:
    """Refuse a request if no allowed token can be the output's first token; later tokens are not checked."""
    allowed, first = params.allowed_token_ids, grammar.first_tokens()
    if allowed is not None and not set(allowed) & first:
        raise ValueError(
            f"allowed_token_ids: expected at least one token that {field} may begin with, for instance one of "
            f"{sorted(first)[:10]}, got {allowed}"
        )


def _lark_of(schema: str) -> str | None:
    """Write the Lark grammar of a recursive JSON schema; None for other schemas."""
    try:
        parsed = json.loads(schema)
    except json.JSONDecodeError:
        return None  # `regex_of_schema` raises the error
    except RecursionError as error:
        raise ValueError("json_schema: expected JSON that is not nested so deep; take fewer levels") from error
    try:
        if not json_schema.is_recursive(parsed):
            return None
        json_schema.check_keywords(parsed)
    except RecursionError as error:
        raise ValueError(
            "json_schema: expected references and levels that are not nested so deep; take fewer"
        ) from error
    return lark_of_schema(parsed)


def follow(request: Request) -> None:
    """Advance the state of a request's grammar by the new tokens of the output.

    Raises:
        ValueError: the tokens violate the grammar, because every token that the grammar allows was banned; the message
            names the cause.
    """
    if request.matcher is not None:
        request.matcher.follow(request.token_ids)
    if request.grammar is None:
        return
    done, state = request.state.grammar_position
    for count, token in enumerate(request.token_ids[done:], done):
        state = request.grammar.follow([token], state)
        request.state.grammar_position = count + 1, state
        if state < 0:
            raise ValueError(
                f"{request.grammar.source}: after {count} tokens bad_words={request.params.bad_words!r} or the "
                "engine's logits_processor banned every token that the grammar allows; ban fewer, or words of one token"
            )
