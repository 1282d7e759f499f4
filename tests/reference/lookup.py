"""The trees of n-gram and suffix drafting, found by searching lists of tokens without arrays or tries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jspec import Tree
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix

Tail = tuple[int, list[int]]  # number of a match (0 is the best) and the rest of its continuation
Node = tuple[int, int, int]  # parent, token, number of matches through the node


class Predicted(NamedTuple):
    """The prediction of a request."""

    tokens: list[int]
    output: list[int]  # what the request has emitted so far
    reached: int  # number of predicted tokens that the output has reached


class TextMatch(NamedTuple):
    """A match; those that are better are larger."""

    length: int
    is_predicted: bool
    is_preferred: bool  # in the request's own text, or after the place in its prediction
    order: tuple[int, int]
    tail: list[int]  # its continuation


def length_at(text: list[int], end: int, query: list[int]) -> int:
    """Count the query's tokens, newest first, that equal the text's tokens from ``end`` backwards."""
    length = 0
    while length < len(query) and end >= length and text[end - length] == query[length]:
        length += 1
    return length


def predicted_matches(predicted: Predicted, drafter: NGram | Suffix) -> list[TextMatch]:
    tokens, output, reached = predicted
    found = []
    for end in range(len(tokens) - 1):
        length = length_at(tokens, end, output[::-1][: drafter.max_n])
        if length == end + 1 == len(output):  # both begin with these tokens
            length = drafter.max_n
        if length >= drafter.min_n:
            found.append(TextMatch(length, True, end + 1 >= reached, (-end, 0), tokens[end + 1 :]))
    return found or [TextMatch(0, True, True, (0, 0), tokens[reached:])]


def best_matches(
    texts: list[list[int]], own: int, drafter: NGram | Suffix, predicted: Predicted | None = None
) -> list[TextMatch]:
    """Return the best matches of the end of ``texts[own]``; texts are ordered from oldest to newest."""
    query = texts[own][::-1][: drafter.max_n]
    found = [
        TextMatch(length, False, number == own, (number, end), text[end + 1 :])
        for number, text in enumerate(texts)
        for end in range(len(text) - 1)
        if (length := length_at(text, end, query)) >= drafter.min_n
    ]
    found += [] if predicted is None else predicted_matches(predicted, drafter)
    return sorted(found, reverse=True)[: match_count(drafter.tree)]


def match_count(tree: Tree) -> int:
    leaves = 0 if tree.paths is None else len(set(tree.paths) - {path[:-1] for path in tree.paths})
    return max(4 * (leaves + tree.k), tree.depth, -(-(tree.nodes - 1) // tree.depth))


def children(group: list[Tail], *, by_count: bool) -> list[tuple[int, list[Tail]]]:
    """Return the distinct next tokens, best first, each with the continuations of its matches."""
    groups: dict[int, list[Tail]] = {}
    for number, tail in group:
        if tail:
            groups.setdefault(tail[0], []).append((number, tail[1:]))
    return sorted(groups.items(), key=lambda item: -len(item[1]) if by_count else 0)


def static_nodes(group: list[Tail], tree: Tree, *, by_count: bool) -> list[Node]:
    nodes: list[Node] = []
    places: dict[tuple[int, ...], tuple[int, list[Tail]]] = {(): (0, group)}
    assert tree.paths is not None
    for path in tree.paths:
        if path[:-1] in places:
            parent, passing = places[path[:-1]]
            options = children(passing, by_count=by_count)
            if path[-1] < len(options):
                token, inner = options[path[-1]]
                nodes.append((parent, token, len(inner)))
                places[path] = len(nodes), inner
    return nodes


def dynamic_nodes(group: list[Tail], tree: Tree, *, by_count: bool) -> list[Node]:
    """Return the prefixes that most matches have in common as nodes with at most k children each."""
    all_nodes: list[tuple[tuple[int, int, int], tuple[int, ...]]] = []

    def visit(text: tuple[int, ...], passing: list[Tail]) -> None:
        if len(text) < tree.depth:
            for token, inner in children(passing, by_count=by_count)[: tree.k]:
                all_nodes.append(((-len(inner), len(text), inner[0][0]), (*text, token)))
                visit((*text, token), inner)

    visit((), group)
    kept = sorted(all_nodes)[: tree.nodes - 1]
    index = {(): 0} | {text: number for number, (_, text) in enumerate(kept, 1)}
    return [(index[text[:-1]], text[-1], -passing) for (passing, _, _), text in kept]


def expected_nodes(best: list[TextMatch], drafter: NGram | Suffix) -> tuple[list[Node], list[float]]:
    """Return the nodes after the root, and their scores, from the best matches."""
    tree, by_count = drafter.tree, isinstance(drafter, Suffix)
    group = [(number, match.tail) for number, match in enumerate(best) if match.tail]
    if best and best[0].is_predicted and best[0].length:  # counts as much as all together
        group = group[:1] * match_count(tree) + group[1:]
    nodes = (dynamic_nodes if tree.paths is None else static_nodes)(group, tree, by_count=by_count)
    is_certain = tree.is_chain and not by_count
    return nodes, [0.0 if is_certain else float(np.log(passing / len(group))) for _, _, passing in nodes]
