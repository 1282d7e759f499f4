"""The material of a run: packed rows to train on, held-out rows, and the draft vocabulary."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

from jspec.draft.draft_vocab import frequent_tokens
from jspec.engine.text.tokenizer import Tokenizer
from jspec.train import pack
from jspec.train.config import TrainConfig
from jspec.train.data import LEAST, Document, check_file, read_documents
from jspec.train.files import write_text
from jspec.train.pack import Corpus, Packed
from jspec.train.rows import Rows
from jspec.train.shapes import DataError

logger = logging.getLogger(__name__)

DRAFT_VOCAB = 32000  # default size of the draft vocabulary
COVERAGE = 0.98  # least share of the counted tokens that the draft vocabulary should have
TRAIN, HELD_OUT, ABOUT = "train", "held_out", "about.json"


@dataclass(frozen=True)
class Material:
    """What a run reads.

    Attributes:
        train: rows to train on.
        held_out: rows to evaluate; None: there are none.
    """

    train: Packed
    held_out: Packed | None

    def describe(self) -> list[str]:
        """Return texts that differ for other material."""
        return [pack.fingerprint(rows) for rows in (self.train, self.held_out) if rows is not None]


def prepare(path: Path, tokenizer: Tokenizer, vocab: int, config: TrainConfig, folder: Path) -> Material:
    """Read and pack the data, or map the files of an earlier call with the same arguments.

    Args:
        path: file of JSON lines.
        tokenizer: the target's tokenizer.
        vocab: size of the target's vocabulary.
        config: options of the run.
        folder: folder for the packed rows.

    Raises:
        DataError: lines are bad, or there are too few documents.
        OSError: there is no such file, or files cannot be written.
    """
    check_file(path)
    about = {"data": str(path.absolute()), "length": config.length, "held_out": config.held_out, "seed": config.seed}
    about |= {"size": path.stat().st_size, "changed": path.stat().st_mtime_ns}
    file = folder / ABOUT
    if not (file.is_file() and json.loads(file.read_text(encoding="utf-8")) == about):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _pack(path, tokenizer, vocab, config, folder)
        write_text(file, json.dumps(about))
    has_held_out = (folder / f"{HELD_OUT}.lines.npy").is_file()
    return Material(pack.load(folder, TRAIN), pack.load(folder, HELD_OUT) if has_held_out else None)


@dataclass
class Divided:
    """Counts the documents that are longer than a row, and tells of them.

    Attributes:
        length: tokens of a row.
        documents: number of documents.
        long: number of those that are longer than a row.
        left_out: number of their tokens in parts that are left out.
    """

    length: int
    documents: int = 0
    long: int = 0
    left_out: int = 0

    def count(self, size: int, left_out: int) -> None:
        """Count a document of a number of tokens, of which some are left out."""
        self.documents += 1
        self.long += size > self.length
        self.left_out += left_out

    def tell(self, path: Path) -> None:
        """Warn of long documents of a file, if it has any."""
        if self.long:
            logger.warning(
                "%s: %d of %d documents are longer than a row of %d tokens and are divided; each part is read without "
                "those before it, and %d tokens are left out, in parts of fewer than %d or of none that counts; a "
                "larger --length divides fewer", path, self.long, self.documents, self.length, self.left_out, LEAST,
            )  # fmt: skip


def _pack(path: Path, tokenizer: Tokenizer, vocab: int, config: TrainConfig, folder: Path) -> None:
    """Read all documents, and pack those to train on and those held out, which are at least one."""
    corpora = {name: Corpus(folder, name) for name in (TRAIN, HELD_OUT)}
    draws, divided = np.random.default_rng(config.seed), Divided(config.length)

    def add(line: int, document: Document, *, is_held_out: bool) -> None:
        left_out = corpora[HELD_OUT if is_held_out else TRAIN].add(line, document, config.length)
        divided.count(len(document.tokens), left_out)

    waiting: tuple[int, Document] | None = None  # the last document is held out if no other was
    for numbered in read_documents(path, tokenizer, vocab):
        if waiting is not None:
            add(*waiting, is_held_out=draws.random() < config.held_out)
        waiting = numbered
    if waiting is not None:
        is_needed = config.held_out > 0 and bool(corpora[TRAIN].sizes) and not corpora[HELD_OUT].sizes
        add(*waiting, is_held_out=is_needed or draws.random() < config.held_out)
    divided.tell(path)
    for name, corpus in corpora.items():
        if corpus.sizes:
            pack.pack(corpus, folder, name, config.length)
        elif name == TRAIN or config.held_out:
            raise DataError(
                f"{path}: expected documents to train on and to hold out ({config.held_out:g} of them), got none of "
                f"the {'former' if name == TRAIN else 'latter'}; give more lines, or another held_out (0: none)"
            )


def draft_vocabulary(
    rows: Packed, size: int | None, vocab: int, always: Sequence[int]
) -> tuple[Integer[np.ndarray, "draft_vocab"], float]:
    """Choose the most frequent of the tokens that count.

    Args:
        rows: packed rows.
        size: number of tokens; None: `DRAFT_VOCAB`, or all of a smaller vocabulary.
        vocab: size of the target's vocabulary.
        always: tokens that are chosen however rare they are.

    Returns:
        Their ids, ascending, and the share of the tokens that count which they are.

    Raises:
        ValueError: the size is larger than the vocabulary, or smaller than the number of tokens that are always chosen.
    """
    if size is not None and not len(always) < size <= vocab:
        raise ValueError(
            f"train: draft_vocab: expected {len(always) + 1} (more than the tokens that end texts) to {vocab}, the "
            f"target's vocabulary, got {size}"
        )
    size = min(vocab, DRAFT_VOCAB) if size is None else size
    if size == vocab:
        return np.arange(vocab, dtype=np.int32), 1.0
    counted = (tokens[counts] for tokens, counts in zip(rows.tokens, rows.counted, strict=True))
    ids = frequent_tokens(counted, size, always=always)
    return ids, coverage_of(rows, ids, vocab)


def coverage_of(rows: Packed, ids: Integer[np.ndarray, "draft_vocab"], vocab: int) -> float:
    """Return the share of the tokens that count which are among some ids; warn if it is below `COVERAGE`."""
    member = np.zeros(vocab, bool)
    member[ids] = True
    known = sum(int(member[tokens[counts]].sum()) for tokens, counts in zip(rows.tokens, rows.counted, strict=True))
    coverage = known / max(1, sum(int(counts.sum()) for counts in rows.counted))
    if coverage < COVERAGE:
        logger.warning(
            "the draft vocabulary of %d tokens has %.1f %% of the tokens that count; a larger draft_vocab drafts the "
            "others too", len(ids), 100 * coverage,
        )  # fmt: skip
    return coverage


def rows_of(packed: Packed, chosen: Integer[np.ndarray, "chosen"], count: int) -> Rows:
    """Return some rows as a batch, with empty rows after them up to a number of rows."""
    more = ((0, count - len(chosen)), (0, 0))

    def field(values: np.ndarray, dtype: Any) -> Any:
        return jnp.asarray(np.pad(values[chosen].astype(dtype), more))

    return Rows(field(packed.tokens, np.int32), field(packed.segments, np.int32), field(packed.counted, bool))
