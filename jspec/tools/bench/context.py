"""Acceptance by context length, with draft windows and without (`jspec bench context`).

A head that was trained on short texts drafts worse the further it looks back; a window keeps it at what it knows. Every
context length ends at the same places of the text, so that what is continued is the same and only its past differs.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from jspec.core.tree import TREE_FORMS, Tree
from jspec.draft import auto
from jspec.draft.base import Drafter
from jspec.engine.api import Engine
from jspec.engine.metrics import LowAcceptanceWarning, Metrics
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.tools import check_head, demo
from jspec.tools.bench.acceptance import standard_error
from jspec.tools.bench.report import environment, write
from jspec.tools.table import table

CONTEXTS = (256, 512, 1024, 2048)
WINDOWS = (None, 128)
PLACES, TOKENS = 8, 32  # where the text is continued, and tokens of each completion
PREFILL = 512


@dataclass(frozen=True)
class ContextAcceptance:
    """What one window came to at one context length.

    Attributes:
        tree: as `Tree.parse` reads it.
        draft_window: in tokens; None: none.
        context: tokens of the prompts.
        length: mean acceptance length, tokens a round, greedy.
        error: its standard error over prompts.
        rate: share of the drafted tokens that were emitted.
        rounds: that the mean is taken over.
    """

    tree: str
    draft_window: int | None
    context: int
    length: float
    error: float
    rate: float
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--target", default=demo.TARGET, metavar="PATH", help="folder or hub id; the embedded one")
    parser.add_argument(
        "--head", default=demo.HEAD, metavar="PATH", help="an EAGLE head or a draft model; the embedded"
    )
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models; else the folder\'s own')
    parser.add_argument("--dtype", help="of the weights; float32 on CPU, bfloat16 elsewhere")
    parser.add_argument("--tree", type=Tree.parse, nargs="+", default=[Tree.chain(4)], metavar="TREE", help=TREE_FORMS)
    contexts = " ".join(map(str, CONTEXTS))
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, metavar=contexts, help="tokens of prompts")
    parser.add_argument("--draft-window", type=_window, nargs="+", default=WINDOWS, metavar="W", help="tokens, or none")
    parser.add_argument("--prompts", type=int, default=PLACES, help="places where the text is continued")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of each completion")
    parser.add_argument("--text", type=Path, metavar="FILE", help="Python source if left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.set_defaults(run=_run)


def _window(word: str) -> int | None:
    return None if word == "none" else int(word)


def _run(arguments: argparse.Namespace) -> int:
    tokenizer = arguments.tokenizer or ("bytes" if arguments.target == demo.TARGET else None)
    target, words = check_head.load_target(arguments.target, tokenizer, dtype=arguments.dtype)
    written = source() if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    results = measure(
        target,
        [auto.load_drafter(arguments.head, tree, dtype=arguments.dtype) for tree in arguments.tree],
        words.encode(written),
        contexts=arguments.context,
        windows=arguments.draft_window,
        places=arguments.prompts,
        tokens=arguments.tokens,
    )
    print(f"tokens a round ± standard error, greedy, by context length; {environment()}")
    print(text(results))
    if arguments.json:
        write_json(arguments.json, results)
    return 0


def source() -> str:
    """A long text of the kind that the embedded pair was trained on: this package's own modules."""
    files = sorted(Path(__file__).parent.parent.parent.rglob("*.py"))
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def prompts(ids: Sequence[int], contexts: Sequence[int], places: int) -> dict[int, list[list[int]]]:
    """Of each context length the tokens before ``places`` places of the text, the same ones for every length.

    Raises:
        ValueError: lengths below 1 or none, fewer than two places, or a text too short for the longest.
    """
    longest = max(contexts, default=0)
    if min(contexts, default=0) < 1 or places < 2:
        raise ValueError(f"expected context lengths >= 1 and at least 2 places, got {list(contexts)} and {places}")
    if len(ids) < longest + places - 1:
        raise ValueError(
            f"expected a text of at least {longest + places - 1} tokens for contexts of {longest}, got {len(ids)}; "
            "give a longer --text or shorter contexts"
        )
    ends = [longest + (len(ids) - longest) * place // (places - 1) for place in range(places)]
    return {context: [list(ids[end - context : end]) for end in ends] for context in contexts}


def measure(
    target: Model,
    drafters: Sequence[Drafter],
    ids: Sequence[int],
    *,
    contexts: Sequence[int] = CONTEXTS,
    windows: Sequence[int | None] = WINDOWS,
    places: int = PLACES,
    tokens: int = TOKENS,
) -> list[ContextAcceptance]:
    """Continue the text greedily behind each context, with every drafter and window.

    Args:
        ids: the text's tokens.
        places: of the text.
        tokens: of each completion; its last round is cut there.
    """
    cuts, results = prompts(ids, contexts, places), []
    fixed: dict[str, Any] = dict(slots=places, buckets=(places,), prefill_buckets=(PREFILL,), prefix_cache=False)
    variants = [
        drafter if window is None else drafter.with_window(window) for drafter, window in product(drafters, windows)
    ]  # what does not fit raises here
    for drafter in variants:
        with Engine(target, drafter=drafter, max_len=max(contexts) + tokens, **fixed) as engine:
            results += [_at(engine, drafter, context, cut, tokens) for context, cut in cuts.items()]
    return results


def _at(engine: Engine, drafter: Drafter, context: int, cut: list[list[int]], tokens: int) -> ContextAcceptance:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowAcceptanceWarning)  # the table says it
        parts = [completion.raise_for_error().metrics for completion in engine.generate(cut, params)]
    whole = sum(parts, Metrics())
    return ContextAcceptance(
        tree=str(drafter.tree),
        draft_window=drafter.draft_window,
        context=context,
        length=whole.mean_acceptance_length,
        error=standard_error(parts),
        rate=whole.acceptance_rate,
        rounds=whole.num_drafts,
    )


def text(results: Sequence[ContextAcceptance]) -> str:
    """One line a tree and window, one column a context length: tokens a round and their standard error."""
    contexts = sorted({result.context for result in results})
    found: dict[tuple[str, int | None], dict[int, str]] = {}
    for one in results:
        found.setdefault((one.tree, one.draft_window), {})[one.context] = f"{one.length:.2f} ± {one.error:.2f}"
    rows = [["tree", "draft window", *(f"{context} tokens" for context in contexts)]]
    for (tree, window), cells in found.items():
        rows.append([tree, str(window or "none"), *(cells[context] for context in contexts)])
    return table(rows)


def write_json(path: Path, results: Sequence[ContextAcceptance]) -> None:
    """Environment and results as one JSON object."""
    write(path, [asdict(result) for result in results])
