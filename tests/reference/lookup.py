"""The trees of n-gram and suffix drafting, found by searching lists of tokens without arrays or tries."""

from __future__ import annotations

import numpy as np

from jspec import Tree
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix

Tail = tuple[int, list[int]]  # number of a match (0 is the best) and the rest of its continuation
Node = tuple[int, int, int]  # parent, token, number of matches through the node


def length_at(text: list[int], end: int, query: list[int]) -> int:
    """Count the query's tokens, newest first, that equal the text's tokens from ``end`` backwards."""
    length = 0
    while length < len(query) and end >= length and text[end - length] == query[length]:
        length += 1
    return length


def tails(texts: list[list[int]], own: int, drafter: NGram | Suffix, count: int) -> list[Tail]:
    """Return what follows the best matches of the end of ``texts[own]``; texts are ordered from oldest to newest."""
    query = texts[own][::-1][: drafter.max_n]
    found = [
        (length, number == own, number, end)
        for number, text in enumerate(texts)
        for end in range(len(text) - 1)
        if (length := length_at(text, end, query)) >= drafter.min_n
    ]
    best = sorted(found, reverse=True)[:count]
    return [(place, texts[number][end + 1 :]) for place, (_, _, number, end) in enumerate(best)]


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


def expected_nodes(texts: list[list[int]], own: int, drafter: NGram | Suffix) -> tuple[list[Node], list[float]]:
    """Return the nodes after the root, and their scores."""
    tree, by_count = drafter.tree, isinstance(drafter, Suffix)
    leaves = 0 if tree.paths is None else len(set(tree.paths) - {path[:-1] for path in tree.paths})
    count = max(4 * (leaves + tree.k), tree.depth, -(-(tree.nodes - 1) // tree.depth))
    group = tails(texts, own, drafter, count)
    nodes = (dynamic_nodes if tree.paths is None else static_nodes)(group, tree, by_count=by_count)
    is_certain = tree.is_chain and not by_count
    return nodes, [0.0 if is_certain else float(np.log(passing / len(group))) for _, _, passing in nodes]
