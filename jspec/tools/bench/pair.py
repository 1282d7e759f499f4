"""Target and drafter of the bench commands that run whole engines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convert import hub
from jspec.core.tree import Tree
from jspec.draft import auto
from jspec.draft.base import Drafter
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead
from jspec.draft.named import LOOKUPS
from jspec.engine.callers.api import Engine
from jspec.engine.text.tokenizer import Tokenizer
from jspec.engine.text.tokenizer_files import eos_ids
from jspec.models import load
from jspec.models.decoder import Model
from jspec.tools import check_head, demo
from jspec.tools.bench import random_models


@dataclass(frozen=True)
class BenchPair:
    """A target, loaded once for several engines, and the source of its drafters."""

    target: Model
    words: Tokenizer | None  # the target's tokenizer; None: it has none
    eos_ids: tuple[int, ...]
    draft: str | None  # folder or hub id, "ngram" or "suffix"; None: plain decoding only
    dtype: str | None  # dtype of the weights; None: float32 on CPU, bfloat16 elsewhere
    head: EagleHead | None = None  # a head with random weights, used if ``draft`` is None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> BenchPair:
        """Load the target that the command line names (`OPTIONS`), else the embedded target and its head.

        ``--shape``, if the command has it, stands for a target and a head with random weights, without a tokenizer.
        """
        target, draft, tokenizer = arguments.target, arguments.draft, arguments.tokenizer
        if shape := getattr(arguments, "shape", None):
            if target is not None:
                raise ValueError(f"--target: expected none with --shape {shape}, got {target}; pass one of them")
            dtype = load.dtype_name(arguments.dtype)
            model, head = random_models.random_target(shape, dtype), random_models.random_head(shape, dtype)
            return cls(model, None, (), draft, dtype, head)
        if target in (None, demo.NAME):
            embedded = {None: demo.HEAD, "dflash": demo.DFLASH}
            target, draft = str(demo.TARGET), str(embedded.get(draft, draft))
        draft = None if draft is None else str(demo.folder(draft, "eagle3"))
        model, words = check_head.load_target(target, tokenizer, dtype=arguments.dtype)
        return cls(model, words, eos_ids(hub.find(target), words, model.config.vocab_size), draft, arguments.dtype)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.words is None:
            raise ValueError("--shape: expected random tokens as prompts, got texts, and no tokenizer; pass a --target")
        return self.words

    def engine(self, drafter: Drafter | None, **options: Any) -> Engine:
        options |= dict(tokenizer=self.words, eos_ids=self.eos_ids)
        return Engine(self.target, drafter=drafter, compile_ahead=True, **options)  # compiles nothing while it is timed

    def drafter(self, tree: Tree | None, quantize: str | None = None) -> Drafter | None:
        """Return a new drafter for a draft tree; without a tree return None, which means plain decoding.

        Args:
            tree: draft tree.
            quantize: how the weights of a drafter that --draft names by its folder are quantised; None: as stored.
        """
        if tree is None:
            return None
        if self.draft is None and self.head is not None:
            return Eagle3(self.head, tree)
        if self.draft is None:
            raise ValueError(f"--tree {tree}: expected --draft, who drafts it, got none; name one, or --tree none")
        factory = LOOKUPS.get(self.draft)
        if factory and quantize:
            raise ValueError(f"--draft-quantize: expected none with --draft {self.draft}, got {quantize}; leave it out")
        return factory(tree) if factory else auto.load_drafter(self.draft, tree, dtype=self.dtype, quantize=quantize)

    def encode(self, texts: Sequence[str], *, chat: bool) -> list[list[int]]:
        """Return the token ids of prompts, laid out by the tokenizer's chat template if ``chat``."""
        words = self.tokenizer
        chats = [[{"role": "user", "content": text}] for text in texts]
        return [list(words.chat(one)) for one in chats] if chat else [list(words.encode(text)) for text in texts]
