"""`jspec bench offline`: what drafting came to over a file of prompts, all given at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jspec.core.tree import Tree
from jspec.engine.metrics import Metrics
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.bench import report
from jspec.tools.bench.pair import Pair

RULE = "-" * 50


@dataclass(frozen=True)
class Offline:
    """Counts over all prompts.

    Attributes:
        tree: what was drafted.
        prompts: how many.
        prompt_tokens: of all of them.
        seconds: from the first to the last token of all.
    """

    tree: Tree
    prompts: int
    prompt_tokens: int
    seconds: float
    metrics: Metrics

    @property
    def per_position(self) -> list[float]:
        """Share of rounds that accepted each position of the tree."""
        own = self.metrics.acceptance_per_position
        return own + [0.0] * (self.tree.depth - len(own))


def tokens_of(pair: Pair, texts: Sequence[str], *, chat: bool) -> list[list[int]]:
    """The prompts' ids.

    Args:
        chat: lay each out as a user's message by the tokenizer's chat template.

    Raises:
        ValueError: there is no template.
    """
    if chat:
        return [list(pair.tokenizer.chat([{"role": "user", "content": text}])) for text in texts]
    return [list(pair.tokenizer.encode(text)) for text in texts]


def run(
    pair: Pair, prompts: Sequence[Sequence[int]], tree: Tree, params: SamplingParams, *, slots: int, **options: Any
) -> Offline:
    """Answer the prompts; an error in one of them is raised."""
    longest = max(map(len, prompts))
    with pair.engine(tree, slots=slots, max_len=longest + params.max_tokens, **options) as engine:
        began = time.perf_counter()
        done = [one.raise_for_error() for one in engine.generate([list(prompt) for prompt in prompts], params)]
        seconds = time.perf_counter() - began
    return Offline(tree, len(prompts), sum(map(len, prompts)), seconds, sum((one.metrics for one in done), Metrics()))


def text(result: Offline) -> str:
    """Under the names, and in the order, in which vLLM's offline example prints them."""
    metrics = result.metrics
    lines = [
        RULE,
        f"total_num_output_tokens: {metrics.num_tokens}",
        f"num_drafts: {metrics.num_drafts}",
        f"num_draft_tokens: {metrics.num_draft_tokens}",
        f"num_accepted_tokens: {metrics.num_accepted_tokens}",
        f"mean acceptance length: {metrics.mean_acceptance_length:.2f}",
        RULE,
        *(f"acceptance at token {i}: {share:.2f}" for i, share in enumerate(result.per_position)),
        RULE,
        f"{result.prompts} prompts, {result.prompt_tokens} tokens in them, {result.tree}; "
        f"{metrics.num_tokens / result.seconds:.1f} tokens/s",
    ]
    return "\n".join(lines)


def write_json(path: Path, result: Offline) -> None:
    """Environment and result as one JSON object."""
    metrics = result.metrics
    own = {
        "tree": str(result.tree),
        "num_prompts": result.prompts,
        "total_num_prompt_tokens": result.prompt_tokens,
        "total_num_output_tokens": metrics.num_tokens,
        "num_drafts": metrics.num_drafts,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "acceptance_per_position": result.per_position,
        "seconds": result.seconds,
        "tokens_per_second": metrics.num_tokens / result.seconds,
    }
    report.write(path, [own])
