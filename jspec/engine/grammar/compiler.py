"""The grammar of a request: its fields checked against the engine, and compiled once for all that ask for the same.

A regular expression or a schema of bounded depth becomes a table, another grammar a parser that the host asks.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from typing import final

from jspec.engine.grammar import json_schema
from jspec.engine.grammar.cfg_matcher import LarkGrammar, Spellings, compile_lark, lark_of_schema
from jspec.engine.grammar.regex_dfa import Builder
from jspec.engine.grammar.token_table import Grammar, TokenTexts, check_size, compile_grammar, regex_of_schema
from jspec.engine.penalty_input import Words
from jspec.engine.request import Request
from jspec.engine.sampling_params import SamplingParams
from jspec.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

KEPT = 64  # grammars whose tables the host keeps


@final
class GrammarInput:
    """Makes tables of grammars.

    Args:
        cells: that a table may have; 0: none.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, cells: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._cells = cells
        self._build = Builder()
        own = weakref.proxy(self)  # else the caches would keep it, and the builder's process, until collected
        self._compiled = lru_cache(KEPT)(lambda *key: own._compile(*key))
        self._regex_of = lru_cache(KEPT)(partial(regex_of_schema, build=self._build))
        self._compiled_lark = lru_cache(KEPT)(lambda *key: own._compile_lark(*key))
        self._lark_of = lru_cache(KEPT)(_lark_of)

    def close(self) -> None:
        """End the process that makes automata; it is started anew if need be."""
        self._build.close()

    def of(self, params: SamplingParams, stop_ids: tuple[int, ...], words: Words) -> Grammar | LarkGrammar | None:
        """The grammar that a request asks for, if it does.

        Args:
            stop_ids: tokens that end the request; they may come where the grammar's text may end, and nowhere else.
            words: its bad words as token ids. What is banned whatever stands before it, as what is not allowed, is
                taken out of the tokens that texts are written in.

        Raises:
            ValueError: naming the field, its value and what is allowed.
            ImportError: the library is missing.
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
            _check_beginning(field, params, grammar)
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
            raise ValueError(f"{field}: this engine was built with grammar_cells=0; build it with room for a table")
        if not stop_ids:
            raise ValueError(
                f"{field}: needs a token that ends the request; pass eos_ids= to the engine, or stop_token_ids"
            )
        allowed = params.allowed_token_ids
        if allowed is not None and not set(allowed) & set(stop_ids):
            raise ValueError(
                f"allowed_token_ids: expected one of {tuple(stop_ids)} among them beside {field}, which ends with such "
                f"a token, got {allowed}"
            )
        wrong = next((word for word in words if word[-1] in stop_ids), None)
        if wrong is not None:
            raise ValueError(
                f"bad_words: expected none beside {field} that ends with a token that ends the request, got {wrong}"
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
        grammar = compile_lark(source, lark, self._spellings, stop_ids)
        logger.info("%s: fits no table; its rounds take two launches, between which the host makes masks", source)
        return grammar

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self._texts, self._vocab_size)

    @cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self._texts, self._vocab_size)

    @cached_property
    def _texts(self) -> list[bytes | None]:
        spell = getattr(self._tokenizer, "token_bytes", None)
        if spell is None:
            raise ValueError(f"tokenizer: a grammar needs its token_bytes, got {self._tokenizer!r}")
        return spell()


def _check_beginning(field: str, params: SamplingParams, grammar: LarkGrammar) -> None:
    """Refuse tokens of which none begins a text; what comes later is not looked at."""
    allowed, first = params.allowed_token_ids, grammar.beginnings()
    if allowed is not None and not set(allowed) & first:
        raise ValueError(
            f"allowed_token_ids: expected one of those that {field} may begin with among them, some of "
            f"{sorted(first)[:10]}, got {allowed}"
        )


def _lark_of(schema: str) -> str | None:
    """The grammar of a JSON schema that holds itself, None for others."""
    try:
        parsed = json.loads(schema)
    except json.JSONDecodeError:
        return None  # which `regex_of_schema` says
    except RecursionError as error:
        raise ValueError("json_schema: expected JSON that is not nested so deep; take fewer levels") from error
    try:
        if not json_schema.holds_itself(parsed):
            return None
        json_schema.check_words(parsed)
    except RecursionError as error:
        raise ValueError(
            "json_schema: expected references and levels that are not nested so deep; take fewer"
        ) from error
    return lark_of_schema(parsed)


def follow(request: Request) -> None:
    """Take the tokens that are new into the state of a request's grammar.

    Raises:
        ValueError: they violate it, for nothing that it allows was left; naming what took that out.
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
                f"{request.grammar.source}: behind {count} tokens bad_words={request.params.bad_words!r} or the "
                "engine's logits_processor left none of those that the grammar allows; ban less, or words of one token"
            )
