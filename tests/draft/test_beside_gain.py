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
PROMPTS, TOKENS, SLOTS = 24, 96, 8
LEAST, MOST = 130, 260  # tokens of a function
CHAIN, DYNAMIC = Tree.chain(4), Tree.topk(16, 4, 4)
OPTIONS: dict[str, Any] = dict(slots=SLOTS, max_len=512, buckets=(SLOTS,), prefill_buckets=(512,), prefix_cache=False)


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
def edits() -> list[str]:
    """Return functions of the standard library, each with the beginning of a copy that renames an argument."""
    words, found = pair()[1], []
    for text, names in (one for module in MODULES for one in functions(module)):
        if names and text.count(names[0]) >= 3 and LEAST <= len(words.encode(text)) <= MOST:
            lines = re.sub(rf"\b{names[0]}\b", f"{names[0]}_", text).split("\n")
            found.append("\n".join([text, "", "", *lines[: max(2, len(lines) // 5)], ""]))
    chosen = np.random.default_rng(0).permutation(len(found))[:PROMPTS]
    assert len(chosen) == PROMPTS
    return [found[index] for index in chosen]


@cache
def measured(name: str) -> list[tuple[float, float]]:
    """Return mean tokens a round and their standard error over prompts, at temperatures 0 and 1."""
    target, words, _ = pair()
    figures = []
    with Engine(target, drafter=DRAFTERS[name](), tokenizer=words, controls=False, **OPTIONS) as engine:
        for heat in (0.0, 1.0):
            common = dict(max_tokens=TOKENS, temperature=heat, ignore_eos=True)
            params = [SamplingParams(**common, seed=seed) for seed in range(PROMPTS)]
            parts = [one.raise_for_error().metrics for one in engine.generate(edits(), params)]
            figures.append((sum(parts, Metrics()).mean_acceptance_length, standard_error(parts)))
    print(f"{name:>24}: " + ", ".join(f"{length:.2f} ± {error:.2f}" for length, error in figures))
    return figures


def head(tree: Tree) -> Eagle3:
    return Eagle3(pair()[2], tree)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "head, chain": lambda: head(CHAIN),
    "head, tree": lambda: head(DYNAMIC),
    "n-gram": lambda: NGram(CHAIN),
    "suffix": lambda: Suffix(CHAIN),
    "chain replaced by n-gram": lambda: Beside(head(CHAIN), NGram(CHAIN)),
    "chain replaced by suffix": lambda: Beside(head(CHAIN), Suffix(CHAIN)),
    "n-gram beside chain": lambda: Beside(head(CHAIN), NGram(CHAIN), "beside"),
    "suffix beside chain": lambda: Beside(head(CHAIN), Suffix(CHAIN), "beside"),
    "n-gram beside tree": lambda: Beside(head(DYNAMIC), NGram(CHAIN), "beside"),
}


@pytest.mark.parametrize(
    ("both", "alone"),
    [
        *((name, ("head, chain", "n-gram")) for name in ("chain replaced by n-gram", "n-gram beside chain")),
        *((name, ("head, chain", "suffix")) for name in ("chain replaced by suffix", "suffix beside chain")),
        ("n-gram beside tree", ("head, tree", "n-gram")),
    ],
)
def test_look_up_and_head_together_emit_no_fewer_tokens_a_round_than_either(both: str, alone: tuple[str, ...]) -> None:
    for heat, (length, error) in enumerate(measured(both)):
        best = max(measured(name)[heat][0] for name in alone)
        assert length > best - error
        assert "beside chain" not in both or length > best + 0.05, "a round verifies the tokens of both"
