"""The target that a bench serves, and what drafts for it: folders, hub ids, or the embedded pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert import hub
from jspec.core.tree import Tree
from jspec.draft import auto
from jspec.draft.base import Drafter
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix
from jspec.engine.api import Engine
from jspec.engine.tokenizer import Tokenizer
from jspec.models.decoder import Model
from jspec.tools import check_head, demo


@dataclass(frozen=True)
class Pair:
    """A target, loaded once, that engines with any tree share.

    Attributes:
        draft: a folder or a hub id of an EAGLE head, Medusa heads or a draft model, or "ngram", or "suffix"; None: only
            plain decoding.
        dtype: of the weights; None: float32 on CPU, bfloat16 elsewhere.
    """

    target: Model
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    draft: str | None
    dtype: str | None

    @classmethod
    def load(
        cls, target: str | Path, draft: str | None = None, *, tokenizer: str | None = None, dtype: str | None = None
    ) -> Pair:
        """Load the target.

        Args:
            target: a folder or a hub id; that of `demo.TARGET` has a head and a tokenizer of its own.
            tokenizer: "bytes" for byte-level models; None: the target folder's.
        """
        if str(target) == str(demo.TARGET):
            draft, tokenizer = draft or str(demo.HEAD), tokenizer or "bytes"
        model, words = check_head.load_target(target, tokenizer, dtype=dtype)
        return cls(model, words, hub.eos_ids(hub.find(target)), draft, dtype)

    def engine(self, draft: Tree | Drafter | None, **options: Any) -> Engine:
        """An engine that drafts so; None is plain decoding."""
        drafter = self.drafter(draft) if isinstance(draft, Tree) else draft
        return Engine(self.target, drafter=drafter, tokenizer=self.tokenizer, eos_ids=self.eos_ids, **options)

    def drafters(self, trees: Iterable[Tree | None]) -> dict[Tree | None, Drafter | None]:
        """Who drafts each tree; what does not fit raises here, before anything was run."""
        return {tree: None if tree is None else self.drafter(tree) for tree in trees}

    def drafter(self, tree: Tree) -> Drafter:
        """Who drafts such a tree.

        Raises:
            ValueError: nobody.
        """
        match self.draft:
            case None:
                raise ValueError(f"--tree {tree}: expected --draft, who drafts it, got none; name one, or --tree none")
            case "ngram":
                return NGram(tree)
            case "suffix":
                return Suffix(tree)
            case path:
                return auto.load_drafter(path, tree=tree, dtype=self.dtype)
