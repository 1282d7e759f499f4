"""Shapes of draft trees: which node hangs under which, known when a program is traced.

A chain is the tree whose parents are ``i - 1``; no drafting at all is the tree of one node, the root.
Node 0 is always the root, and ``parents[i] < i``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tree:
    """The static shape of a drafter's tree.

    Attributes:
        nodes: nodes including the root (N); what one verification forward is wide.
        depth: the deepest draft level (D); a round yields at most ``depth + 1`` tokens.
        is_chain: parents are ``i - 1``; then accepted rows are already in place in the cache.
    """

    nodes: int
    depth: int
    is_chain: bool = True

    def __post_init__(self) -> None:
        if self.depth < 0 or self.nodes <= self.depth:
            raise ValueError(f"Tree: expected depth >= 0 and nodes > depth, got nodes={self.nodes}, depth={self.depth}")
        if self.is_chain and self.nodes != self.depth + 1:
            raise ValueError(
                f"Tree: a chain has depth + 1 nodes, got nodes={self.nodes}, depth={self.depth}; use Tree.chain(length)"
            )

    @classmethod
    def chain(cls, length: int) -> Tree:
        """A chain of ``length`` draft tokens behind the root.

        Raises:
            ValueError: length < 1 (for no drafting use ``drafter=None``).
        """
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"Tree.chain: expected length >= 1, got {length!r}; for plain decoding pass drafter=None")
        return cls(nodes=length + 1, depth=length)

    @property
    def scratch_rows(self) -> int:
        """Cache rows beyond the committed ones that a round may write, in either pool."""
        return self.nodes


ROOT_ONLY = Tree(nodes=1, depth=0)
