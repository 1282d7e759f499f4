"""Grammars that fit no table: what may follow a text, and each node of a draft behind it. Host only, no jax.

A context-free grammar has texts within texts, to any depth, and so more states than any table. The library llguidance
parses what was said so far and tells the tokens that may follow. It is asked behind every node that its parent allows,
so that tokens are those of asking one by one; to leave a node is to roll the parser back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, final

import numpy as np
from jaxtyping import Bool, Int, UInt32

INSTALL = "install llguidance (pip install 'jspec[grammar]')"
WORD = 32  # tokens a number of a mask holds
EVERYTHING = np.uint32(2**WORD - 1)
TOKENIZERS = 8  # sets of tokens that end a request for which the library's view of the vocabulary is kept
AS_IT_COMES = '\n%llguidance {"no_forcing": true}\n'  # else the library allows one spelling of a text alone
BLANKS = {"whitespace_pattern": "[ ]?", "lenient": False, "coerce_one_of": False}  # as a table has them
STATE = "\n<state>"  # where the library's messages begin to tell of its insides
OPTIONS = re.compile(
    r'^[ \t]*[?!]?[a-z_][\w-]*\s*\[((?:"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/|[^\]"/])*)\]', re.MULTILINE | re.I
)
RULE = re.compile(r"^[ \t]*[?!]?[a-z_][^:\n]*:", re.MULTILINE | re.I)
MOST_RULES = 1000  # the library goes from rule to rule by recursion, and some 3000 of them are beyond a thread's stack
LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/')


@dataclass(frozen=True, eq=False)
class LarkGrammar:
    """A context-free grammar over tokens, which requests share.

    Attributes:
        source: the field it was asked for by, and what that held.
        stop_ids: tokens that end a request; they come where the text may end, and nowhere else.
        words: numbers of a mask.
        start: the library's parser, before any token.
    """

    source: str
    stop_ids: tuple[int, ...]
    words: int
    start: Any = field(repr=False)

    def beginnings(self) -> set[int]:
        """The tokens that a text may begin with."""
        return set(_tokens(_next_tokens(self, self.start.deep_copy())))


class Spellings:
    """The tokens' bytes, as the library takes them in, for each set of tokens that end a request.

    Args:
        texts: of each token, None where it has none.
        vocab_size: of the model; ids beyond the tokenizer's have no text.
    """

    def __init__(self, texts: Sequence[bytes | None], vocab_size: int) -> None:
        self.size = vocab_size
        self._texts = [*texts[:vocab_size], *[None] * (vocab_size - len(texts))]
        self.ended_by = lru_cache(TOKENIZERS)(self._ended_by)

    def _ended_by(self, stop_ids: tuple[int, ...]) -> Any:
        without = {token for token, text in enumerate(self._texts) if text is None} | set(stop_ids)
        named = [f"none{token}".encode() if token in without else text for token, text in enumerate(self._texts)]
        wrapper = _Vocabulary(named, sorted(without), stop_ids[0])
        return _library().LLTokenizer(wrapper, n_vocab=self.size, eos_token=list(stop_ids))


@dataclass
class _Vocabulary:
    """What the library asks of a tokenizer."""

    tokens: list[bytes | None]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str | bytes) -> list[int]:
        return []  # it is asked for the tokens of texts that are forced, and none is


def lark_of_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of a JSON schema's texts: properties come in its order, between tokens one blank at most."""
    return f"start: %json {json.dumps({**schema, 'x-guidance': BLANKS})}"


def compile_lark(source: str, lark: str, spellings: Spellings, stop_ids: tuple[int, ...]) -> LarkGrammar:
    """The grammar that a text of Lark's form describes.

    Args:
        source: for messages.

    Raises:
        ValueError: no such text, one of which a part would be dropped, or none of its texts can be begun in the tokens.
        ImportError: llguidance is missing.
    """
    named = {name for options in OPTIONS.findall(lark) for name in re.findall(r"[\w-]+", LITERAL.sub("", options))}
    if "temperature" in named:
        raise ValueError(f"{source}: expected no rule with temperature=, which would be dropped; a request has one")
    rules = len(RULE.findall(lark))
    if rules > MOST_RULES:
        raise ValueError(f"{source}: expected at most {MOST_RULES} rules and terminals, got {rules}; take fewer")
    matcher, library = _library().LLMatcher, spellings.ended_by(stop_ids)
    start = matcher(library, matcher.grammar_from_lark(lark + AS_IT_COMES), log_level=0)
    if start.is_error():
        raise ValueError(f"{source}: expected a grammar that llguidance reads: {_reason(start)}")
    grammar = LarkGrammar(source, stop_ids, words_of(spellings.size), start)
    first = _next_tokens(grammar, probe := start.deep_copy())
    if probe.is_error():
        raise ValueError(
            f"{source}: none of its texts can be written in the tokens that may come ({_reason(probe)}); allow more"
        )
    token = next((token for token in _tokens(first) if token not in stop_ids), None)
    if token is not None and not (probe.consume_token(token) and probe.rollback(1)):
        raise ValueError(f"{source}: expected a grammar whose tokens can be followed and taken back: {_reason(probe)}")
    return grammar


@final
class Matcher:
    """Where one request's text stands in its grammar.

    Attributes:
        count: tokens of the output that it has followed.
    """

    def __init__(self, grammar: LarkGrammar) -> None:
        self.grammar = grammar
        self.count = 0
        self._parser = grammar.start.deep_copy()
        self._error: Exception | None = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Take the tokens of an output that are new.

        Raises:
            ValueError: they violate the grammar, for nothing that it allows was left; or the parser gave up.
        """
        for token in tokens[self.count :]:
            if self._error is not None:
                raise self._error
            is_end = token in self.grammar.stop_ids
            if not (self._parser.is_accepting() if is_end else self._parser.consume_token(token)):
                raise ValueError(
                    f"{self.grammar.source}: behind {self.count} tokens nothing was left of those that the grammar "
                    "allows: its texts cannot be written on in the tokenizer's tokens, or allowed_token_ids, bad_words "
                    f"or the engine's logits_processor took them out{_told(self._parser)}"
                )
            self.count += 1

    def masks(
        self, tokens: Int[np.ndarray, "nodes"], parents: Int[np.ndarray, "nodes"], valid: Bool[np.ndarray, "nodes"]
    ) -> UInt32[np.ndarray, "nodes words"]:
        """The tokens that may follow each node of a draft, as bits; everything behind a node that cannot stand.

        Where nothing may follow, or the parser fails, that is a token that ends the request: `follow` then raises.

        Args:
            tokens: node 0 is the newest token, which was followed already.
        """
        masks = np.full((len(tokens), self.grammar.words), EVERYTHING, np.uint32)
        try:
            self._fill(masks, tokens.tolist(), parents.tolist(), valid.tolist())
        except Exception as error:  # nobody else's affair
            self._error, masks[0] = error, _bits(self.grammar.stop_ids, self.grammar.words)
        return masks

    def first(self) -> UInt32[np.ndarray, "1 words"]:
        """The tokens that an output may begin with."""
        return self.masks(np.zeros(1, np.int32), np.full(1, -1, np.int32), np.ones(1, bool))

    def _fill(self, masks: np.ndarray, tokens: list[int], parents: list[int], valid: list[bool]) -> None:
        paths: dict[int, list[int]] = {0: []}  # from behind the root to each node that may stand
        parser, at = self._parser.deep_copy(), list[int]()
        for node, token in enumerate(tokens):
            if node > 0:
                parent = parents[node]
                stands = valid[node] and parent in paths and token not in self.grammar.stop_ids
                if not (stands and masks[parent, token // WORD] >> np.uint32(token % WORD) & 1):
                    continue
                paths[node] = [*paths[parent], token]
            if parser.is_error():  # from which there is no way back
                parser, at = self._parser.deep_copy(), []
            _move(parser, at, paths[node])
            at, masks[node] = paths[node], _next_tokens(self.grammar, parser)


def _move(parser: Any, at: list[int], to: list[int]) -> None:
    """Roll a parser back to what two paths share, and on to the second."""
    shared = 0
    while shared < min(len(at), len(to)) and at[shared] == to[shared]:
        shared += 1
    parser.rollback(len(at) - shared)
    parser.consume_tokens(to[shared:])


def words_of(vocab_size: int) -> int:
    """Numbers of a mask."""
    return -(-vocab_size // WORD)


def _next_tokens(grammar: LarkGrammar, parser: Any) -> UInt32[np.ndarray, "words"]:
    """What may follow; the tokens that end a request where the text may end, and where nothing may follow."""
    mask, ends = np.zeros(grammar.words, np.uint32), _bits(grammar.stop_ids, grammar.words)
    may_end = parser.is_accepting()
    parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    mask &= ~ends
    return mask | ends if may_end or parser.is_error() or not mask.any() else mask


def _bits(tokens: Sequence[int], words: int) -> UInt32[np.ndarray, "words"]:
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask[token // WORD] |= np.uint32(1 << token % WORD)
    return mask


def _tokens(mask: UInt32[np.ndarray, "words"]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def _reason(parser: Any) -> str:
    return parser.get_error().split(STATE)[0].strip()


def _told(parser: Any) -> str:
    return f" ({_reason(parser)})" if parser.is_error() else ""


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(f"grammar, and a json_schema that holds itself, need a library: {INSTALL}") from error
    return llguidance
