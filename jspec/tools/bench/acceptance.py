"""Acceptance of the embedded pair (`jspec.tools.demo`): by accept rule, temperature and tree."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.engine.api import Engine
from jspec.engine.metrics import Metrics
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.tools import demo
from jspec.tools.bench.report import write
from jspec.tools.table import table

TREES = tuple(
    Tree.parse(text)
    for text in (
        "chain:4",
        "static:0,1,2,0.0,0.1,1.0,0.0.0,0.0.1,0.1.0,0.0.0.0,0.0.0.1",
        "topk:16,4,4",
    )
)
TEMPERATURES = (0.0, 0.5, 1.0)
TOKENS = 64  # of each completion
SAMPLES = 4  # completions a prompt, where they are random
SLOTS = 16
PROMPTS, PROMPT_SIZE = 16, 96  # bytes, which are the pair's tokens
SOURCE_TEXT = '''\
class Ledger:
    """Accounts by name, and what moved between them."""

    def __init__(self, names, limit=None):
        self.limit = limit
        self._moves = []
        self._balances = {name: 0 for name in names}

    def __len__(self):
        return len(self._moves)

    def move(self, amount, source, target):
        """Move an amount from one account to another."""
        if amount <= 0:
            raise ValueError("expected a positive amount, got %r" % (amount,))
        for name in (source, target):
            if name not in self._balances:
                raise KeyError(name)
        if self.limit is not None and self._balances[source] - amount < -self.limit:
            return False
        self._balances[source] -= amount
        self._balances[target] += amount
        self._moves.append((amount, source, target))
        return True

    def undo(self):
        """Take the last move back."""
        if not self._moves:
            raise IndexError("nothing to undo")
        amount, source, target = self._moves.pop()
        self._balances[source] += amount
        self._balances[target] -= amount

    def report(self, file=None):
        """Print one line for each account, in order of name."""
        for name, balance in sorted(self._balances.items()):
            print("%-20s %10d" % (name, balance), file=file)


def read_moves(path, encoding="utf-8"):
    """Yield the moves of a file, one a line."""
    with open(path, encoding=encoding) as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            fields = line.split(",")
            if len(fields) != 3:
                raise ValueError("line %d: expected three fields" % number)
            yield int(fields[0]), fields[1].strip(), fields[2].strip()
'''


@dataclass(frozen=True)
class Case:
    """What is compiled: one engine serves all temperatures."""

    accept: str
    tree: Tree
    draft_quantize: str | None = None  # the head's weights; None: float32


@dataclass(frozen=True)
class Acceptance:
    """What a case came to at one temperature.

    Attributes:
        length: mean acceptance length, tokens a round.
        error: its standard error over prompts.
        rate: share of the drafted tokens that were emitted.
        rounds: that the mean is taken over.
    """

    case: Case
    temperature: float
    length: float
    error: float
    rate: float
    rounds: int


def cases(rules: Iterable[str], trees: Iterable[Tree], draft_quantize: str | None = None) -> list[Case]:
    """Rules and trees that go together, tree by tree.

    "block" judges chains alone; a dynamic tree is not drawn, so "rejection" there is "multi_candidate" by another name.

    Raises:
        ValueError: none do.
    """
    rules, trees = list(rules), list(trees)
    found = [Case(rule, tree, draft_quantize) for tree, rule in product(trees, rules) if _applies(rule, tree)]
    if not found:
        raise ValueError(
            f"expected an accept rule that fits a tree, got {rules} and {[str(tree) for tree in trees]}: "
            '"block" needs a chain, "rejection" a chain or a static tree'
        )
    return found


def _applies(rule: str, tree: Tree) -> bool:
    if rule == "block":
        return tree.is_chain
    return rule != "rejection" or tree.paths is not None


def prompts(count: int = PROMPTS, size: int = PROMPT_SIZE) -> list[str]:
    """Cuts of `SOURCE_TEXT`, evenly spaced, each of ``size`` characters."""
    last = len(SOURCE_TEXT) - size
    return [SOURCE_TEXT[start : start + size] for start in (last * i // (count - 1) for i in range(count))]


def measure(
    case: Case,
    temperatures: Sequence[float] = TEMPERATURES,
    *,
    tokens: int = TOKENS,
    samples: int = SAMPLES,
) -> list[Acceptance]:
    """Complete the prompts at each temperature, with the same seeds in every case.

    Args:
        tokens: of each completion; its last round is cut there.
        samples: completions of each prompt, where the temperature is not 0.
    """
    drafter = Eagle3.from_pretrained(demo.HEAD, tree=case.tree, dtype="float32", quantize=case.draft_quantize)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message='accept="typical"')  # the table says it
        target = Model.from_pretrained(demo.TARGET, dtype="float32")
        engine = Engine(
            target,
            drafter=drafter,
            tokenizer="bytes",
            accept=case.accept,
            slots=SLOTS,
            buckets=(SLOTS,),
            max_len=PROMPT_SIZE + tokens,
            prefill_buckets=(PROMPT_SIZE,),
        )
    with engine:
        return [_at(engine, case, temperature, tokens, samples if temperature else 1) for temperature in temperatures]


def _at(engine: Engine, case: Case, temperature: float, tokens: int, samples: int) -> Acceptance:
    """One temperature: prompt by prompt, then over all."""
    texts = [prompt for prompt in prompts() for _ in range(samples)]
    params = [SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed) for seed in range(len(texts))]
    done = [completion.raise_for_error().metrics for completion in engine.generate(texts, params)]
    parts = [sum(done[start : start + samples], Metrics()) for start in range(0, len(done), samples)]
    whole = sum(parts, Metrics())
    return Acceptance(
        case=case,
        temperature=temperature,
        length=whole.mean_acceptance_length,
        error=standard_error(parts),
        rate=whole.acceptance_rate,
        rounds=whole.num_drafts,
    )


def standard_error(parts: Sequence[Metrics]) -> float:
    """Of the mean acceptance length, by leaving out each prompt in turn (the jackknife).

    Rounds of one prompt are alike, so they do not count as independent.

    Args:
        parts: counts of each prompt, at least two.
    """
    without = [
        sum((part for j, part in enumerate(parts) if j != i), Metrics()).mean_acceptance_length
        for i in range(len(parts))
    ]
    return (len(parts) - 1) / len(parts) ** 0.5 * statistics.stdev(without)


def text(results: Sequence[Acceptance]) -> str:
    """One line a case, and for each temperature: tokens a round, their standard error, share of drafts emitted."""
    temperatures = list(dict.fromkeys(result.temperature for result in results))
    by_case: dict[Case, dict[float, Acceptance]] = {}
    for result in results:
        by_case.setdefault(result.case, {})[result.temperature] = result
    rows = [["tree", "accept rule", "head", *(f"temperature {temperature:g}" for temperature in temperatures)]]
    for case, own in by_case.items():
        cells = [f"{own[t].length:.2f} ± {own[t].error:.2f}  {own[t].rate:4.0%}" for t in temperatures]
        rule = case.accept + " (lossy)" * (case.accept == "typical")
        rows.append([_tree_name(case.tree), rule, case.draft_quantize or "float32", *cells])
    return table(rows)


def _tree_name(tree: Tree) -> str:
    is_long = tree.paths is not None and not tree.is_chain
    return f"static, {tree.nodes} nodes" if is_long else str(tree)


def write_json(path: Path, results: Sequence[Acceptance]) -> None:
    """Environment and results as one JSON object."""
    rows = [asdict(r) | {"case": asdict(r.case) | {"tree": str(r.case.tree)}} for r in results]
    write(path, rows)
