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
    start = len(chunk.token_ids) - sum(len(one.emitted) for one in rounds)
    found = []
    for one in rounds:
        end = start + len(one.emitted)
        emitted = {"e": (chunk.pieces or [])[start:end], "d": chunk.from_draft[start:end]}
        found.append(_tree(one, texts) | emitted | _break_off(one))
        start = end
    return found


def _tree(one: Round, texts: ShownTokens) -> dict[str, Any]:
    """Return the nodes of a round's tree without padding: texts, parents, scores and the accepted path."""
    parents = [int(parent) for parent in one.parents]
    nodes = [node for node, parent in enumerate(parents) if node == 0 or parent >= 0]
    place = {node: index for index, node in enumerate(nodes)}
    return {
        "t": [texts.text_of(int(one.tokens[node])) for node in nodes],
        "p": [place.get(parents[node], -1) for node in nodes],
        "s": [round(max(float(one.scores[node]), LEAST), 4) for node in nodes],
        "a": [place[node] for node in one.path],
    }


def _break_off(one: Round) -> dict[str, Any]:
    """Return the rank and the draft's probability of the target's token where the draft broke off."""
    found = one.break_off
    return {} if found is None else {"r": found.rank, "q": found.draft_probability}
