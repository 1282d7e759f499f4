"""`jspec bench acceptance`: mean tokens a step, by accept rule, tree, temperature, draft window and context length.

A target and a drafter are measured: the embedded pair (`jspec.tools.demo`), or those that the options name. A head that
was trained on short texts drafts worse on long ones (`--context`), and a window (`--draft-window`) limits the tokens
that it sees. Prompts of all context lengths end at the same positions of the text.

With `--lookup`, each case is measured with the head alone, the look-up alone, and both, whose emitted tokens are
counted by who drafted them.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from jspec.core.tree import Tree
from jspec.draft.base import Drafter
from jspec.draft.named import LOOKUPS, with_lookup
from jspec.engine.callers.api import Engine
from jspec.engine.request.metrics import LowAcceptanceWarning, Metrics
from jspec.engine.request.sampling_params import SamplingParams
from jspec.tools.bench.options import SAMPLES, TEMPERATURES, TOKENS
from jspec.tools.bench.pair import BenchPair
from jspec.tools.bench.prompt_sets import SAMPLE_SIZE, SAMPLED, sample
from jspec.tools.bench.results import Column, Results
from jspec.tools.options import check_join

SLOTS, PREFILL = 16, 512  # requests at once, most tokens of a piece of a prompt


@dataclass(frozen=True)
class AcceptanceCase:
    """The settings of one compiled engine, which serves all temperatures and context lengths."""

    accept: Annotated[str, Column("accept rule", lambda rule: rule + " (lossy)" * (rule == "typical"))]
    tree: Annotated[Tree, Column("tree", str)]
    draft_quantize: Annotated[str | None, Column("head")] = None  # quantisation of the head's weights; None: no
    draft_window: Annotated[int | None, Column("window")] = None  # tokens that the drafter sees; None: all
    context: Annotated[int | None, Column("context")] = None  # tokens of the prompts; None: `SAMPLE_SIZE`
    # "head", a name of `LOOKUPS`, or both and how they are joined: "head+ngram, beside"; None: there is no look-up.
    drafts: Annotated[str | None, Column("drafted by")] = None

    def drafter(self, pair: BenchPair) -> Drafter | None:
        name, _, join = (self.drafts or "head").partition(", ")
        if name in LOOKUPS:
            return LOOKUPS[name](Tree.chain(self.tree.depth))
        drafter = pair.drafter(self.tree, self.draft_quantize)
        if drafter is not None and self.draft_window is not None:
            drafter = drafter.with_window(self.draft_window)
        return with_lookup(drafter, name.removeprefix("head+"), join) if join else drafter


@dataclass(frozen=True)
class MeasuredAcceptance:
    """The measured acceptance of an engine's draft tokens at one temperature."""

    case: AcceptanceCase
    temperature: Annotated[float, Column("temperature", "g")]
    length: Annotated[float, Column("tokens a step", ".2f")]  # mean acceptance length
    error: Annotated[float, Column("±", ".2f")]  # standard error of `length` over prompts, tokens a step
    rate: Annotated[float, Column("emitted", ".0%")]  # share of the drafted tokens that were emitted
    rounds: Annotated[int, Column("steps")]  # number of steps that `length` averages
    # Emitted tokens a step that a head and a look-up beside it drafted; None: one of them drafts alone.
    head: Annotated[float | None, Column("by head", ".2f")] = None
    lookup: Annotated[float | None, Column("by look-up", ".2f")] = None


def cases(
    rules: Sequence[str],
    trees: Sequence[Tree],
    draft_quantize: str | None = None,
    windows: Sequence[int | None] = (None,),
    lookup: str | None = None,
    join: str | None = None,
) -> list[AcceptanceCase]:
    """Return one case for each accept rule, each tree that the rule supports, and each draft window, tree by tree.

    "block" accepts chains alone; a dynamic tree is not sampled, so there "rejection" and "traversal" equal
    "multi_candidate". With a look-up there are three cases: the head, the look-up and both. Chains alone are replaced.
    """
    joins = {tree: join or ("replace" if tree.is_chain else "beside") for tree in trees}
    trees = [tree for tree in trees if lookup is None or tree.is_chain or joins[tree] == "beside"]
    fits = {
        "block": lambda tree: tree.is_chain and (lookup is None or joins[tree] == "replace"),
        **dict.fromkeys(("rejection", "traversal"), lambda tree: tree.paths is not None),
    }
    pairs = [(tree, rule) for tree, rule in product(trees, rules) if rule not in fits or fits[rule](tree)]
    if not pairs:
        raise ValueError(
            f"expected an accept rule that fits a tree, got {[*rules]} and {[str(tree) for tree in trees]}: "
            '"block" needs a chain, "rejection" and "traversal" a chain or a static tree, --join replace a chain'
        )
    return [
        AcceptanceCase(rule, tree, draft_quantize, window, drafts=drafts)
        for (tree, rule), window in product(pairs, windows)
        for drafts in ((None,) if lookup is None else ("head", lookup, f"head+{lookup}, {joins[tree]}"))
    ]


def measure(
    pair: BenchPair,
    case: AcceptanceCase,
    temperatures: Sequence[float] = TEMPERATURES,
    texts: Mapping[int | None, Sequence[Any]] | None = None,
    *,
    tokens: int = TOKENS,
    samples: int = SAMPLES,
) -> Iterator[MeasuredAcceptance]:
    """Yield the acceptance at each temperature and context, as the pair continues texts with fixed seeds.

    Args:
        pair: target and drafter.
        case: settings of the engine; its `context` is replaced.
        temperatures: sampling temperatures.
        texts: token ids to continue, by their length in tokens; None: `sample`, which are shorter than `SAMPLE_SIZE`.
        tokens: tokens of each completion.
        samples: completions of each text at temperatures above 0.
    """
    texts = {None: sample()} if texts is None else texts
    longest = max(context or SAMPLE_SIZE for context in texts)
    drafter = case.drafter(pair)
    sizes: Any = dict(max_len=longest + tokens, prefill_buckets=(min(longest, PREFILL),), prefix_cache=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message='accept="typical"')  # the table says "(lossy)"
        engine = pair.engine(drafter, accept=case.accept, slots=SLOTS, buckets=(SLOTS,), **sizes)
    with engine:
        for temperature, context in product(temperatures, texts):
            point = replace(case, context=context)
            yield _complete(engine, point, texts[context], temperature, tokens, samples if temperature else 1)


def text_places(ids: Sequence[int], contexts: Sequence[int], places: int) -> dict[int | None, list[list[int]]]:
    """Return, by context length, the token ids before each of ``places`` positions of a text."""
    longest = max(contexts)
    least = longest + places - 1
    if places < 2 or len(ids) < least:
        raise ValueError(
            f"expected at least 2 places and a text of {least} tokens, got {places} and {len(ids)}; "
            "give a longer --text or shorter contexts"
        )
    ends = [longest + (len(ids) - longest) * index // (places - 1) for index in range(places)]
    return {context: [list(ids[end - context : end]) for end in ends] for context in sorted(contexts)}


def _complete(
    engine: Engine, case: AcceptanceCase, texts: Sequence[Any], temperature: float, tokens: int, samples: int
) -> MeasuredAcceptance:
    """Complete each prompt ``samples`` times and return the acceptance over all completions."""
    prompts = [text for text in texts for _ in range(samples)]
    common = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=case.context is not None)
    params = [replace(common, seed=seed) for seed in range(len(prompts))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowAcceptanceWarning)  # the table says it
        done = [one.raise_for_error() for one in engine.generate(prompts, params)]
    metrics = [completion.metrics for completion in done]
    parts = [sum(metrics[start : start + samples], Metrics()) for start in range(0, len(done), samples)]
    whole = sum(parts, Metrics())
    figures = (whole.mean_acceptance_length, standard_error(parts), whole.acceptance_rate, whole.num_drafts)
    by_source: Any = {name: count / whole.num_drafts for name, count in whole.num_accepted_tokens_per_source.items()}
    return MeasuredAcceptance(case, temperature, *figures, **by_source)


def standard_error(parts: Sequence[Metrics]) -> float:
    """Return the standard error of the mean tokens a step, by the jackknife over prompts."""
    others = [sum((*parts[:i], *parts[i + 1 :]), Metrics()) for i in range(len(parts))]
    without = [metrics.mean_acceptance_length for metrics in others]
    return (len(parts) - 1) / len(parts) ** 0.5 * statistics.stdev(without)


def run(arguments: argparse.Namespace) -> Results:
    check_join(arguments)
    a, pair, texts = arguments, BenchPair.of(arguments), None
    settings = cases(a.accept, a.tree, a.draft_quantize, a.draft_window, a.lookup, a.join)
    if a.context is not None:
        files = [a.text] if a.text else sorted(Path(__file__).parents[2].rglob("*.py"))  # Python, for the embedded pair
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
        texts = text_places(pair.tokenizer.encode(text), a.context, SAMPLED)
    elif a.text:
        raise ValueError("--text: expected none without --context, whose text it is; leave it out, or add --context")
    sizes: Any = dict(tokens=a.tokens, samples=a.samples)
    results = (line for case in settings for line in measure(pair, case, a.temperature, texts, **sizes))
    count = len(settings) * len(a.temperature) * len(texts or [None])
    return Results("tokens a step ± standard error, share of drafted tokens emitted", results, count=count)
