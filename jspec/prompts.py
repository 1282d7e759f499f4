"""What a caller gives as a prompt, as checked token ids."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from jspec.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def token_ids(prompt: Prompt, tokenizer: Tokenizer | None, *, vocab_size: int, max_len: int) -> tuple[int, ...]:
    """The ids of a prompt.

    Raises:
        TypeError: neither a text nor ints.
        ValueError: a text without a tokenizer, no token, too many, or one that is not in the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer; pass tokenizer= or give token ids")
        prompt = tokenizer.encode(prompt)
    try:
        ids = tuple(operator.index(token) for token in prompt)
    except TypeError:
        raise TypeError(f"prompt: expected a text or a list of int token ids, got {prompt!r}") from None
    if not ids:
        raise ValueError("the prompt is empty; give at least one token (a BOS token, for instance)")
    if len(ids) >= max_len:
        raise ValueError(
            f"the prompt has {len(ids)} tokens; max_len={max_len} leaves no room for an answer: "
            "shorten it or raise max_len"
        )
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"prompt token {wrong}: expected ids in [0, {vocab_size})")
    return ids
