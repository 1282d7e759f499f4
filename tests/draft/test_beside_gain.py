"""Compare how many tokens a round emits with a head, with a look-up, and with both, on edits of code.

pytest -m long -s tests/draft/test_beside_gain.py
"""

from __future__ import annotations

import ast
import configparser
import csv
import difflib
import fractions
import inspect
import optparse
import re
import shutil
import smtplib
import statistics
import tarfile
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jspec import Beside, Drafter, Eagle3, Engine, Metrics, NGram, SamplingParams, Suffix, Tree
from jspec.draft.named import LOOKUP_LENGTH, with_lookup
from jspec.tools import check_head, demo
from jspec.tools.bench.acceptance import standard_error

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.once]

MODULES = (
    configparser,
    csv,
    difflib,
    fractions,
    optparse,
    shutil,
    smtplib,
    statistics,
    tarfile,
    tempfile,
    textwrap,
    zipfile,
)
PROMPTS, TOKENS, SLOTS = 50, 96, 10
LEAST, MOST = 130, 260  # tokens of a function
CHAIN, DYNAMIC, LONG = Tree.chain(4), Tree.topk(16, 4, 4), Tree.chain(LOOKUP_LENGTH)
OPTIONS: dict[str, Any] = dict(slots=SLOTS, max_len=512, buckets=(SLOTS,), prefill_buckets=(512,), prefix_cache=False)
FREE, PRESCRIBED = dict(controls=False), dict(grammar_cells=2**22)  # answers of the target's own, and the edited copies


@cache
def pair() -> Any:
    """Return the embedded target, its tokenizer and its head."""
    return *check_head.load_target(str(demo.TARGET), None, dtype="float32"), Eagle3.from_pretrained(
        demo.HEAD, dtype="float32"
    ).head


def functions(module: ModuleType) -> Iterator[tuple[str, list[str]]]:
    """Yield the source of each function of a module, and the names of its arguments."""
    source = inspect.getsource(module)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            names = [each.arg for each in node.args.args if each.arg not in ("self", "cls")]
            yield ast.get_source_segment(source, node) or "", names


@cache
def edits() -> list[tuple[str, str]]:
    """Return functions of the standard library, each with the beginning of a copy that renames an argument, and the
    rest of this copy.
    """
    words, found = pair()[1], []
    for text, names in (one for module in MODULES for one in functions(module)):
        if names and text.count(names[0]) >= 3 and LEAST <= len(words.encode(text)) <= MOST:
            lines = re.sub(rf"\b{names[0]}\b", f"{names[0]}_", text).split("\n")
            begun = max(2, len(lines) // 5)
            found.append(("\n".join([text, "", "", *lines[:begun], ""]), "\n".join([*lines[begun:], ""])))
    chosen = np.random.default_rng(0).permutation(len(found))[:PROMPTS]
    assert len(chosen) == PROMPTS
    return [found[index] for index in chosen]


@cache
def measured(name: str, *, is_prescribed: bool = False) -> list[tuple[float, float]]:
    """Return mean tokens a round and their standard error over prompts, at temperatures 0 and 1.

    Args:
        is_prescribed: whether a grammar prescribes the rest of the copy as the answer.
    """
    target, words, _ = pair()
    figures, more = [], PRESCRIBED if is_prescribed else FREE
    with Engine(target, drafter=DRAFTERS[name](), tokenizer=words, **OPTIONS | more) as engine:
        for heat in (0.0, 1.0):
            common = dict(max_tokens=TOKENS, temperature=heat, ignore_eos=not is_prescribed)
            forms = [dict(regex=re.escape(rest)) if is_prescribed else {} for _, rest in edits()]
            params = [SamplingParams(**common, **form, seed=seed) for seed, form in enumerate(forms)]
            done = [one.raise_for_error() for one in engine.generate([prompt for prompt, _ in edits()], params)]
            if is_prescribed:
                assert all(rest.startswith(one.text[:-1]) for one, (_, rest) in zip(done, edits(), strict=True))
            parts = [one.metrics for one in done]
            figures.append((sum(parts, Metrics()).mean_acceptance_length, standard_error(parts)))
    kind = "prescribed" if is_prescribed else ""
    print(f"{name:>30} {kind:10}: " + ", ".join(f"{length:.2f} ± {error:.2f}" for length, error in figures))
    return figures


def head(tree: Tree) -> Eagle3:
    return Eagle3(pair()[2], tree)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "head, chain": lambda: head(CHAIN),
    "head, tree": lambda: head(DYNAMIC),
    "n-gram": lambda: NGram(CHAIN),
    "suffix": lambda: Suffix(CHAIN),
    "long n-gram": lambda: NGram(LONG),
    "chain replaced by n-gram": lambda: Beside(head(CHAIN), NGram(CHAIN)),
    "chain replaced by suffix": lambda: Beside(head(CHAIN), Suffix(CHAIN)),
    "n-gram beside chain": lambda: Beside(head(CHAIN), NGram(CHAIN), "beside"),
    "suffix beside chain": lambda: Beside(head(CHAIN), Suffix(CHAIN), "beside"),
    "n-gram beside tree": lambda: Beside(head(DYNAMIC), NGram(CHAIN), "beside"),
    "long n-gram beside chain": lambda: with_lookup(head(CHAIN), "ngram", "beside"),
    "long n-gram beside tree": lambda: with_lookup(head(DYNAMIC), "ngram"),
    "best 16 of both": lambda: Beside(head(DYNAMIC), NGram(LONG), "beside", nodes=16),
    "chain:4 beside 12 nodes": lambda: Beside(head(Tree.topk(12, 4, 4)), NGram(CHAIN), "beside"),
    "chain:8 beside 8 nodes": lambda: Beside(head(Tree.topk(8, 4, 4)), NGram("chain:8"), "beside"),
}


@pytest.mark.parametrize(
    ("both", "alone"),
    [
        *((name, ("head, chain", "n-gram")) for name in ("chain replaced by n-gram", "n-gram beside chain")),
        *((name, ("head, chain", "suffix")) for name in ("chain replaced by suffix", "suffix beside chain")),
        ("n-gram beside tree", ("head, tree", "n-gram")),
        ("long n-gram beside chain", ("head, chain", "long n-gram", "n-gram beside chain")),
        ("long n-gram beside tree", ("head, tree", "long n-gram", "n-gram beside tree")),
    ],
)
def test_look_up_and_head_together_emit_no_fewer_tokens_a_round_than_either(both: str, alone: tuple[str, ...]) -> None:
    for heat, (length, error) in enumerate(measured(both)):
        best = max(measured(name)[heat][0] for name in alone)
        assert length > best - error
        assert "beside chain" not in both or length > best + 0.03, "a round verifies the tokens of both"


def test_default_look_up_beside_a_head_emits_a_third_more_tokens_a_round_where_the_answer_is_the_edit() -> None:
    for kind in ("chain", "tree"):
        for (both, _), (alone, _) in zip(
            measured(f"long n-gram beside {kind}", is_prescribed=True),
            measured(f"head, {kind}", is_prescribed=True),
            strict=True,
        ):
            assert both > 1.3 * alone, kind
    assert measured("long n-gram beside chain")[0][0] > 1.25 * measured("head, chain")[0][0], "answers of the target's"


def test_best_nodes_of_head_and_look_up_emit_more_tokens_a_round_than_as_many_nodes_chosen_otherwise() -> None:
    """All rounds verify 16 nodes: of the head alone, of each part a fixed number, or the best of both."""
    for heat, least in enumerate((1.04, 1.01)):
        others = [
            measured(name)[heat][0] for name in ("head, tree", "chain:4 beside 12 nodes", "chain:8 beside 8 nodes")
        ]
        assert measured("best 16 of both")[heat][0] > least * max(others)
