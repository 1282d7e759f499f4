"""Target and drafter of the bench commands that run whole engines, and reading of prompt files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
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
from jspec.tools.bench.report import option

PROMPT_FIELDS = "turns (a list of texts, of which the first is taken), prompt (a text) or question (a text)"
TARGET_OPTIONS = (
    option("--target", default=demo.TARGET, metavar="PATH", help="folder or hub id; the embedded one if left out"),
    option("--tokenizer", help='"bytes" for byte-level models; the folder\'s own if left out'),
    option("--dtype", help="dtype of the weights; float32 on CPU, bfloat16 elsewhere, if left out"),
)
OPTIONS = (
    *TARGET_OPTIONS,
    option("--draft", metavar="PATH", help="EAGLE head, Medusa heads, draft model, ngram or suffix; the embedded head"),
)
ENGINE_OPTIONS = (
    option("--slots", type=int, default=32, help="requests that run at once"),
    option("--page-size", type=int, default=16),
    option("--prefill-budget", type=int, help="prompt tokens between two steps"),
)


@dataclass(frozen=True)
class Pair:
    """A target, loaded once for several engines, and the source of its drafters."""

    target: Model
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    draft: str | None  # folder or hub id, "ngram" or "suffix"; None: plain decoding only
    dtype: str | None  # dtype of the weights; None: float32 on CPU, bfloat16 elsewhere

    @classmethod
    def load(
        cls, target: str | Path, draft: str | None = None, *, tokenizer: str | None = None, dtype: str | None = None
    ) -> Pair:
        """Load the target and its tokenizer; the embedded target `demo.TARGET` has a default head and tokenizer."""
        if str(target) == str(demo.TARGET):
            draft, tokenizer = draft or str(demo.HEAD), tokenizer or "bytes"
        model, words = check_head.load_target(target, tokenizer, dtype=dtype)
        return cls(model, words, hub.eos_ids(hub.find(target)), draft, dtype)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Pair:
        """Load the target and drafter that the parsed command line (`OPTIONS`) names."""
        draft = getattr(arguments, "draft", None)
        return cls.load(arguments.target, draft, tokenizer=arguments.tokenizer, dtype=arguments.dtype)

    def engine(self, drafter: Drafter | None, **options: Any) -> Engine:
        return Engine(self.target, drafter=drafter, tokenizer=self.tokenizer, eos_ids=self.eos_ids, **options)

    def drafter(self, tree: Tree | None) -> Drafter | None:
        """Return a new drafter for a draft tree; None, which is plain decoding, if there is no tree."""
        if tree is None:
            return None
        if self.draft is None:
            raise ValueError(f"--tree {tree}: expected --draft, who drafts it, got none; name one, or --tree none")
        own = {"ngram": NGram, "suffix": Suffix}.get(self.draft)
        return own(tree) if own else auto.load_drafter(self.draft, tree=tree, dtype=self.dtype)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return keyword arguments of `Engine` from the parsed command line (`ENGINE_OPTIONS`)."""
    return {name: getattr(arguments, name) for name in ("slots", "page_size", "prefill_budget")}


def read_prompts(path: Path, count: int | None = None) -> list[str]:
    """Read the first ``count`` prompts of a file with one JSON object a line; all prompts if None."""
    found = []
    for where, record in records(path):
        match record:
            case {"turns": [str(text), *_]} | {"prompt": str(text)} | {"question": str(text)}:
                found.append(text)
            case _:
                got = ", ".join(record) or "no field"
                raise ValueError(f"{where}: expected the field {PROMPT_FIELDS}, got {got}")
    if count is not None and len(found) < count:
        raise ValueError(f"{path}: expected {count} prompts, got {len(found)}; ask for no more")
    return found[:count]


def records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each JSON object of a file, after a text for error messages that names its line."""
    is_empty = True
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            where, is_empty = f"{path}, line {number}", False
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: expected a JSON object, got {line[:60]!r} ({error})") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: expected a JSON object, got {line[:60]!r}")
            yield where, record
    if is_empty:
        raise ValueError(f"{path}: expected a JSON object a line, got an empty file")
