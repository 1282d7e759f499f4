"""Recorded rounds as JSON, for the page that shows draft trees."""

from __future__ import annotations

from typing import Any

from jspec.engine.request.request import Chunk, Round
from jspec.server.reading.logprobs import LEAST, ShownTokens


def rounds_json(chunk: Chunk, texts: ShownTokens) -> list[dict[str, Any]]:
    """Return the rounds of a chunk, each with its draft tree and the tokens that it emitted.

    Args:
        chunk: output of a request with ``trace=True``. Its last tokens are those of its rounds; a token before them was
            sampled by the prefill.
    """
    rounds = chunk.rounds or []
    start = len(chunk.token_ids) - sum(len(each.emitted) for each in rounds)
    entries = []
    for round_ in rounds:
        end = start + len(round_.emitted)
        emitted = {"e": (chunk.pieces or [])[start:end], "d": chunk.from_draft[start:end]}
        entries.append(_tree(round_, texts) | emitted | _break_off(round_))
        start = end
    return entries


def _tree(round_: Round, texts: ShownTokens) -> dict[str, Any]:
    """Return the nodes of a round's tree without padding: texts, parents, scores and the accepted path."""
    parents = [int(parent) for parent in round_.parents]
    nodes = [node for node, parent in enumerate(parents) if node == 0 or parent >= 0]
    index_of = {node: index for index, node in enumerate(nodes)}
    return {
        "t": [texts.text_of(int(round_.tokens[node])) for node in nodes],
        "p": [index_of.get(parents[node], -1) for node in nodes],
        "s": [round(max(float(round_.scores[node]), LEAST), 4) for node in nodes],
        "a": [index_of[node] for node in round_.path],
    }


def _break_off(round_: Round) -> dict[str, Any]:
    """Return the rank and the draft's probability of the target's token where the draft broke off."""
    break_off = round_.break_off
    return {} if break_off is None else {"r": break_off.rank, "q": break_off.draft_probability}
