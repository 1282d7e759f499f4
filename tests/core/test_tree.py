"""Test the shapes of trees: valid arguments, and the order of nodes, levels and nodes fed to the drafter."""

from __future__ import annotations

from typing import Any

import pytest

from jspec import Tree

BUSHY = [(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 1)]  # with a gap: (0, 1) is missing


def test_tree_that_is_a_chain_has_the_previous_node_as_each_parent() -> None:
    tree = Tree.chain(3)
    assert (tree.nodes, tree.depth, tree.is_chain, tree.parents) == (4, 3, True, (-1, 0, 1, 2))
    assert tree == Tree.static([(0, 0), (0,), (0, 0, 0)])


def test_static_tree_of_unsorted_paths_sorts_them_by_length_then_ranks() -> None:
    tree = Tree.static(reversed(BUSHY))
    assert tree.paths == tuple(BUSHY)
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 4)
    assert tree.ranks == (0, 0, 1, 0, 2, 0, 1)
    assert [level.nodes for level in tree.levels] == [[0], [1, 2], [3, 4, 5], [6]]
    assert tree.fed == (0, 1, 2, 4)
    assert (tree.nodes, tree.depth, tree.is_chain, tree.branching, tree.scratch_rows) == (7, 3, False, 3, 7)


def test_static_tree_levels_contain_the_indices_of_parents_in_the_level_above() -> None:
    level = Tree.static(BUSHY).levels[3]
    assert level.num_parents == 1
    assert (level.parents, level.fed_parents, level.ranks, level.with_children) == ([1], [0], [1], [])
    level = Tree.static(BUSHY).levels[2]
    assert (level.parents, level.fed_parents, level.with_children) == ([0, 0, 1], [0, 0, 1], [1])
    assert level.num_parents == 2


def test_topk_tree_of_any_size_has_a_draft_row_per_fed_node() -> None:
    """Each node whose token is fed to the drafter needs a row in the draft cache."""
    tree = Tree.topk(60, 8, 10)
    assert (tree.nodes, tree.depth, tree.draft_rows, tree.scratch_rows, tree.is_chain) == (60, 8, 71, 71, False)
    assert Tree.topk(60, 5, 10).scratch_rows == 60


@pytest.mark.parametrize("text", ["chain:4", "topk:60,8,10", "static:0,1,0.0,0.2,1.0,0.2.1"])
def test_tree_parsed_from_a_text_is_written_as_that_text(text: str) -> None:
    assert str(Tree.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "4", "chain", "chain:", "chain:1.2", "star:4", "topk:60,8", "static:", "static:a"]
)
def test_tree_parsed_from_invalid_text_raises(text: str) -> None:
    with pytest.raises(ValueError, match=r"tree: expected chain:LENGTH, topk:NODES,DEPTH,K or static:"):
        Tree.parse(text)


@pytest.mark.parametrize("length", [0, -1, 1.5, None, "4", True])
def test_chain_tree_of_invalid_length_raises(length: Any) -> None:
    remedy = "for plain decoding pass drafter=None" if length in (0, -1) else "give an int"
    with pytest.raises(ValueError) as error:
        Tree.chain(length)
    assert str(error.value) == f"Tree.chain: expected an int length >= 1, got {length!r}; {remedy}"


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "expected different, non-empty paths"),
        ([()], "expected different, non-empty paths"),
        ([(0,), (0,)], "expected different, non-empty paths"),
        ([(-1,)], "expected different, non-empty paths"),
        ([(0,), (1, 0)], r"expected the parent \(1,\) of \(1, 0\); add that path"),
        ([("a",)], "expected paths of ints"),
        (3, "expected paths of ints"),
    ],
)
def test_static_tree_of_invalid_paths_raises(paths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"Tree\.static: {message}"):
        Tree.static(paths)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 2, 2), "expected nodes >= 2"),
        ((4, 0, 2), "expected nodes >= 2, depth >= 1"),
        ((4, 2, 0), "k >= 1, got 4, 2, 0"),
        ((4, 2, 1.0), "k >= 1"),
        ((8, 2, 2), "expected at most 7 nodes, because 8 nodes need 7 candidates; depth 2 and k 2 give 6"),
    ],
)
def test_topk_tree_of_impossible_sizes_raises(sizes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree.topk(*sizes)


@pytest.mark.parametrize("make", [lambda: Tree.chain(256), lambda: Tree.topk(60, 27, 10)])
def test_tree_with_more_than_256_nodes_or_draft_rows_raises(make: Any) -> None:
    with pytest.raises(ValueError, match=r"Tree.*: expected at most 256 nodes.*, got .*; take a smaller tree"):
        make()
    assert Tree.chain(255).nodes == 256
