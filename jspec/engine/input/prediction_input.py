"""Reads the prediction of a request: text that its output will probably repeat."""

from __future__ import annotations

from jspec.core.shorten import short
from jspec.engine.request.too_long import CHARACTERS_PER_TOKEN
from jspec.engine.text.tokenizer import Tokenizer, encode, without_hidden


def predicted_ids(
    prediction: str | tuple[int, ...] | None, tokenizer: Tokenizer | None, vocab_size: int, most: int
) -> tuple[int, ...]:
    """Return the tokens of a prediction, without special tokens if it is a text.

    Args:
        prediction: `SamplingParams.prediction`.
        tokenizer: the engine's tokenizer.
        vocab_size: size of the model's vocabulary.
        most: the engine's ``predicted_tokens``.

    Raises:
        ValueError: the engine takes no predictions, or this one is too long, or its tokens are wrong.
    """
    if prediction is None:
        return ()
    if not most:
        raise ValueError(
            f"prediction: expected nothing, because this engine has predicted_tokens=0, got {short(prediction)}; leave "
            "it out, or give the engine predicted_tokens=N (--predicted-tokens N) and a drafter with a look-up "
            "(--ngram, or --lookup ngram beside a head)"
        )
    longer = "shorten it, or raise the engine's predicted_tokens (--predicted-tokens N)"
    if isinstance(prediction, tuple):
        ids = prediction
    else:
        if len(prediction) > most * CHARACTERS_PER_TOKEN:  # before it is tokenised
            characters = f"{most * CHARACTERS_PER_TOKEN} characters ({CHARACTERS_PER_TOKEN} for each of {most} tokens)"
            raise ValueError(f"prediction: expected at most {characters}, got {len(prediction)}; {longer}")
        encoded = encode(tokenizer, prediction, "prediction")
        assert tokenizer is not None
        ids = tuple(without_hidden(encoded, tokenizer))
    if len(ids) > most:
        raise ValueError(f"prediction: expected at most {most} tokens, got {len(ids)}; {longer}")
    wrong = next((token for token in ids if token >= vocab_size), None)
    if wrong is not None:
        raise ValueError(f"prediction: expected ids in [0, {vocab_size}), got {wrong}")
    return ids
