"""Shapes of draft trees, which are known when a program is traced.

Node 0 of a tree is the root, and the parent of node i > 0 is a node below i. In a chain, the parent of node i is node
i - 1. Plain decoding uses a tree with the root alone.

The nodes of a static tree are named by paths of ranks: node (2, 0) is the best child of the root's third best child. A
dynamic tree (EAGLE-2, arXiv:2406.16858) has a fixed number of nodes; in every step the drafter's scores decide which
candidates become nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jspec.core.shorten import short

MAX_ROWS = 256  # largest number of cache rows that one step may write: an ancestor mask has one bit per row

TREE_FORMS = "chain:LENGTH, topk:NODES,DEPTH,K or static:0,1,0.0,0.1 (paths, ranks joined by dots)"

Path = tuple[int, ...]


class TreeLevel(NamedTuple):
    """The nodes at one depth of a static tree; ``parents`` and ``fed_parents`` are empty for the root's level."""

    nodes: list[int]  # node ids
    ranks: list[int]  # rank of each node among its parent's candidates
    parents: list[int]  # index of each node's parent in the level above
    fed_parents: list[int]  # index of each node's parent among the nodes with children in the level above
    with_children: list[int]  # indices of the nodes with children within this level

    @property
    def num_parents(self) -> int:
        """Number of nodes with children in the level above."""
        return max(self.fed_parents) + 1


@dataclass(frozen=True)
class Tree:
    """The shape of a drafter's tree; `chain`, `static` and `topk` make one.

    Attributes:
        nodes: number of nodes, the root included; the target's forward pass has one token per node in each row.
        depth: depth of the deepest node; the root has depth 0. A step emits at most ``depth + 1`` tokens per row.
        paths: path of each node except the root, sorted by length, then by values; None for a dynamic tree.
        k: in a dynamic tree, the number of children per node, and of nodes per level that the drafter expands; 0 for a
            static tree.
        base: of a joined tree, the tree that the chain joins; None: the tree is not joined.
        length: of a joined tree, the number of tokens of this chain.
    """

    nodes: int
    depth: int
    paths: tuple[Path, ...] | None
    k: int = 0
    base: Tree | None = None
    length: int = 0

    def __post_init__(self) -> None:
        if self.nodes > MAX_ROWS or self.draft_rows > MAX_ROWS:
            raise ValueError(
                f"Tree: expected at most {MAX_ROWS} nodes, and at most {MAX_ROWS} cache rows that drafting writes (for "
                f"topk 1 + k * (depth - 1)), got {short(self.nodes)} and {short(self.draft_rows)}; take a smaller tree"
            )

    @classmethod
    def chain(cls, length: int) -> Tree:
        """Make a chain with ``length`` draft nodes after the root.

        Raises:
            ValueError: length is below 1 (for plain decoding use ``drafter=None``) or above 255.
        """
        if not _is_int(length) or length < 1:
            remedy = "for plain decoding pass drafter=None" if _is_int(length) else "give an int"
            raise ValueError(f"Tree.chain: expected an int length >= 1, got {short(length)}; {remedy}")
        if length >= MAX_ROWS:  # checked here too, because the paths of a long chain would fill the memory
            raise ValueError(
                f"Tree.chain: expected at most {MAX_ROWS} nodes with the root, got length {short(length)}; take a "
                "smaller tree"
            )
        return cls(nodes=length + 1, depth=length, paths=tuple((0,) * n for n in range(1, length + 1)))

    @classmethod
    def static(cls, paths: Iterable[Sequence[int]]) -> Tree:
        """Make a static tree that has one node for each path.

        Args:
            paths: paths in any order. A path lists the ranks of the nodes from the root down; the best child has
                rank 0.

        Raises:
            ValueError: there are no paths; a path is repeated or empty, or has a negative rank; or a node's parent is
                missing.
        """
        try:
            tuples = [tuple(operator.index(rank) for rank in path) for path in paths]
        except TypeError:
            raise ValueError(
                f"Tree.static: expected paths of ints such as [(0,), (0, 1)], got {short(paths)}"
            ) from None
        known = set(tuples)
        if not tuples or len(known) < len(tuples) or () in known or any(rank < 0 for path in tuples for rank in path):
            raise ValueError(f"Tree.static: expected different, non-empty paths of ranks >= 0, got {short(tuples)}")
        for path in tuples:
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"Tree.static: expected the parent {short(path[:-1])} of {short(path)}; add that path")
        if max(map(max, tuples)) >= 2**31:
            raise ValueError(f"Tree.static: expected ranks below 2**31, got {short(tuples)}")
        ordered = tuple(sorted(tuples, key=lambda path: (len(path), path)))
        return cls(nodes=len(ordered) + 1, depth=len(ordered[-1]), paths=ordered)

    @classmethod
    def topk(cls, nodes: int, depth: int, k: int) -> Tree:
        """Make a dynamic tree as in EAGLE-2 (arXiv:2406.16858).

        The drafter scores ``k + (depth - 1) * k * k`` candidates; the best ``nodes - 1`` of them become nodes.

        Args:
            nodes: number of nodes, the root included (total_token in the authors' code).
            depth: depth of the deepest level (depth + 1 in the authors' code).
            k: number of children per node, and of nodes per level that the drafter expands.

        Raises:
            ValueError: a size is below 1, or there are fewer candidates than nodes.
        """
        if not all(_is_int(size) for size in (nodes, depth, k)) or min(nodes - 1, depth, k) < 1:
            raise ValueError(
                f"Tree.topk: expected nodes >= 2, depth >= 1, k >= 1, got {short(nodes)}, {short(depth)}, {short(k)}"
            )
        candidates = k + (depth - 1) * k * k
        if nodes - 1 > candidates:
            raise ValueError(
                f"Tree.topk: expected at most {candidates + 1} nodes, because {nodes} nodes need {nodes - 1} "
                f"candidates; depth {depth} and k {k} give {candidates}"
            )
        return cls(nodes=nodes, depth=depth, paths=None, k=k)

    def joined(self, length: int, nodes: int | None = None) -> Tree:
        """Return this tree with a chain of up to ``length`` tokens, whose beginning may be any path of this tree.

        It is dynamic: each row's tokens decide which node the chain's other tokens, numbered after this tree's nodes,
        are attached to.

        Args:
            nodes: largest number of nodes, the root included, which the scores choose among all; None: all.
        """
        count = self.nodes + length if nodes is None else min(nodes, self.nodes + length)
        depth = min(max(self.depth, length), count - 1)
        return Tree(count, depth, paths=None, k=self.branching, base=self, length=length)

    @classmethod
    def parse(cls, text: str) -> Tree:
        """Make the tree that a text describes: ``chain:4``, ``topk:60,8,10`` (nodes, depth, k) or ``static:0,1,0.0``.

        Raises:
            TypeError: the argument is no text.
            ValueError: the text has none of these three forms.
        """
        if not isinstance(text, str):
            raise TypeError(f"tree: expected a text, {TREE_FORMS}, got {short(text)}")
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
        raise ValueError(f"tree: expected {TREE_FORMS}, got {short(text)}")

    def cut(self, depth: int) -> Tree:
        """Return this tree cut to a smaller depth.

        A static tree loses its deeper nodes. The number of nodes of a dynamic tree shrinks in proportion to the depth.
        A joined tree is that of its cut parts, with no more nodes than before.

        Raises:
            ValueError: the depth is outside ``[0, self.depth]``.
        """
        if not 0 <= depth <= self.depth:
            raise ValueError(f"Tree.cut: expected a depth from 0 to {self.depth}, that of {self}, got {depth}")
        if depth == self.depth:
            return self
        if depth == 0:
            return ROOT_ONLY
        if self.base is not None:
            return self.base.cut(min(depth, self.base.depth)).joined(min(depth, self.length), self.nodes)
        if self.paths is None:
            nodes = 1 + -(-(self.nodes - 1) * depth // self.depth)
            return Tree.topk(min(nodes, 1 + self.k + (depth - 1) * self.k**2), depth, self.k)
        paths = tuple(path for path in self.paths if len(path) <= depth)
        return Tree(nodes=len(paths) + 1, depth=depth, paths=paths)

    def __str__(self) -> str:
        """Return the text that `parse` reads to make this tree; "none" for the tree with the root alone.

        That of a joined tree names its parts, and `parse` does not read it.
        """
        if self.base is not None:
            limit = f", {self.nodes} nodes" if self.nodes < self.base.nodes + self.length else ""
            return f"{self.base} beside chain:{self.length}{limit}"
        if self.paths is None:
            return f"topk:{self.nodes},{self.depth},{self.k}"
        if self.is_chain and not any(self.ranks):
            return f"chain:{self.depth}" if self.depth else "none"
        return "static:" + ",".join(".".join(map(str, path)) for path in self.paths)

    @property
    def is_chain(self) -> bool:
        """Return whether the parent of every node i is node i - 1; accepted cache rows of a chain are not moved."""
        return self.paths is not None and self.nodes == self.depth + 1

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node of a static tree; -1 for the root."""
        index = {(): 0} | {path: node for node, path in enumerate(self._static_paths, 1)}
        return (-1, *(index[path[:-1]] for path in self._static_paths))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node of a static tree among its parent's candidates; 0 for the root."""
        return (0, *(path[-1] for path in self._static_paths))

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """The levels of a static tree, from the root's level down."""
        depths = [0, *(len(path) for path in self._static_paths)]
        levels: list[TreeLevel] = []
        for depth in range(self.depth + 1):
            nodes = [node for node, node_depth in enumerate(depths) if node_depth == depth]
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
        """Nodes of a static tree that have children, in ascending order; the drafter is fed with these nodes."""
        return tuple(sorted(set(self.parents[1:])))

    @property
    def branching(self) -> int:
        """Number of candidates to draft as children of each node; in a static tree, the largest rank + 1."""
        return self.k if self.paths is None else max(self.ranks) + 1

    @property
    def draft_rows(self) -> int:
        """Number of cache rows that a draft model writes for this tree, including the root's row."""
        if self.base is not None:
            return self.base.draft_rows
        return 1 + self.k * (self.depth - 1) if self.paths is None else max(len(self.fed), 1)

    @property
    def scratch_rows(self) -> int:
        """Number of cache rows that a step may write after the committed rows, in any pool of target or drafter."""
        return max(self.nodes, self.draft_rows)

    @property
    def _static_paths(self) -> tuple[Path, ...]:
        if self.paths is None:
            raise NotImplementedError(f"expected a chain or a static tree, got {self}; use Tree.chain or Tree.static")
        return self.paths


def tree_of(owner: str, tree: Any) -> Tree:
    """Return a tree, or the tree that a text such as "chain:4" describes.

    Args:
        owner: name of the drafter, for the error.
        tree: a `Tree`, or a text that `Tree.parse` reads.

    Raises:
        TypeError: the value is neither.
        ValueError: the text describes no tree.
    """
    if isinstance(tree, Tree):
        return tree
    if isinstance(tree, str):
        return Tree.parse(tree)
    remedy = f"; pass Tree.chain({tree})" if _is_int(tree) and 1 <= tree < MAX_ROWS else ""
    raise TypeError(f'{owner}: tree: expected a Tree or a text such as "chain:4", got {short(tree)}{remedy}')


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


ROOT_ONLY = Tree(nodes=1, depth=0, paths=())
DEFAULT_TREE = Tree.chain(5)  # of every drafter that is made without a tree
