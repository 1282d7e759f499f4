"""Trains a head for the embedded target on a CPU, and compares it with the embedded head."""

from __future__ import annotations

import json
import re
import sysconfig
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jspec import Eagle3, Engine, SamplingParams, Tree, train
from jspec.tools import demo

KEPT = 256  # prompts that heads are compared on
INNER = 12000  # prompts from within blocks; those at the beginning of a block are fewer, and all are used
START, LONGEST = 60, 300  # least and most characters of a prompt, which ends with its line
TOKENS = 96  # most tokens of an answer
HEAT = 0.75  # temperature of the answers that are not greedy
DEPTH = 4  # draft tokens of a round when heads are compared
OPTIONS: dict[str, Any] = dict(length=256, batch=8, optimizer="muon", learning_rate=4e-3, held_out=0.03, eval_rows=16)
OPTIONS |= dict(keep_activations=True)
SHAPE: dict[str, Any] = dict(copy_layers=True, eagle31=True, feature_layers=(3, 5, 7), draft_vocab=1536)
FIRST: dict[str, Any] = dict(ttt=1, steps=420, eval_every=210, warmup=0.05, final=1.0)
SECOND: dict[str, Any] = dict(ttt=3, steps=360, eval_every=180, warmup=0.0)


class Prompts(NamedTuple):
    """Beginnings of functions and classes of the standard library.

    Attributes:
        kept: prompts from the beginning of blocks, which are parts of a module between two empty lines.
        outer: other ones from there.
        inner: prompts from within blocks.
    """

    kept: list[str]
    outer: list[str]
    inner: list[str]


def prompts() -> Prompts:
    """Return prompts of the standard library of this interpreter, which all differ."""
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted([*library.glob("*.py"), *library.glob("[a-z]*/[a-z]*.py")])
    sources = [path.read_text(encoding="utf-8", errors="ignore") for path in modules]
    blocks = [block for source in sources for block in source.split("\n\n\n") if re.match("class |def |@", block)]
    places = [(source, one.start()) for source in sources for one in re.finditer("^ +(class|def) ", source, re.M)]
    parts = [textwrap.dedent(source[start : start + LONGEST]) for source, start in places]
    outer = _beginnings(blocks, seed=0)
    inner = _beginnings((part for part in parts if re.match("class |def ", part)), seed=1)
    known = set(outer)
    return Prompts(outer[:KEPT], outer[KEPT:], [text for text in inner if text not in known][:INNER])


def _beginnings(parts: Iterable[str], *, seed: int) -> list[str]:
    """Return the different beginnings of some parts in a random order."""
    found = sorted({text for text in (part[: part.find("\n", START) + 1] for part in parts) if 0 < len(text) < LONGEST})
    np.random.default_rng(seed).shuffle(found)
    return found


def answer(file: Path, asked: Sequence[tuple[str, float]]) -> None:
    """Write prompts with the target's answers, each at its temperature, as texts of which all tokens count."""
    params = [SamplingParams(max_tokens=TOKENS, temperature=heat, seed=seed) for seed, (_, heat) in enumerate(asked)]
    with Engine.from_pretrained(demo.TARGET, slots=64, buckets=(64,), max_len=256, controls=False) as engine:
        done = engine.generate([prompt for prompt, _ in asked], params)
    texts = [prompt + one.text for (prompt, _), one in zip(asked, done, strict=True) if one.text]
    np.random.default_rng(0).shuffle(texts)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def acceptance(folder: Path, kept: Sequence[str]) -> tuple[float, float]:
    """Return the mean acceptance length of a head's chains at temperature 0, and its standard error over prompts."""
    head = Eagle3.from_pretrained(folder, tree=Tree.chain(DEPTH), dtype="float32")
    options: dict[str, Any] = dict(slots=16, buckets=(16,), max_len=256, dtype="float32", controls=False)
    with Engine.from_pretrained(demo.TARGET, drafter=head, **options) as engine:
        done = engine.generate(list(kept), SamplingParams(max_tokens=TOKENS, temperature=0))
    accepted = np.array([one.metrics.num_accepted_tokens for one in done])
    rounds = np.array([one.metrics.num_drafts for one in done])
    mean = accepted.sum() / rounds.sum()
    return float(1 + mean), float(np.sqrt(np.sum((accepted - mean * rounds) ** 2)) / rounds.sum())


def train_from_scratch(out: Path) -> None:
    """Let the target write texts, train a head on them, compare it with the embedded one, and print the figures.

    The first run covers one draft token, at a constant rate, on texts from within blocks. The second one covers three,
    at a falling rate, half of it on texts like those that the heads are compared on.

    Args:
        out: folder for texts and heads.
    """
    out.mkdir(parents=True, exist_ok=True)
    kept, outer, inner = prompts()
    half, heats = len(inner) // 2, (0.0, HEAT)
    answer(out / "first.jsonl", [(prompt, heat) for prompt in inner[:half] for heat in heats])
    greedy = [(prompt, 0.0) for prompt in inner[half:]]
    answer(out / "second.jsonl", [(prompt, heat) for prompt in outer for heat in heats] + greedy)
    began = time.process_time()
    first = train.fit(demo.TARGET, out / "first.jsonl", out / "first", **FIRST, **SHAPE, **OPTIONS)
    second = train.fit(demo.TARGET, out / "second.jsonl", out / "head", init=str(first.out), **SECOND, **OPTIONS)
    print(f"trained in {(time.process_time() - began) / 60:.1f} minutes of CPU time; held-out texts: {second.figures}")
    for name, folder in (("new head", second.out), ("embedded head", demo.HEAD)):
        mean, error = acceptance(folder, kept)
        print(f"{name}: {mean:.2f} +- {error:.2f} tokens a round, chain of {DEPTH} at temperature 0")
