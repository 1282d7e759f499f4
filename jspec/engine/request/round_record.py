"""The record of one round of one request, which users get with ``trace=True``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jspec.engine.request.token_logprobs import TokenLogprob


@dataclass(frozen=True)
class BreakOff:
    """The place where a round's accepted path ends, and the token that the target emitted there.

    Attributes:
        node: the last accepted node; 0 if no draft token was accepted.
        token: the target's own token after this node.
        proposed: the children of the node, likeliest first; empty if the whole path was accepted down to a leaf.
        rank: place of the token among ``proposed``, from 1; None: it was not proposed. A rule that draws may refuse a
            proposed token and then emit it nevertheless.
        draft_probability: the drafter's probability (at temperature 1) of the token; None: it was not proposed.
        target_probability: the target's probability of the token; None if the request did not ask for
            log-probabilities. The engine's ``logprobs_mode`` decides whether it is raw or processed.
    """

    node: int
    token: int
    proposed: tuple[int, ...]
    rank: int | None
    draft_probability: float | None
    target_probability: float | None


@dataclass(frozen=True)
class Round:
    """A record of one round of one request: its draft tree with N nodes and its outcome. Made with ``trace=True``.

    Attributes:
        tokens: [N] target token id of each node; node 0 is the root, the newest token before the round.
        parents: [N] parent of each node; -1 for the root and for padding nodes.
        scores: [N] sum of the drafter's log-probabilities from the root to each node (natural, at temperature 1).
        path: ids of the accepted nodes, the root first.
        accept_len: number of accepted draft tokens.
        emitted: emitted tokens, cut where the request ended.
        start: number of the request's output tokens before the round.
        logprobs: one record per emitted token, if the request asked for log-probabilities; else None.
        confidence: [N] the drafter's estimate of the probability that a node is accepted if its parent is; root: 1.
            None: the drafter makes no estimate.
        from_lookup: [N] whether a look-up drafted the node beside a head; None: the drafter has no two sources.
        match_length: length in tokens of the look-up's match, whether the round verified what followed or not; 0: no
            match. None: the drafter has no two sources.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    path: list[int]
    accept_len: int
    emitted: list[int]
    start: int = 0
    logprobs: list[TokenLogprob] | None = None
    confidence: np.ndarray | None = None
    from_lookup: np.ndarray | None = None
    match_length: int | None = None

    @property
    def break_off(self) -> BreakOff | None:
        """What the target emitted where the draft ended; None if the request ended before that token."""
        if len(self.emitted) <= self.accept_len:
            return None
        node, token = self.path[-1], self.emitted[self.accept_len]
        proposed = sorted(np.flatnonzero(self.parents == node).tolist(), key=lambda child: -self.scores[child])
        rank = next((position for position, child in enumerate(proposed, 1) if self.tokens[child] == token), None)
        return BreakOff(
            node=node,
            token=token,
            proposed=tuple(proposed),
            rank=rank,
            draft_probability=None if rank is None else self.draft_probability(proposed[rank - 1]),
            target_probability=None if self.logprobs is None else math.exp(self.logprobs[self.accept_len].logprob),
        )

    def draft_probability(self, node: int) -> float:
        """Return the drafter's probability (at temperature 1) of a node's token, given its parent."""
        return math.exp(self.scores[node] - self.scores[self.parents[node]])

    def to_text(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """Draw the tree as text with one node per line; accepted nodes are marked with a star.

        Args:
            decode: a tokenizer's ``decode``; None: tokens are shown as ids. A token without readable text (a special
                token, or a part of a character) is shown as ``#id``.
        """
        lines: list[str] = []

        def show(token: int) -> str:
            if decode is None:
                return str(token)
            text = decode([token])
            return repr(text) if text and "\ufffd" not in text else f"#{token}"

        def walk(node: int, indent: int) -> None:
            star = "*" if node in self.path else " "
            lines.append(f"{star} {'  ' * indent}{show(int(self.tokens[node]))}  ({self.scores[node]:.3f})")
            for child in np.flatnonzero(self.parents == node):
                walk(int(child), indent + 1)

        walk(0, 0)
        emitted = self.emitted if decode is None else repr(decode(self.emitted))
        return "\n".join([*lines, f"emitted {emitted}"])
