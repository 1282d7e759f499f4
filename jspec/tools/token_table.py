"""Writes the log-probabilities of a completion's tokens as lines of a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from jspec.engine.request.token_logprobs import TokenLogprob
from jspec.engine.text.tokenizer import Tokenizer
from jspec.server.reading.logprobs import ShownTokens

HEADING = "logprob  rank  token; the likeliest tokens"


def table(records: Sequence[TokenLogprob], tokenizer: Tokenizer) -> str:
    """Return a line for each token: its log-probability, rank and text, then the likeliest tokens with theirs."""
    texts = ShownTokens(tokenizer)
    lines = [HEADING]
    for record in records:
        likeliest = ", ".join(f"{texts.text_of(token)!r} {logprob:.3f}" for token, logprob in record.top.items())
        line = f"{record.logprob:7.3f} {record.rank:5}  {texts.text_of(record.token_id)!r}"
        lines.append(f"{line}; {likeliest}" if likeliest else line)
    return "\n".join(lines)
