"""`jspec bench serve --measure depths` and `--measure batching`: variants of an engine, timed in turns on one pair.

Depths: plain decoding, drafts of fixed depth, and the depth that the engine chooses itself, in full batches: from when
every row has its first token until the first row has its last. Batching: the same requests one by one, all at once, and
all at once without overlap. Pages are not shared, so all repeats do the same work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from jspec.core.config import PREFILL_BUCKETS
from jspec.core.tree import Tree
from jspec.engine.api import Engine
from jspec.engine.draft_length import Adaptive, Fixed, Policy, halvings
from jspec.engine.metrics import Metrics
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.bench.acceptance import prompts
from jspec.tools.bench.pair import Pair
from jspec.tools.bench.profiling import time_in_turns
from jspec.tools.bench.report import Column, Report, ints, option, tree_name

PREFILL = 128  # tokens of a prompt at most, for depths
PROMPT = 16  # characters of a prompt, for batching: prefill is the same work in every variant
Run = tuple[float, Metrics]  # tokens a second, and counts


@dataclass(frozen=True)
class Speed:
    """Speed of a variant in a batch."""

    batch: int
    variant: str
    tokens_per_second: float  # of all rows, median over repeats
    spread: float  # largest less smallest
    ratio: float  # beside the first variant, median over repeats
    length: float  # mean acceptance length
    rounds_at: dict[int, int]  # steps of rows by the depth that was drafted

    @property
    def depths(self) -> str:
        total = sum(self.rounds_at.values())
        return ", ".join(f"{depth}: {self.rounds_at[depth] / total:.0%}" for depth in sorted(self.rounds_at))


COLUMNS = (
    Column("batch", "batch"),
    Column("variant", "variant"),
    Column("tokens_per_second", "tokens/s", ".1f"),
    Column("spread", "max-min", ".1f"),
    Column("ratio", "beside the first", ".3f"),
    Column("length", "tokens a step", ".2f"),
    Column("depths", "depths drafted"),
)


def speeds(batch: int, variants: dict[str, Callable[[], Run]], repeats: int) -> list[Speed]:
    """Time variants in turns."""
    found = time_in_turns(list(variants.values()), repeats)
    first = [speed for speed, _ in found[0]]
    results = []
    for name, runs in zip(variants, found, strict=True):
        own, metrics = [speed for speed, _ in runs], sum((counts for _, counts in runs), Metrics())
        ratio = statistics.median(one / other for one, other in zip(own, first, strict=True))
        figures = (statistics.median(own), max(own) - min(own), ratio)
        results.append(Speed(batch, name, *figures, metrics.mean_acceptance_length, metrics.num_rounds_per_depth))
    return results


def measure_depths(
    pair: Pair, tree: Tree, batches: Sequence[int], *, tokens: int, temperature: float = 0.0, repeats: int
) -> list[Speed]:
    """Plain, fixed and adaptive drafting in all batches.

    Raises:
        ValueError: a batch below 1, or fewer than two tokens.
    """
    if min(batches, default=0) < 1 or tokens < 2:
        raise ValueError(f"depths: expected batches >= 1 and at least 2 output tokens, got {batches} and {tokens}")
    depths = halvings(tree.depth)
    options = dict(
        slots=max(batches),
        buckets=tuple(sorted(set(batches))),
        max_len=PREFILL + tokens,
        prefill_buckets=(PREFILL,),
        prefill_budget=PREFILL * max(batches),  # all prompts are prefilled before the first step
        prefix_cache=False,
        log_interval=None,
    )
    with pair.engine(None, **options) as plain, pair.engine(pair.drafter(tree), adaptive=True, **options) as drafting:
        policies: dict[str, tuple[Engine, Policy]] = {"plain": (plain, Fixed(0))}
        policies |= {f"depth {depth}": (drafting, Fixed(depth)) for depth in depths}
        results = []
        for batch in sorted(set(batches)):
            own = policies | {"adaptive": (drafting, Adaptive(depths, shared_acceptance=tree.paths is not None))}
            runs = {
                name: _full_batch_runner(engine, policy, batch, tokens, temperature)
                for name, (engine, policy) in own.items()
            }
            results += speeds(batch, runs, repeats)
        return results


def _full_batch_runner(
    engine: Engine, policy: Policy, batch: int, tokens: int, temperature: float
) -> Callable[[], Run]:
    def run() -> Run:
        engine.policy = policy
        return full_batch(engine, batch, tokens, temperature)

    return run


def full_batch(engine: Engine, batch: int, tokens: int, temperature: float) -> Run:
    """Tokens a second of a full batch, and counts; afterwards no step is in flight."""
    texts = islice(cycle(prompts()), batch)
    common = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
    requests = [engine.submit(text, replace(common, seed=seed)) for seed, text in enumerate(texts)]
    while not all(request.token_ids for request in requests):
        engine.step()
    began, before = time.perf_counter(), sum(len(request.token_ids) for request in requests)
    while not any(request.finish_reason for request in requests):
        engine.step()
    seconds, emitted = time.perf_counter() - began, sum(len(request.token_ids) for request in requests) - before
    for request in requests:
        engine.abort(request)
    engine.step()  # reads the step in flight
    done = [engine.result(request).raise_for_error() for request in requests]
    return emitted / seconds, sum((completion.metrics for completion in done), Metrics())


def measure_batching(pair: Pair, tree: Tree | None, requests: int, *, tokens: int, repeats: int) -> list[Speed]:
    """The same requests one by one, all at once, and all at once without overlap.

    Raises:
        ValueError: fewer than two requests, or a count below 1.
    """
    for name, value, least in (("requests", requests, 2), ("tokens", tokens, 1), ("repeats", repeats, 1)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    texts = [list(pair.tokenizer.encode(text)) for text in prompts(requests, PROMPT)]
    longest = max(map(len, texts))
    with pair.engine(
        pair.drafter(tree),
        slots=requests,
        buckets=tuple(sorted({1, requests})),
        max_len=longest + tokens,
        prefill_buckets=(longest,),
        prefill_budget=PREFILL_BUCKETS[-1],  # an engine's default for long prompts
        prefix_cache=False,
    ) as engine:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        one_by_one, at_once = [[text] for text in texts], [texts]
        variants = {
            "one by one": lambda: timed(engine, one_by_one, params, overlap=True),
            "all at once": lambda: timed(engine, at_once, params, overlap=True),
            "all at once, no overlap": lambda: timed(engine, at_once, params, overlap=False),
        }
        return speeds(requests, variants, repeats)


def timed(engine: Engine, groups: Sequence[list[list[int]]], params: SamplingParams, *, overlap: bool) -> Run:
    """Tokens a second of groups of prompts, one group after the other; the programs do not depend on overlap."""
    engine.config = replace(engine.config, overlap=overlap)
    began = time.perf_counter()
    done = [completion.raise_for_error() for group in groups for completion in engine.generate(group, params)]
    engine.step()  # reads the step in flight, which the next run would otherwise pay for
    seconds = time.perf_counter() - began
    tokens = sum(len(completion.token_ids) for completion in done)
    return tokens / seconds, sum((completion.metrics for completion in done), Metrics())


def run_depths(arguments: argparse.Namespace) -> Report:
    results: list[Speed] = []
    for tree in arguments.tree:
        if tree is None:
            raise ValueError("depths: expected a tree to compare with plain decoding, got none; take --tree chain:4")
        common = dict(tokens=arguments.output_len, temperature=arguments.temperature, repeats=arguments.repeats)
        results += measure_depths(Pair.of(arguments), tree, arguments.batch, **common)
    headline = f"plain, fixed and adaptive drafting of {', '.join(map(str, arguments.tree))} in full batches"
    return Report(headline, COLUMNS, results)


def run_batching(arguments: argparse.Namespace) -> Report:
    (tree, *_), pair = arguments.tree, Pair.of(arguments)
    common = dict(tokens=arguments.output_len, repeats=arguments.repeats)
    results = [one for batch in arguments.batch for one in measure_batching(pair, tree, batch, **common)]
    gains = [f"{at_once.ratio / plain.ratio:.3f}" for at_once, plain in zip(results[1::3], results[2::3], strict=True)]
    headline = f"requests of {arguments.output_len} tokens, tree {tree_name(tree)}"
    return Report(headline, COLUMNS, results, f"with overlap {', '.join(gains)} times as fast as without")


OPTIONS = (
    option("--batch", type=ints, default=[1, 8, 64], metavar="1,8,64", help="for depths and batching: requests"),
    option("--repeats", type=int, default=9, help="for depths and batching: timed repeats"),
)
