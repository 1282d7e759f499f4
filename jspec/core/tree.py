"""Shapes of draft trees, known when a program is traced.

A chain is the tree whose parents are ``i - 1``; plain decoding is the tree of one node, the root. Node 0 is always the
root, and ``parents[i] < i``.

A static tree names its nodes by paths of ranks: node (2, 0) is the best child of the root's third best child. A dynamic
tree (EAGLE-2, arXiv:2406.16858) has a fixed number of nodes; in every step the drafter's scores decide which candidates
become nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MAX_ROWS = 256  # cache rows that one step may write: the number of bits in an ancestor mask's words

TREE_FORMS = "chain:LENGTH, topk:NODES,DEPTH,K or static:0,1,0.0,0.1 (paths, ranks joined by dots)"

Path = tuple[int, ...]


class TreeLevel(NamedTuple):
    """The nodes of one level of a static tree; ``parents`` and ``fed_parents`` are empty for the root's level."""

    nodes: list[int]  # node ids
    ranks: list[int]  # rank of each node among its parent's candidates
    parents: list[int]  # index of each node's parent in the level above
    fed_parents: list[int]  # index of each node's parent among those nodes of the level above that have children
    with_children: list[int]  # indices in this level of the nodes with children

    @property
    def num_parents(self) -> int:
        """Number of nodes in the level above that have children."""
        return max(self.fed_parents) + 1


@dataclass(frozen=True)
class Tree:
    """The static shape of a drafter's tree; made by `chain`, `static` or `topk`.

    Attributes:
        nodes: number of nodes, the root included (N); the target's forward pass has that many tokens per row.
        depth: depth of the deepest node (D), the root being at depth 0; a step emits at most ``depth + 1`` tokens.
        paths: path of each node but the root, sorted by length, then by values; None for a dynamic tree.
        k: children per node, and nodes per level that are fed to the drafter, in a dynamic tree; 0 for a static tree.
    """

    nodes: int
    depth: int
    paths: tuple[Path, ...] | None
    k: int = 0

    def __post_init__(self) -> None:
        if self.nodes > MAX_ROWS or self.draft_rows > MAX_ROWS:
            raise ValueError(
                f"Tree: expected at most {MAX_ROWS} nodes, and as many rows 1 + k * (depth - 1) that drafting writes; "
                f"got {self.nodes} and {self.draft_rows}; take a smaller tree"
            )

    @classmethod
    def chain(cls, length: int) -> Tree:
        """Make a chain of ``length`` draft tokens after the root.

        Raises:
            ValueError: length < 1 (for plain decoding use ``drafter=None``).
        """
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"Tree.chain: expected length >= 1, got {length!r}; for plain decoding pass drafter=None")
        return cls(nodes=length + 1, depth=length, paths=tuple((0,) * n for n in range(1, length + 1)))

    @classmethod
    def static(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Make the tree with a node for each path; a path lists the ranks from the root down, 0 for the best child.

        Args:
            paths: paths in any order.

        Raises:
            ValueError: there are no paths, or a path is repeated or empty, has a negative rank, or has no parent path.
        """
        try:
            given = [tuple(operator.index(rank) for rank in path) for path in paths]
        except TypeError:
            raise ValueError(f"Tree.static: expected paths of ints such as [(0,), (0, 1)], got {paths!r}") from None
        known = set(given)
        if not given or len(known) < len(given) or () in known or any(rank < 0 for path in given for rank in path):
            raise ValueError(f"Tree.static: expected different, non-empty paths of ranks >= 0, got {given}")
        for path in given:
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"Tree.static: {path} needs its parent {path[:-1]}; add that path")
        ordered = tuple(sorted(given, key=lambda path: (len(path), path)))
        return cls(nodes=len(ordered) + 1, depth=len(ordered[-1]), paths=ordered)

    @classmethod
    def topk(cls, nodes: int, depth: int, k: int) -> Tree:
        """Make EAGLE-2's dynamic tree: of ``k + (depth - 1) * k * k`` candidates the best ``nodes - 1`` are verified.

        Args:
            nodes: number of nodes, the root included (the authors' total_token).
            depth: depth of the deepest level (the authors' depth + 1).
            k: children per node, and nodes per level that are fed to the drafter.

        Raises:
            ValueError: sizes below 1, or fewer candidates than nodes.
        """
        if not all(isinstance(size, int) for size in (nodes, depth, k)) or min(nodes - 1, depth, k) < 1:
            raise ValueError(f"Tree.topk: expected nodes >= 2, depth >= 1, k >= 1, got {nodes!r}, {depth!r}, {k!r}")
        candidates = k + (depth - 1) * k * k
        if nodes - 1 > candidates:
            raise ValueError(
                f"Tree.topk: {nodes} nodes need {nodes - 1} candidates; depth {depth} and k {k} give {candidates}: "
                f"take at most {candidates + 1} nodes"
            )
        return cls(nodes=nodes, depth=depth, paths=None, k=k)

    @classmethod
    def parse(cls, text: str) -> Tree:
        """Make the tree that a text describes: ``chain:4``, ``topk:60,8,10`` (nodes, depth, k), ``static:0,1,0.0``.

        Raises:
            ValueError: the text has another form.
        """
        kind, _, sizes = text.partition(":")
        try:
            paths = [tuple(int(rank) for rank in path.split(".")) for path in sizes.split(",")]
        except ValueError:
            paths = []
        plain = [path[0] for path in paths if len(path) == 1]
        if kind == "static" and paths:
            return cls.static(paths)
        if kind == "chain" and len(paths) == len(plain) == 1:
            return cls.chain(*plain)
        if kind == "topk" and len(paths) == len(plain) == 3:
            return cls.topk(*plain)
        raise ValueError(f"tree: expected {TREE_FORMS}, got {text!r}")

    def cut(self, depth: int) -> Tree:
        """Return this tree without the nodes below a depth; a dynamic tree keeps nodes in proportion to the depth.

        Raises:
            ValueError: the depth is outside ``[0, self.depth]``.
        """
        if not 0 <= depth <= self.depth:
            raise ValueError(f"Tree.cut: expected a depth from 0 to {self.depth}, that of {self}, got {depth}")
        if depth == self.depth:
            return self
        if depth == 0:
            return ROOT_ONLY
        if self.paths is None:
            nodes = 1 + -(-(self.nodes - 1) * depth // self.depth)
            return Tree.topk(min(nodes, 1 + self.k + (depth - 1) * self.k**2), depth, self.k)
        paths = tuple(path for path in self.paths if len(path) <= depth)
        return Tree(nodes=len(paths) + 1, depth=depth, paths=paths)

    def __str__(self) -> str:
        """The text that `parse` reads; "none" for the tree of the root alone."""
        if self.paths is None:
            return f"topk:{self.nodes},{self.depth},{self.k}"
        if self.is_chain and not any(self.ranks):
            return f"chain:{self.depth}" if self.depth else "none"
        return "static:" + ",".join(".".join(map(str, path)) for path in self.paths)

    @property
    def is_chain(self) -> bool:
        """Whether the parent of every node i is ``i - 1``; then accepted cache rows need no move."""
        return self.paths is not None and self.nodes == self.depth + 1

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node of a static tree, -1 for the root."""
        index = {(): 0} | {path: node for node, path in enumerate(self._static_paths, 1)}
        return (-1, *(index[path[:-1]] for path in self._static_paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node of a static tree among its parent's candidates; 0 for the root."""
        return (0, *(path[-1] for path in self._static_paths))

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """The levels of a static tree, from the root down."""
        depths = [0, *(len(path) for path in self._static_paths)]
        levels: list[TreeLevel] = []
        for depth in range(self.depth + 1):
            nodes = [node for node, own in enumerate(depths) if own == depth]
            previous = levels[-1].nodes if levels else []
            fed = [node for node in previous if node in self.fed]
            levels.append(
                TreeLevel(
                    nodes,
                    ranks=[self.ranks[node] for node in nodes],
                    parents=[previous.index(self.parents[node]) for node in nodes if depth],
                    fed_parents=[fed.index(self.parents[node]) for node in nodes if depth],
                    with_children=[index for index, node in enumerate(nodes) if node in self.fed],
                )
            )
        return tuple(levels)

    @cached_property
    def fed(self) -> tuple[int, ...]:
        """Nodes of a static tree that are fed to a drafter: those with children, level by level."""
        return tuple(sorted(set(self.parents[1:])))

    @property
    def branching(self) -> int:
        """Number of child candidates to draft per node: ``k``, or the largest rank in a static tree + 1."""
        return self.k if self.paths is None else max(self.ranks) + 1

    @property
    def draft_rows(self) -> int:
        """Number of cache rows that a draft model writes for this tree, the root's included."""
        return 1 + self.k * (self.depth - 1) if self.paths is None else max(len(self.fed), 1)

    @property
    def scratch_rows(self) -> int:
        """Number of cache rows that a step may write after the committed rows, in the target's or the draft's pool."""
        return max(self.nodes, self.draft_rows)

    @property
    def _static_paths(self) -> tuple[Path, ...]:
        if self.paths is None:
            raise NotImplementedError(f"expected a chain or a static tree, got {self}; use Tree.chain or Tree.static")
        return self.paths


ROOT_ONLY = Tree(nodes=1, depth=0, paths=())
