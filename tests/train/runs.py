"""Small training runs: a target folder, data, and the calls that train."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jspec.train import Result, fit
from jspec.train.program import TrainingProgram
from tests.support import folders

TARGET = {**folders.TARGET, "vocab_size": 256, "eos_token_id": 10}
OPTIONS: dict[str, Any] = dict(
    steps=12, length=32, batch=2, ttt=2, eval_every=4, learning_rate=5e-3, draft_vocab=24, held_out=0.2
)
OPTIONS |= dict(feature_layers=(0, 1, 3), tokenizer="bytes")
NO_SHAPE: dict[str, Any] = dict(feature_layers=None, draft_vocab=None)  # for runs that go on with a head

UNTRACED: dict[str, Any] = dict(  # options that change nothing in a program but the shapes of its arguments
    **NO_SHAPE, init=None, held_out=0.0, eval_every=1, regenerate=False, max_tokens=1, temperature=1.0
)

_known: dict[Any, TrainingProgram] = {}


class KnownTraining(TrainingProgram):
    """A program that is not traced again if an earlier one of the process has the same settings."""

    def __init__(self, method: Any, target: Any, head: Any, steps: int, mesh: Any = None) -> None:
        super().__init__(method, target, head, steps, mesh)
        settings = type(method), replace(method.config, **UNTRACED), self._states, steps, mesh
        known = _known.setdefault(settings, self)
        self._run, self._measure = known._run, known._measure


def target_folder(folder: Path) -> Path:
    """Write a random target of three layers whose tokens are bytes."""
    return folders.write(folder, TARGET, folders.target_tensors(TARGET))


def data_file(path: Path, lines: int = 40) -> Path:
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, size))) for size in rng.integers(8, 32, lines)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def train(folder: Path, out: str, **options: Any) -> Result:
    """Train on the target and the data of a folder."""
    return fit(folder / "target", folder / "data.jsonl", folder / out, **{**OPTIONS, **options})


def weights(head: Path) -> dict[str, np.ndarray]:
    return folders.stored(head)


def start(folder: Path, out: str, **options: Any) -> subprocess.Popen[bytes]:
    """Begin the run of `train` in a process of its own."""
    code = (
        "import json, sys; from pathlib import Path; from jspec.step.compile_cache import keep_compiled; "
        "from tests.train import runs; keep_compiled(None); "
        "runs.train(Path(sys.argv[1]), sys.argv[2], **json.loads(sys.argv[3]))"
    )
    words = [sys.executable, "-c", code, str(folder), out, json.dumps(options)]
    return subprocess.Popen(words, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
