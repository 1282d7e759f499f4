"""`jspec bench report`: drafted decoding beside plain decoding of real prompts, as a table, a picture and a JSON file.

Two engines with the same target serve the same requests in turns: for each set of prompts and each temperature, at each
batch size. The requests of a set are all due at once, and as many as the batch size run at a time. Times of a request
begin when one of these places is free. Each request has a seed, so the accept rule "coupled" must emit the tokens of
plain decoding at every temperature, and other rules at temperature 0; the command fails if they do not.

The embedded target is widened with zeros, as in `jspec demo`, so that it costs more than its head, as large ones do.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
import shlex
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from jspec.core.tree import Tree
from jspec.draft.base import Drafter
from jspec.engine.request.metrics import LowAcceptanceWarning, Metrics
from jspec.engine.request.request import Request
from jspec.engine.request.sampling_params import SamplingParams
from jspec.tools import demo
from jspec.tools.bench import acceptance, profiling, report_files
from jspec.tools.bench.load import Arrival, Log, serve
from jspec.tools.bench.options import DEMO_REPORT, REPORT_DEFAULTS
from jspec.tools.bench.pair import BenchPair
from jspec.tools.bench.prompt_sets import prompts_of
from jspec.tools.bench.results import Column, Results, environment
from jspec.tools.bench.serve import ServeSetting, Spread, figures_of, warm_up
from jspec.tools.options import check_join

LOAD = (
    *("target", "tokenizer", "dtype", "batch", "temperature", "tokens", "num_prompts", "chat"),
    *("deterministic", "seed"),
)
DRAFTING = ("draft", "tree", "accept", "draft_quantize", "draft_window", "lookup", "join")
Prompts = Sequence[list[int]]  # token ids
Where = tuple[str, float, int]  # name of the prompts, temperature, batch size


def _medians(spreads: Sequence[Spread]) -> str:
    return " → ".join(f"{spread.median:.1f} ({spread.p99:.1f})" for spread in spreads)


@dataclass(frozen=True)
class Comparison:
    """Drafted decoding beside plain decoding of a set of prompts; pairs of values are of plain, then of drafted."""

    prompts: Annotated[str, Column("prompts")]
    temperature: Annotated[float, Column("temperature", "g")]
    batch: Annotated[int, Column("batch")]  # number of requests that run at once
    length: Annotated[float, Column("tokens a round", ".2f")]  # mean acceptance length
    error: Annotated[float, Column("±", ".2f")]  # standard error of `length` over prompts; nan for one prompt
    plain_rate: Annotated[float, Column("plain tokens/s", ".0f")]
    drafted_rate: Annotated[float, Column("drafted tokens/s", ".0f")]
    speed_up: Annotated[float, Column("speed-up", ".2f")]  # median of `speed_ups`
    ttft_ms: Annotated[Sequence[Spread], Column("first token ms", _medians)]
    tpot_ms: Annotated[Sequence[Spread], Column("ms a token", _medians)]
    tokens: Annotated[str, Column("equal tokens")]  # `equal` as text
    # Number of requests that have the tokens of plain decoding in all repeats; None: the accept rule promises no such.
    equal: int | None
    requests: int
    speed_ups: Sequence[float]  # drafted over plain tokens/s, of each repeat
    figures: Sequence[Mapping[str, Any]]  # all figures of the median repeats (`jspec.tools.bench.serve.figures_of`)

    differs = property(lambda self: self.equal is not None and self.equal < self.requests)


def requests_of(prompts: Prompts, batch: int, temperature: float, tokens: int, seed: int) -> list[Arrival]:
    """Return requests with different seeds: the whole set of prompts, as often as two full batches need it."""
    times = math.ceil(2 * batch / len(prompts))
    params = (SamplingParams(tokens, temperature=temperature, seed=seed + i) for i in range(times * len(prompts)))
    return [Arrival(0.0, prompt, one) for prompt, one in zip([*prompts] * times, params, strict=True)]


def compare(
    where: Where, logs: Sequence[Sequence[Log]], arrivals: Sequence[Arrival], tree: Tree, prompts: int, promises: bool
) -> Comparison:
    """Return what two engines did with the same requests.

    Args:
        logs: for each repeat the log of plain decoding and that of drafted decoding.
        arrivals: the requests: the first ``prompts`` have different prompts, which those after them repeat.
        tree: draft tree.
        prompts: number of different prompts.
        promises: whether the accept rule promises the tokens of plain decoding.
    """
    speed_ups = [drafted.rate / plain.rate for plain, drafted in logs]
    medians = [sorted(group, key=attrgetter("rate"))[len(logs) // 2] for group in zip(*logs, strict=True)]
    settings = [ServeSetting(drafts, None, where[2]) for drafts in (None, tree)]
    figures = [figures_of(setting, log) for setting, log in zip(settings, medians, strict=True)]
    metrics = [request.metrics for request in requests_in(medians[1], arrivals)]
    parts = [sum(metrics[start::prompts], Metrics()) for start in range(prompts)]
    tokens = [[request.token_ids for request in requests_in(log, arrivals)] for pair in logs for log in pair]
    equal, count = sum(all(ids == first for ids in rest) for first, *rest in zip(*tokens, strict=True)), len(arrivals)
    return Comparison(
        *where,
        length=sum(parts, Metrics()).mean_acceptance_length,
        error=acceptance.standard_error(parts) if prompts > 1 else math.nan,
        plain_rate=medians[0].rate,
        drafted_rate=medians[1].rate,
        speed_up=statistics.median(speed_ups),
        ttft_ms=[one["ttft_ms"] for one in figures],
        tpot_ms=[one["tpot_ms"] for one in figures],
        tokens=("all" if equal == count else f"{equal} OF {count}") if promises else "not promised",
        equal=equal if promises else None,
        requests=count,
        speed_ups=speed_ups,
        figures=figures,
    )


def requests_in(log: Log, arrivals: Sequence[Arrival]) -> list[Request]:
    """Return the requests of a log in the order of their arrivals; raise the error of one that failed."""
    requests = {}
    for served in log.served:
        assert served.completion is not None
        served.completion.raise_for_error()
        requests[id(served.arrival)] = served.request
    return [requests[id(arrival)] for arrival in arrivals]


def measure(
    pair: BenchPair, drafter: Drafter, sets: Mapping[str, Prompts], a: argparse.Namespace
) -> Iterator[Comparison]:
    """Yield the comparison of each set of prompts, temperature and batch size of the parsed command line."""
    sizes, longest = sorted(set(a.batch)), max(len(prompt) for prompts in sets.values() for prompt in prompts)
    options: dict[str, Any] = dict(slots=sizes[-1], buckets=tuple(sizes), max_len=longest + a.tokens)
    options |= dict(prefix_cache=False, deterministic=a.deterministic)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", LowAcceptanceWarning)  # the table says it
        warnings.filterwarnings("ignore", message='accept="typical"')  # so does the report
        engines = [pair.engine(None, **options), pair.engine(drafter, accept=a.accept, **options)]
        for engine in map(stack.enter_context, engines):
            warm_up(engine)
        for (name, prompts), temperature, size in product(sets.items(), dict.fromkeys(a.temperature), sizes):
            arrivals = requests_of(prompts, size, temperature, a.tokens, a.seed)
            runs = [partial(serve, engine, arrivals, max_concurrency=size) for engine in engines]
            logs = list(zip(*profiling.time_in_turns(runs, a.repeats, warm_up=0), strict=True))
            promises = a.accept == "coupled" or (temperature == 0 and a.accept != "typical")  # plain decoding's tokens
            yield compare((name, temperature, size), logs, arrivals, drafter.tree, len(prompts), promises)


def facts_of(arguments: argparse.Namespace, sets: Mapping[str, Prompts]) -> dict[str, Any]:
    """Return what a report is about: the load, the drafting, the machine, the date and the command."""
    options, cores = vars(arguments), len(os.sched_getaffinity(0))
    prompts = {name: (len(ids), hashlib.sha256(repr([*ids]).encode()).hexdigest()) for name, ids in sets.items()}
    machine = environment() | {"cores": cores, "power_limit": profiling.power_limit()}
    return {
        "load": {**{name: options[name] for name in LOAD}, "prompts": prompts},
        "drafting": {name: options[name] for name in DRAFTING},
        "repeats": arguments.repeats,
        "machine": machine | {"python": platform.python_version()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["jspec", *arguments.words]),
    }


def run(arguments: argparse.Namespace) -> Results:
    a = arguments
    check_join(a)
    report_files.check(a.out, a.against)
    is_demo = a.target in (None, demo.NAME)
    for name, value in (DEMO_REPORT if is_demo else REPORT_DEFAULTS).items():
        setattr(a, name, value if getattr(a, name) is None else getattr(a, name))
    if a.draft is None and not is_demo:
        raise ValueError(f"--head: expected what drafts for {a.target}, got none; `jspec heads {a.target}` lists heads")
    texts = {Path(name).stem: prompts_of(name, a.num_prompts) for name in a.prompts}
    if len(texts) < len(a.prompts):
        raise ValueError(f"--prompts: expected sets and files of different names, got {a.prompts}; rename a file")
    case = acceptance.cases([a.accept], [a.tree], a.draft_quantize, [a.draft_window], a.lookup, a.join)[-1]
    pair = BenchPair.of(a)
    if is_demo:
        pair = replace(pair, target=demo.widened())
        a.target, a.draft = f"demo, with feed-forwards widened to {demo.WIDTH} channels", a.draft or demo.NAME
    has_template = getattr(pair.tokenizer, "chat_template", None) is not None
    a.chat = has_template if a.chat is None else a.chat == "yes"
    sets = {name: pair.encode(prompts, chat=a.chat) for name, prompts in texts.items()}
    facts = facts_of(a, sets)
    earlier = None if a.against is None else report_files.read(a.against, facts)
    drafter: Any = case.drafter(pair)  # never None, as there is a tree
    return Results(
        "drafted beside plain decoding",
        measure(pair, drafter, sets, a),
        lambda rows: report_files.write(a.out, rows, facts, earlier),
        facts,
        count=len(sets) * len(set(a.temperature)) * len(set(a.batch)),
        failed=lambda rows: any(row.differs for row in rows),
    )
