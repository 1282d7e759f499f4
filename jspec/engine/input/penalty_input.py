"""Checks a request's logit edits and packs them for the device code in `jspec.sampling.penalties`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.shorten import short
from jspec.core.thinking import MAX_FORCED
from jspec.engine.grammar.token_table import NOWHERE
from jspec.engine.request.request import Request
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.text.tokenizer import Tokenizer, without_hidden
from jspec.sampling.penalties import GENERATED, IN_PROMPT, LOOK_BACK, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, pack

Words = tuple[tuple[int, ...], ...]


def bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> Words:
    """Convert the bad words to token ids.

    A text is tokenised without a leading blank, with one, and after a newline. Some tokenizers put a blank before the
    first word of a text but not after a newline.

    Raises:
        ValueError: a text is given without a tokenizer, or a text has no tokens.
    """
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            words[word] = None
            continue
        if tokenizer is None:
            raise ValueError(
                f"bad_words: expected token ids, because this engine has no tokenizer, got {short(word)}; pass "
                "tokenizer= to the engine or give ids"
            )
        plain, blank, newline, after_newline = (
            tuple(without_hidden(tokenizer.encode(text), tokenizer))
            for text in (word, " " + word.lstrip(" "), "\n", "\n" + word)
        )
        spellings = [plain, blank]
        if after_newline[: len(newline)] == newline:
            spellings.append(after_newline[len(newline) :])
        if not all(spellings):
            raise ValueError(
                f"bad_words: expected a text with tokens that are not special, got {short(word)}; give token ids"
            )
        words |= dict.fromkeys(spellings)
    return tuple(words)


def check(
    params: SamplingParams, words: Words, stop_ids: Sequence[int], *, vocab_size: int, max_new_tokens: int
) -> None:
    """Refuse logit edits that the engine cannot store, or that may leave no token to emit.

    Args:
        words: the bad words as token ids, from `bad_words`.
        stop_ids: tokens that end the request.
        vocab_size: size of the model's vocabulary.
        max_new_tokens: the largest number of tokens that the request can emit.

    Raises:
        ValueError: an edit is refused; the message names the field, its value and the allowed values.
    """
    ids_of = {
        "logit_bias": tuple(params.logit_bias or ()),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": tuple(token for word in words for token in word),
    }
    for name, ids in ids_of.items():
        wrong = next((token for token in ids if token >= vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name}: expected ids in [0, {vocab_size}), got {short(wrong)}")
    long_words = [word for word in words if len(word) > 1]
    if len(long_words) > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words: expected at most {MAX_BAD_WORDS} of more than one token, got {len(long_words)} (a text counts "
            "with and without a blank in front); name fewer"
        )
    longest = max(words, key=len, default=())
    if len(longest) > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"bad_words: expected words of at most {MAX_BAD_WORD_TOKENS} tokens, got one of {len(longest)}: "
            f"{short(longest)}"
        )
    if params.min_tokens > max_new_tokens:
        raise ValueError(
            f"min_tokens: expected at most {max_new_tokens}, what max_len leaves, got {short(params.min_tokens)}"
        )
    _check_tokens_left(params, words, stop_ids, vocab_size)


def _check_tokens_left(params: SamplingParams, words: Words, stop_ids: Sequence[int], vocab_size: int) -> None:
    """Check that at least one token is allowed after any text.

    It is enough to check each text that is a bad word without its last token, because no other text bans more tokens.
    """
    if params.allowed_token_ids is None and vocab_size > len(words) + len(stop_ids):
        return
    allowed = set(range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids)
    if params.min_tokens:
        allowed -= set(stop_ids)
    for text in {word[:-1] for word in words} | {()}:
        banned = {word[-1] for word in words if len(word) == 1 or text[1 - len(word) :] == word[:-1]}
        if allowed <= banned:
            raise ValueError(
                f"allowed_token_ids: expected a token that neither bad_words={short(params.bad_words)} nor "
                f"min_tokens={params.min_tokens} takes out{f' after {short(text)}' if text else ''}, got "
                f"{short(params.allowed_token_ids)}; allow more or ban less"
            )


def pack_controls(request: Request, vocab_size: int, table: int = 0, args: int = 0) -> np.ndarray:
    """Pack a request's logit edits and current token counts for `jspec.sampling.penalties.admit`.

    Args:
        vocab_size: size of the model's vocabulary.
        table: index of the grammar's table on the device.
        args: number of values that the engine's logits processor takes from a request.
    """
    assert request.state.slot is not None
    params, prompt, output = request.params, request.prompt_token_ids, request.token_ids
    bias = np.zeros(vocab_size, np.float32)
    if params.logit_bias:  # as arrays, because this runs between two steps and may cover the whole vocabulary
        ids, values = (np.fromiter(part, float) for part in (params.logit_bias, params.logit_bias.values()))
        bias[ids.astype(np.int64)] = values
    if params.allowed_token_ids is not None:
        forbidden = np.ones(vocab_size, bool)
        forbidden[np.fromiter(params.allowed_token_ids, np.int64)] = False
        bias[forbidden] = -np.inf
    bias[[word[0] for word in request.bad_words if len(word) == 1]] = -np.inf
    beginnings = np.full((MAX_BAD_WORDS, LOOK_BACK), NO_TOKEN, np.int32)
    ends = np.full(MAX_BAD_WORDS, vocab_size, np.int32)
    for index, word in enumerate(word for word in request.bad_words if len(word) > 1):
        beginnings[index, 1 - len(word) :] = word[:-1]
        ends[index] = word[-1]
    counts = GENERATED * np.bincount(np.asarray(output, np.int64), minlength=vocab_size)
    counts[list(set(prompt))] += IN_PROMPT
    recent = [*[NO_TOKEN] * LOOK_BACK, *prompt[-LOOK_BACK:], *output[-LOOK_BACK:]][-LOOK_BACK:]
    thinking, forced = request.thinking, np.full(MAX_FORCED, NO_TOKEN, np.int32)
    forced[: len(thinking.forced)] = thinking.forced
    row = dict(
        used=np.ones(1, np.int32),
        repetition=np.array(params.repetition_penalty, np.float32),
        presence=np.array(params.presence_penalty, np.float32),
        frequency=np.array(params.frequency_penalty, np.float32),
        may_end_at=np.array(len(prompt) + params.min_tokens, np.int32),
        recent=np.asarray(recent, np.int32),
        bad_beginnings=beginnings,
        bad_ends=ends,
        bias=bias,
        counts=counts.astype(np.int32),
        table=np.array(table, np.int32),
        grammar_state=np.array(
            NOWHERE if request.grammar is None else thinking.grammar_state(output, request.grammar.follow), np.int32
        ),
        thought=np.array(thinking.after(output), np.int32),
        think_markers=np.array([thinking.start, thinking.end], np.int32),
        thinking_budget=np.array(thinking.budget, np.int32),
        forced=forced,
        forced_size=np.array(len(thinking.forced), np.int32),
        prompt_size=np.array(len(prompt), np.int32),
        processor_args=np.array(params.processor_args or [0.0] * max(args, 1), np.float32),
    )
    return pack(request.state.slot, row)
