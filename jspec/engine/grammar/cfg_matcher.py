"""Computes the tokens that a context-free grammar allows after an output and after each node of a draft tree.

This runs on the host, without jax. A context-free grammar nests to any depth, so no table can hold its states. The
library llguidance parses the output and computes a mask of the allowed next tokens. The mask is computed for every
draft node that the grammar allows, so the output equals that of masked decoding without drafts. Between two nodes the
parser is rolled back to their common ancestor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import numpy as np
from jaxtyping import Bool, Int, UInt32

from jspec.core.bitmask import EVERYTHING, WORD, words_of
from jspec.core.thinking import NO_THINKING, WAITS_ONCE, Thinking, is_thought
from jspec.engine.grammar.regex_dfa import ALL_TOKENIZATIONS, NoText, TooLarge, reason

MISSING = "expected the library llguidance, which is not installed; pip install -e '.[grammar]' in jspec's folder"
RULE_OPTIONS = re.compile(
    r'^[ \t]*[?!]?[a-z_][\w-]*\s*\[((?:"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/|[^\]"/])*)\]', re.MULTILINE | re.I
)
RULE = re.compile(r"^[ \t]*[?!]?[a-z_][^:\n]*:", re.MULTILINE | re.I)
MAX_RULES = 1000  # llguidance recurses from rule to rule; about 3000 rules overflow a thread's stack
LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/')


@dataclass(frozen=True, eq=False)
class LarkGrammar:
    """A compiled context-free grammar, which several requests may share.

    Attributes:
        source: the request's field and its value, for error messages.
        stop_ids: tokens that end a request; allowed exactly where a text of the grammar may end.
        vocab_size: size of the model's vocabulary.
        start: the library's parser in its state before the first token.
    """

    source: str
    stop_ids: tuple[int, ...]
    vocab_size: int
    start: Any = field(repr=False)

    @property
    def words(self) -> int:
        """Return the number of 32-bit words in a token mask (`jspec.core.bitmask`)."""
        return words_of(self.vocab_size)

    def first_tokens(self) -> set[int]:
        """Return the ids of the tokens that an output may begin with."""
        return set(_tokens(_next_tokens(self, self.start.deep_copy())))


class GuidanceVocabulary:
    """The vocabulary in the form that llguidance reads.

    Args:
        texts: bytes of each token; None for a token without text.
        vocab_size: size of the model's vocabulary; ids that the tokenizer lacks get no text.
    """

    def __init__(self, texts: Sequence[bytes | None], vocab_size: int) -> None:
        self.size = vocab_size
        self._texts = [*texts[:vocab_size], *[None] * (vocab_size - len(texts))]

    @cached_property
    def tokenizer(self) -> Any:
        """Return an llguidance tokenizer with one additional token, which stands for the end of a text."""
        named = [f"none{token}".encode() if text is None else text for token, text in enumerate(self._texts)]
        special = [token for token, text in enumerate(self._texts) if text is None]
        wrapper = _TokenizerWrapper([*named, b"end"], [*special, self.size], self.size)
        library = _library().LLTokenizer
        # In two calls, because each holds the interpreter's lock: 0.1 s for 128,000 tokens.
        return library(wrapper, n_vocab=self.size + 1, eos_token=[self.size], slices=[]).with_slices(
            library.general_slices()
        )


@dataclass
class _TokenizerWrapper:
    """Presents the vocabulary through the tokenizer interface that llguidance expects."""

    tokens: list[bytes | None]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str | bytes) -> list[int]:
        return []  # llguidance calls this only for forced text, which ALL_TOKENIZATIONS switches off


def compile_lark(
    source: str, lark: str, vocabulary: GuidanceVocabulary, stop_ids: tuple[int, ...], run: Callable[..., Any]
) -> LarkGrammar:
    """Compile a grammar in Lark's syntax, after a trial in a process with limits of time and memory.

    Args:
        source: the request's field and its value, for error messages.
        lark: the grammar's text.
        vocabulary: the model's vocabulary.
        stop_ids: tokens that end a request.
        run: function that runs the task "lark", a `jspec.engine.grammar.builder.Builder`.

    Raises:
        ValueError: the grammar is invalid, takes too much time or memory, has an option that llguidance ignores, or
            allows no first token.
        ImportError: llguidance is missing.
    """
    _check_rules(source, lark)
    matcher, library = _library().LLMatcher, vocabulary.tokenizer
    try:
        run("lark", lark, *([vocabulary.size] if "<[" in lark else []))  # <[1000]> is a token id
    except TooLarge as error:
        raise ValueError(f"{source}: {error}") from None
    except NoText as error:
        raise ValueError(f"{source}: it has no text ({error})") from None
    except ValueError as error:
        raise ValueError(f"{source}: expected a grammar that llguidance reads: {error}") from None
    grammar = LarkGrammar(
        source,
        stop_ids,
        vocabulary.size,
        matcher(library, matcher.grammar_from_lark(lark + ALL_TOKENIZATIONS), log_level=0),
    )
    first = _next_tokens(grammar, probe := grammar.start.deep_copy())
    if probe.is_error():
        raise ValueError(
            f"{source}: none of its texts can be written in the allowed tokens ({reason(probe)}); allow more"
        )
    token = next((token for token in _tokens(first) if token not in stop_ids), None)
    if token is not None and not (probe.consume_token(token) and probe.rollback(1)):
        raise ValueError(f"{source}: expected a grammar whose tokens can be followed and taken back: {reason(probe)}")
    return grammar


def _check_rules(source: str, lark: str) -> None:
    """Refuse a grammar with too many rules, or with options of a rule that llguidance ignores."""
    named = {name for options in RULE_OPTIONS.findall(lark) for name in re.findall(r"[\w-]+", LITERAL.sub("", options))}
    if "temperature" in named:
        raise ValueError(
            f"{source}: expected no rule with temperature=, which would be ignored; set the temperature of the request"
        )
    rules = len(RULE.findall(lark))
    if rules > MAX_RULES:
        raise ValueError(f"{source}: expected at most {MAX_RULES} rules and terminals, got {rules}; take fewer")


@final
class Matcher:
    """Parses one request's output by its grammar, and computes token masks.

    Args:
        grammar: the grammar.
        thinking: how the request reasons; where the grammar waits, reasoning is not parsed, and all tokens may follow.

    Attributes:
        count: number of output tokens that the parser has consumed.
    """

    def __init__(self, grammar: LarkGrammar, thinking: Thinking = NO_THINKING) -> None:
        self.grammar = grammar
        self._thinking, self._thought = thinking, thinking.held
        self.count = 0
        self._parser = grammar.start.deep_copy()
        self._error: Exception | None = None

    def follow(self, tokens: Sequence[int]) -> None:
        """Parse the output tokens that are new since the last call.

        Args:
            tokens: all tokens of the output so far.

        Raises:
            ValueError: the parser failed, or the tokens violate the grammar because every token that it allows was
                banned.
        """
        for token in tokens[self.count :]:
            if self._error is not None:
                raise self._error
            before, self._thought = self._thought, self._thinking.follow(self._thought, token)
            if is_thought(before, self._thought):
                self.count += 1
                continue
            is_end = token in self.grammar.stop_ids
            if not (self._parser.is_accepting() if is_end else self._parser.consume_token(token)):
                raise ValueError(
                    f"{self.grammar.source}: after {self.count} tokens no token that the grammar allows was left: its "
                    "texts cannot be continued in the tokenizer's tokens, or allowed_token_ids, bad_words, a thinking "
                    f"budget or the engine's logits_processor banned them{_reason_in_brackets(self._parser)}"
                )
            self.count += 1

    def masks(
        self, tokens: Int[np.ndarray, "nodes"], parents: Int[np.ndarray, "nodes"], valid: Bool[np.ndarray, "nodes"]
    ) -> UInt32[np.ndarray, "nodes words"]:
        """Compute the mask of the tokens that may follow each node of a draft tree.

        The mask after a disallowed node, or inside reasoning, allows all tokens. If the grammar allows no token, or the
        parser fails, the mask allows only the stop ids, and the next `follow` raises.

        Args:
            tokens: token id of each node; node 0 is the newest output token, which `follow` has parsed already.
            parents: index of each node's parent; -1: no parent.
            valid: whether each node is part of the draft; False: padding.
        """
        masks = np.full((len(tokens), self.grammar.words), EVERYTHING, np.uint32)
        try:
            self._fill(masks, tokens.tolist(), parents.tolist(), valid.tolist())
        except Exception as error:  # an error here must not end the other requests of the batch
            self._error, masks[0] = error, _bits(self.grammar.stop_ids, self.grammar.words)
        return masks

    def first(self) -> UInt32[np.ndarray, "1 words"]:
        """Compute the mask of the output's next token when there is no draft."""
        return self.masks(np.zeros(1, np.int32), np.full(1, -1, np.int32), np.ones(1, bool))

    def _fill(self, masks: np.ndarray, tokens: list[int], parents: list[int], valid: list[bool]) -> None:
        paths: dict[int, list[int]] = {0: []}  # tokens after the root up to each allowed node
        thoughts = {0: self._thought}  # states of the reasoning after each allowed node
        parser, consumed = self._parser.deep_copy(), list[int]()
        for node, token in enumerate(tokens):
            if node > 0:
                parent = parents[node]
                if not (valid[node] and parent in paths):
                    continue
                thoughts[node] = self._thinking.follow(thoughts[parent], token)
                if is_thought(thoughts[parent], thoughts[node]):
                    paths[node] = []
                else:
                    is_allowed = masks[parent, token // WORD] >> np.uint32(token % WORD) & 1
                    if not is_allowed or token in self.grammar.stop_ids:
                        continue
                    paths[node] = [*paths[parent], token]
            if thoughts[node] >= 0:  # all tokens may follow but those that end the request
                stops = [token for token in self.grammar.stop_ids if token != self._thinking.end]
                masks[node] &= ~_bits(stops, self.grammar.words)
                continue
            if parser.is_error():  # a parser in this state cannot be rolled back
                parser, consumed = self._parser.deep_copy(), []
            _move(parser, consumed, paths[node])
            consumed, masks[node] = paths[node], _next_tokens(self.grammar, parser)
            if thoughts[node] == WAITS_ONCE:
                masks[node] |= _bits([self._thinking.start], self.grammar.words)


def _move(parser: Any, consumed: list[int], path: list[int]) -> None:
    """Move a parser to another path of tokens.

    The parser rolls back to the common prefix of both paths, then consumes the rest of the new path.
    """
    shared = 0
    while shared < min(len(consumed), len(path)) and consumed[shared] == path[shared]:
        shared += 1
    parser.rollback(len(consumed) - shared)
    parser.consume_tokens(path[shared:])


def _next_tokens(grammar: LarkGrammar, parser: Any) -> UInt32[np.ndarray, "words"]:
    """Compute the mask of the next token.

    The stop ids are allowed if the text may end here, or if no other token may follow.
    """
    stops = _bits(grammar.stop_ids, grammar.words)
    may_end = parser.is_accepting()
    whole = np.zeros(words_of(grammar.vocab_size + 1), np.uint32)
    parser.unsafe_compute_mask_ptr(whole.ctypes.data, whole.nbytes)
    end = grammar.vocab_size
    whole[end // WORD] &= ~np.uint32(1 << end % WORD)
    mask = whole[: grammar.words] & ~stops
    return mask | stops if may_end or parser.is_error() or not mask.any() else mask


def _bits(tokens: Sequence[int], words: int) -> UInt32[np.ndarray, "words"]:
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask[token // WORD] |= np.uint32(1 << token % WORD)
    return mask


def _tokens(mask: UInt32[np.ndarray, "words"]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def _reason_in_brackets(parser: Any) -> str:
    return f" ({reason(parser)})" if parser.is_error() else ""


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(MISSING) from error
    return llguidance
