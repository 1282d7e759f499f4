"""`jspec bench acceptance`: mean tokens a step, by accept rule, temperature and tree, or by context length.

A target and a drafter are measured: the embedded pair (`jspec.tools.demo`), or those that the options name. By context
length (`--context`), with draft windows and without: a head that was trained on short texts drafts worse on long ones,
and a window limits the tokens that it sees. Prompts of all context lengths end at the same positions of the text.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from jspec.core.config import ACCEPT_RULES
from jspec.core.tree import TREE_FORMS, Tree
from jspec.draft.base import Drafter
from jspec.engine.api import Engine
from jspec.engine.metrics import LowAcceptanceWarning, Metrics
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.tools.bench.pair import Pair
from jspec.tools.bench.report import Column, Report, count, file_option, option, with_message
from pallas_kernels.layers.quantized import KINDS

STATIC = "static:0,1,2,0.0,0.1,1.0,0.0.0,0.0.1,0.1.0,0.0.0.0,0.0.0.1"
TREES = tuple(Tree.parse(text) for text in ("chain:4", STATIC, "topk:16,4,4"))
TEMPERATURES = (0.0, 0.5, 1.0)
TOKENS = 64  # tokens of each completion
SAMPLES = 4  # completions a prompt at temperatures above 0
SLOTS = 16
PROMPTS, PROMPT_SIZE = 16, 96  # number, and characters, which are more than the tokens
SOURCE_TEXT = Path(__file__).with_name("ledger.txt").read_text(encoding="utf-8")
PREFILL = 512
WINDOWS = (None, 128)  # draft windows that are measured by default
PLACES = 8  # places of the text that are continued, by context length


@dataclass(frozen=True)
class Case:
    """The settings of one compiled engine; one engine serves all temperatures or all context lengths."""

    accept: Annotated[str, Column("accept rule", lambda rule: rule + " (lossy)" * (rule == "typical"))]
    tree: Annotated[Tree, Column("tree", str)]
    draft_quantize: Annotated[str | None, Column("head")] = None  # quantisation of the head's weights; None: no
    draft_window: Annotated[int | None, Column("window")] = None  # tokens that the drafter sees; None: all
    context: Annotated[int | None, Column("context")] = None  # tokens of the prompts; None: `PROMPT_SIZE`


@dataclass(frozen=True)
class Acceptance:
    """The measured acceptance of an engine's draft tokens at one temperature."""

    case: Case
    temperature: Annotated[float, Column("temperature", "g")]
    length: Annotated[float, Column("tokens a step", ".2f")]  # mean acceptance length
    error: Annotated[float, Column("±", ".2f")]  # standard error of `length` over prompts, tokens a step
    rate: Annotated[float, Column("emitted", ".0%")]  # share of the drafted tokens that were emitted
    rounds: Annotated[int, Column("steps")]  # number of steps that `length` averages


def cases(rules: Sequence[str], trees: Sequence[Tree], draft_quantize: str | None = None) -> list[Case]:
    """Return one case for each accept rule and each tree that the rule supports, tree by tree.

    "block" accepts chains alone; a dynamic tree is not sampled, so there "rejection" and "traversal" equal
    "multi_candidate".
    """
    fits = {
        "block": lambda tree: tree.is_chain,
        "rejection": lambda tree: tree.paths is not None,
        "traversal": lambda tree: tree.paths is not None,
    }
    pairs = [(tree, rule) for tree, rule in product(trees, rules) if rule not in fits or fits[rule](tree)]
    if not pairs:
        raise ValueError(
            f"expected an accept rule that fits a tree, got {[*rules]} and {[str(tree) for tree in trees]}: "
            '"block" needs a chain, "rejection" and "traversal" a chain or a static tree'
        )
    return [Case(rule, tree, draft_quantize) for tree, rule in pairs]


def prompts(count: int = PROMPTS, size: int = PROMPT_SIZE) -> list[str]:
    """Return ``count`` evenly spaced parts of `SOURCE_TEXT`, each of ``size`` characters."""
    last = len(SOURCE_TEXT) - size
    return [SOURCE_TEXT[start : start + size] for start in (last * i // (count - 1) for i in range(count))]


def measure(
    pair: Pair,
    case: Case,
    temperatures: Sequence[float] = TEMPERATURES,
    *,
    tokens: int = TOKENS,
    samples: int = SAMPLES,
) -> Iterator[Acceptance]:
    """Yield the acceptance at each temperature, as the pair completes prompts with fixed seeds."""
    drafter = pair.drafter(case.tree, case.draft_quantize)
    sizes: Any = dict(slots=SLOTS, buckets=(SLOTS,), max_len=PROMPT_SIZE + tokens, prefill_buckets=(PROMPT_SIZE,))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message='accept="typical"')  # the table says so
        engine = pair.engine(drafter, accept=case.accept, **sizes)
    with engine:
        for temperature in temperatures:
            yield _complete(engine, case, prompts(), temperature, tokens, samples if temperature else 1)


def text_places(ids: Sequence[int], contexts: Sequence[int], places: int) -> dict[int, list[list[int]]]:
    """Return, by context length, the token ids before each of ``places`` positions of a text."""
    longest = max(contexts)
    least = longest + places - 1
    if places < 2 or len(ids) < least:
        raise ValueError(
            f"expected at least 2 places and a text of {least} tokens, got {places} and {len(ids)}; "
            "give more --places, a longer --text or shorter contexts"
        )
    ends = [longest + (len(ids) - longest) * place // (places - 1) for place in range(places)]
    return {context: [list(ids[end - context : end]) for end in ends] for context in sorted(contexts)}


def measure_contexts(
    target: Model,
    drafters: Sequence[Drafter],
    ids: Sequence[int],
    *,
    contexts: Sequence[int],
    windows: Sequence[int | None],
    places: int = PLACES,
    tokens: int = TOKENS,
    draft_quantize: str | None = None,
) -> Iterator[Acceptance]:
    """Yield the acceptance of each drafter, window and context length, as the target continues a text greedily."""
    found = text_places(ids, contexts, places)
    sizes: Any = dict(slots=places, buckets=(places,), max_len=max(contexts) + tokens, prefill_buckets=(PREFILL,))
    variants = [one if window is None else one.with_window(window) for one, window in product(drafters, windows)]
    for drafter in variants:
        case = Case("coupled", drafter.tree, draft_quantize, drafter.draft_window)
        with Engine(target, drafter=drafter, prefix_cache=False, **sizes) as engine:
            for context, texts in found.items():
                yield _complete(engine, replace(case, context=context), texts, 0.0, tokens, 1)


def _complete(
    engine: Engine, case: Case, texts: Sequence[Any], temperature: float, tokens: int, samples: int
) -> Acceptance:
    """Complete each prompt ``samples`` times and return the acceptance over all completions."""
    given = [text for text in texts for _ in range(samples)]
    common = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=case.context is not None)
    params = [replace(common, seed=seed) for seed in range(len(given))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowAcceptanceWarning)  # the table says it
        done = [completion.raise_for_error().metrics for completion in engine.generate(given, params)]
    parts = [sum(done[start : start + samples], Metrics()) for start in range(0, len(done), samples)]
    whole = sum(parts, Metrics())
    figures = (whole.mean_acceptance_length, standard_error(parts), whole.acceptance_rate, whole.num_drafts)
    return Acceptance(case, temperature, *figures)


def standard_error(parts: Sequence[Metrics]) -> float:
    """Return the standard error of the mean tokens a step, by the jackknife over prompts."""
    others = [sum((*parts[:i], *parts[i + 1 :]), Metrics()) for i in range(len(parts))]
    without = [one.mean_acceptance_length for one in others]
    return (len(parts) - 1) / len(parts) ** 0.5 * statistics.stdev(without)


def _refuse_unused(a: argparse.Namespace) -> None:
    """Raise ValueError if an option has a value that the measurement does not use."""
    rule = {"accept": ACCEPT_RULES, "temperature": TEMPERATURES, "samples": SAMPLES}
    place = {"text": None, "places": PLACES, "draft_window": WINDOWS}
    own, how = (place, "without") if a.context is None else (rule, "with")
    for name, default in own.items():
        if (given := getattr(a, name)) != default:
            raise ValueError(f"--{name.replace('_', '-')}: expected none {how} --context, got {given}; leave it out")


def run(arguments: argparse.Namespace) -> Report:
    _refuse_unused(arguments)
    a, pair = arguments, Pair.of(arguments)
    if a.context is not None:
        files = sorted(Path(__file__).parents[2].rglob("*.py"))  # the embedded pair was trained on Python
        written = "\n\n".join(file.read_text(encoding="utf-8") for file in ([a.text] if a.text else files))
        drafters = [drafter for tree in a.tree if (drafter := pair.drafter(tree, a.draft_quantize)) is not None]
        sizes = dict(
            contexts=a.context,
            windows=a.draft_window,
            places=a.places,
            tokens=a.tokens,
            draft_quantize=a.draft_quantize,
        )
        results: Iterable[Acceptance] = measure_contexts(pair.target, drafters, pair.tokenizer.encode(written), **sizes)
    else:
        found, sizes = cases(a.accept, a.tree, a.draft_quantize), dict(tokens=a.tokens, samples=a.samples)
        results = (one for case in found for one in measure(pair, case, a.temperature, **sizes))
    return Report("tokens a step ± standard error, share of drafted tokens emitted", results)


def _window(text: str) -> int | None:
    return None if text == "none" else count(text)


OPTIONS = (
    option("--accept", nargs="+", choices=ACCEPT_RULES, default=ACCEPT_RULES, metavar="RULE", help="accept rules"),
    option("--tree", type=with_message(Tree.parse), nargs="+", default=TREES, metavar="TREE", help=TREE_FORMS),
    option("--temperature", type=float, nargs="+", default=TEMPERATURES, help="temperatures, 0: greedy"),
    option("--tokens", type=count, default=TOKENS, help="tokens of each completion"),
    option("--samples", type=count, default=SAMPLES, help="completions a prompt at temperatures above 0"),
    option("--draft-quantize", choices=KINDS, help="quantise the head's weights; default: no"),
    option("--context", type=count, nargs="+", metavar="256", help="by tokens of the prompts; default: by rule"),
    option("--draft-window", type=_window, nargs="+", default=WINDOWS, metavar="W", help="tokens, or none"),
    option("--places", type=count, default=PLACES, help="with --context: places where the text is continued"),
    file_option("--text", "with --context: text that is continued; default: Python source"),
)
