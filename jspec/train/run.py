"""Sets up a training run, and runs it: the public call `fit`."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.hub import find
from jspec.core.shorten import short
from jspec.engine.tokenizer import Tokenizer, check_size, eos_ids, load_tokenizer
from jspec.models.decoder import Model
from jspec.train import write
from jspec.train.checkpoints import Checkpoints, write_errors
from jspec.train.config import TrainConfig
from jspec.train.journal import Journal
from jspec.train.loop import Loop
from jspec.train.material import Material, draft_vocabulary, prepare
from jspec.train.measured import Figures
from jspec.train.method import Method
from jspec.train.methods import METHODS
from jspec.train.program import Program, mesh_of
from jspec.train.regenerate import regenerate

STATE, ABOUT = "training", "run.json"  # folder, within that of the head, of what a run needs to go on; its description


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        out: folder of the head, for `from_pretrained` of its method.
        steps: number of updates.
        figures: measured on the held-out rows at the best evaluation, whose head was kept; without held-out rows, on
            the rows of the last updates.
        coverage: share of the tokens that count which the draft vocabulary has.
        journal: file with a line of JSON for each measurement.
    """

    out: Path
    steps: int
    figures: Figures
    coverage: float
    journal: Path


@dataclass(frozen=True)
class Pair:
    """A target, its tokenizer, and its folder (None: it was given as a model)."""

    target: Model
    tokenizer: Tokenizer
    folder: Path | None


def fit(
    target: str | Path | Model,
    data: str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    tokenizer: Any = None,
    dtype: str | None = None,
    **options: Any,
) -> Result:
    """Train a draft head for a target.

    The head is written at each evaluation that is the best so far, in the format of its method's authors. What a run
    needs to go on after an interruption is in the subfolder `training`, which may be deleted when the run is over.

    Args:
        target: folder or hub id of the target, or the target itself, which then needs a tokenizer.
        data: file of JSON lines (`jspec.train.data`).
        out: folder for the head.
        resume: whether to go on with the run that was begun there, with the same options; its numbers are those of a
            run without interruption, bit for bit.
        tokenizer: as in `Engine.from_pretrained`; None: the target's.
        dtype: dtype of the target and of the head's products; None: float32 on CPU, bfloat16 elsewhere.
        options: fields of `TrainConfig`.

    Raises:
        ValueError: an option is wrong, lines of the data are bad, the head does not fit the target, the run to resume
            is another, or the loss is not finite; the last message names the documents.
        FileExistsError: there is a head or a run already, and ``resume`` is False.
        OSError: a file cannot be written; earlier checkpoints and heads are whole.
    """
    try:
        config = TrainConfig(**options)
    except TypeError as error:
        raise ValueError(f"train: {error}; the options are the fields of jspec.train.TrainConfig") from None
    out = Path(out)
    _check_folder(out, resume)
    pair = _load(target, tokenizer, dtype)
    method = METHODS[config.method](config)
    if config.init is None:
        method.check(pair.target)
    vocab = pair.target.config.vocab_size
    material = prepare(_data(pair, Path(data), out, config), pair.tokenizer, vocab, config, out / STATE / "data")
    head, coverage = _head(method, pair, material)
    steps = config.steps or math.ceil(config.epochs * len(material.train) / config.batch)
    _check_same(out / STATE / ABOUT, _describe(config, pair.target, material, steps))
    program = Program(method, pair.target, head, steps, mesh_of(config.devices))
    state, checkpoints = program.start(head), Checkpoints(out / STATE / "checkpoints")
    state = checkpoints.restore(state) if checkpoints.steps else state
    journal = Journal(out / STATE / "journal.jsonl", int(state.step))
    tokens = write.special_ids(pair.folder) if pair.folder is not None else {}

    def export(head: Any) -> None:
        with write_errors(out, checkpoints.steps[-1:]):
            write.write_head(out, *method.files(head, pair.target, tokens), method.weights_file)

    figures = Loop(config, material, program, steps).run(state, checkpoints, journal, export)
    return Result(out, steps, figures, coverage, journal.path)


def _check_folder(out: Path, resume: bool) -> None:
    """Raise OSError if a new run finds a folder that is not empty, or a run that goes on finds none."""
    if resume and not (out / STATE).is_dir():
        raise FileNotFoundError(f"{out}: expected a run to resume, got none; leave out --resume to begin one")
    if not resume and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out}: expected a new folder, got one with files; pass --resume, or name another")


def _load(target: str | Path | Model, tokenizer: Any, dtype: str | None) -> Pair:
    folder = None if isinstance(target, Model) else find(target)
    model = target if isinstance(target, Model) else Model.from_pretrained(find(target), dtype=dtype)
    made = load_tokenizer(folder if tokenizer is None else tokenizer)
    if made is None:
        raise ValueError(
            'train: tokenizer: expected one, because the target has none; pass tokenizer= ("bytes" if tokens are bytes)'
        )
    check_size(made, model.config.vocab_size)
    return Pair(model, made, folder)


def _eos(pair: Pair) -> tuple[int, ...]:
    return () if pair.folder is None else eos_ids(pair.folder, pair.tokenizer, pair.target.config.vocab_size)


def _data(pair: Pair, data: Path, out: Path, config: TrainConfig) -> Path:
    """Return the file to train on: the given one, or that with the target's answers."""
    if not config.regenerate:
        return data
    (out / STATE).mkdir(parents=True, exist_ok=True)
    return regenerate(data, out / STATE / "regenerated.jsonl", pair.target, pair.tokenizer, _eos(pair), config)


def _head(method: Method, pair: Pair, material: Material) -> tuple[Any, float]:
    """Make the head, or load the one to go on with; return it with the coverage of its draft vocabulary."""
    config, vocab = method.config, pair.target.config.vocab_size
    if config.init is not None:
        return method.load(config.init, pair.target), 1.0
    if not method.has_vocabulary:
        return method.create(pair.target, np.arange(vocab, dtype=np.int32)), 1.0
    ids, coverage = draft_vocabulary(material.train, config.draft_vocab, vocab, _eos(pair))
    return method.create(pair.target, ids), coverage


def _describe(config: TrainConfig, target: Model, material: Material, steps: int) -> dict[str, Any]:
    """Return what must be equal when a run goes on, as JSON values."""
    sample = np.asarray(jax.device_get(target.norm)).tobytes() + np.asarray(jax.device_get(target.embed[:8])).tobytes()
    about = {"steps": steps, "target": zlib.crc32(sample), "data": material.describe()}
    return {**config.to_json(), **about, "steps": steps}


def _check_same(file: Path, about: dict[str, Any]) -> None:
    """Write the description of a new run, or raise ValueError if that of the run to resume is another."""
    if not file.is_file():
        file.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    for name, value in about.items():
        if before.get(name) != value:
            raise ValueError(
                f"train: {name}: expected {short(before.get(name))}, with which {file.parent.parent} was begun, got "
                f"{short(value)}; resume with the same options, or begin a new run with init= of this head"
            )
