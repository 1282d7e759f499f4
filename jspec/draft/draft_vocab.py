"""Reduced draft vocabularies: a drafter that uses the target's output head multiplies by some of its rows only.

Most tokens of a text are among the frequent ones (FR-Spec, arXiv:2502.14856), and the output head is the largest weight
that drafting reads. Verification uses the whole vocabulary, so the output's distribution is unchanged: a token outside
of the draft vocabulary is never drafted, and has the draft probability 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from jspec.core.shorten import short
from jspec.core.tree import Tree
from jspec.draft.head_config import HeadConfig
from pallas_kernels.layers.shard import Shard
from pallas_kernels.layers.weights import Quantized, Weight

DraftVocab = int | str | os.PathLike[str] | ArrayLike | None
EXPECTED = "an int, different token ids, or a .npy or .json file of them"


def check_vocabulary(
    method: str, draft_vocab: DraftVocab, config: HeadConfig, own_head: Weight | None, tree: Tree
) -> Int[np.ndarray, "draft_vocab"] | None:
    """Check the draft vocabulary of a head, and return the target ids of a reduced one; None: it is not reduced.

    Args:
        method: name of the drafter, for the errors.
        draft_vocab: argument of `read_draft_vocab`.
        config: config of the head.
        own_head: the head's own output head; None: it uses the target's.
        tree: draft tree.

    Raises:
        ValueError: ``draft_vocab`` is given for a head with an output head of its own, is refused by
            `read_draft_vocab`, or has fewer tokens than a node of the tree has children.
    """
    ids = None if draft_vocab is None else read_draft_vocab(method, draft_vocab, config.vocab_size)
    if ids is not None and own_head is not None:
        raise ValueError(
            f"{method}: draft_vocab: expected a head that uses the target's output head, got one with an output head "
            f"of its own for {own_head.shape[0]} tokens; leave draft_vocab out"
        )
    size = config.draft_vocab_size if ids is None else len(ids)
    if tree.branching > size:
        raise ValueError(
            f"{method}: {tree} needs {tree.branching} children of a node, the draft vocabulary has {size} tokens; "
            "take a narrower tree"
        )
    return None if size == config.vocab_size else ids


def read_draft_vocab(method: str, draft_vocab: Any, vocab: int) -> Int[np.ndarray, "draft_vocab"]:
    """Return the target ids of a reduced draft vocabulary in ascending order.

    Args:
        method: name of the drafter, for the errors.
        draft_vocab: token ids in any order; a file of them (a .npy array or a .json list); or a number N, which stands
            for the ids from 0 to N - 1. The first ids are the frequent tokens if ids follow frequency, as in byte-pair
            encoding, which learns its merges in about this order; `frequent_tokens` is better.
        vocab: size of the target's vocabulary.

    Raises:
        ValueError: an id is repeated or outside of the target's vocabulary, the number is outside of it, or the value
            is something else.
        FileNotFoundError: the file does not exist.
    """
    place = f"{method}: draft_vocab"
    if isinstance(draft_vocab, str | os.PathLike):
        draft_vocab = _read_file(place, Path(draft_vocab))
    if isinstance(draft_vocab, int) and not isinstance(draft_vocab, bool):
        if not 1 <= draft_vocab <= vocab:
            raise ValueError(f"{place}: expected 1 to {vocab}, the target's vocabulary, got {short(draft_vocab)}")
        draft_vocab = np.arange(draft_vocab)
    try:
        ids = np.asarray(draft_vocab)
    except ValueError:
        ids = np.empty(0)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{place}: expected {EXPECTED}, got {short(draft_vocab)}")
    if (outside := ids[(ids < 0) | (ids >= vocab)]).size:
        raise ValueError(f"{place}: expected ids from 0 to {vocab - 1}, those of the target, got {outside[0]}")
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        raise ValueError(f"{place}: expected different ids, got {distinct[counts > 1][0]} more than once; remove it")
    return distinct.astype(np.int32)


def _read_file(place: str, path: Path) -> Any:
    readers = {".npy": lambda: np.load(path, allow_pickle=False), ".json": lambda: json.loads(path.read_text("utf-8"))}
    if path.suffix not in readers:
        raise ValueError(f"{place}: expected {EXPECTED}, got {short(str(path))}")
    try:
        return readers[path.suffix]()
    except (ValueError, EOFError) as error:
        raise ValueError(f"{place}: {path}: expected token ids, got a damaged file ({error})") from None


@jax.jit
def reduced_head(
    weight: Weight, ids: Int[Array | np.ndarray, "draft_vocab"]
) -> tuple[Weight, Int[Array, "draft_vocab"]]:
    """Return the rows of an output head that belong to a reduced vocabulary, and the target id of each row.

    Args:
        weight: the target's output head [vocab, hidden].
        ids: target ids of the reduced vocabulary.
    """
    assert not isinstance(weight, Shard), "weights are parts of devices only inside of a step"
    index = jnp.asarray(ids)
    return weight.rows(index) if isinstance(weight, Quantized) else weight[index], index


def frequent_tokens(
    texts: Iterable[str | Sequence[int]], size: int, *, tokenizer: Any = None, always: Sequence[int] = ()
) -> np.ndarray:
    """Return the ids of the most frequent tokens of texts in ascending order, for ``draft_vocab``.

    Texts that the target wrote are best, because it is the target's tokens that a drafter must guess.

    Args:
        texts: texts, or their token ids.
        size: number of ids. If the texts have fewer different tokens, the smallest ids that they lack are added; of
            equally frequent tokens, the smaller id is chosen.
        tokenizer: the target's tokenizer, with a method ``encode`` that returns ids, such as `Engine.tokenizer`; needed
            for texts that are no ids.
        always: ids that are chosen however rare they are, such as those that end texts.

    Raises:
        ValueError: the size is below 1, there are no tokens, or a text needs a tokenizer and none is given.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"frequent_tokens: size: expected an int from 1, got {short(size)}")
    counts = np.zeros(size, np.int64)
    for text in [texts] if isinstance(texts, str) else texts:
        if isinstance(text, str) and tokenizer is None:
            raise ValueError("frequent_tokens: tokenizer: expected the target's, because a text is not ids, got None")
        ids = np.asarray(tokenizer.encode(text) if isinstance(text, str) else text, np.int64)
        new_counts = np.bincount(ids, minlength=len(counts))
        new_counts[: len(counts)] += counts
        counts = new_counts
    if not counts.any():
        raise ValueError("frequent_tokens: texts: expected at least one token, got none")
    counts = np.pad(counts, (0, max(0, max(always, default=0) + 1 - len(counts))))
    counts[list(always)] = np.iinfo(np.int64).max
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
