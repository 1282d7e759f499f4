"""Sets up a training run, and runs it: the public call `fit`."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.hub import find
from jspec.core.shorten import short
from jspec.engine.text.tokenizer import Tokenizer, check_size, load_tokenizer, warn_if_replaced
from jspec.engine.text.tokenizer_files import eos_ids
from jspec.models.decoder import Model
from jspec.train import write
from jspec.train.checkpoints import Checkpoints, write_errors
from jspec.train.config import TrainConfig, refuse_unused
from jspec.train.data import check_file
from jspec.train.files import write_text
from jspec.train.journal import Journal
from jspec.train.loop import Loop, Meter
from jspec.train.material import Material, coverage_of, draft_vocabulary, prepare
from jspec.train.measured import Figures
from jspec.train.method import Method
from jspec.train.methods import METHODS
from jspec.train.program import TrainingProgram, mesh_of
from jspec.train.regenerate import regenerate

STATE, ABOUT = "training", "run.json"  # folder, within that of the head, of what a run needs to go on; its description
DATA, CHECKPOINTS, JOURNAL = "data", "checkpoints", "journal.jsonl"  # parts of that folder
ANSWERS = "regenerated"  # name of the files of the target's answers and of their description
ANSWERED = ("target", "tokenizer", "quantize", "data", "length", "max_tokens", "temperature")  # what answers depend on
ENDS = ("steps", "epochs")  # options that say when a run ends, which may come later when it goes on
BLOCK = 2**24  # bytes of the data that are read at a time for its checksum
CORNER = 4  # values along each axis of an array of the target by which it is recognised


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
class TrainingTarget:
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
    quantize: str | None = None,
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
            run without interruption, bit for bit. With more steps or epochs it goes on to these, and from there on
            follows the learning rate of the longer run.
        tokenizer: as in `Engine.from_pretrained`; None: the target's.
        dtype: dtype of the target and of the head's products; None: float32 on CPU, bfloat16 elsewhere.
        quantize: how the target's weights are quantised, as in `Model.from_pretrained`; the head's are not.
        options: fields of `TrainConfig`.

    Raises:
        ValueError: an option is wrong or has no effect, lines of the data are bad, the head does not fit the target,
            the run to resume is another, or the loss is not finite; the last message names the documents.
        FileExistsError: there is a head or a run already, and ``resume`` is False.
        OSError: a file cannot be written; earlier checkpoints and heads are whole.
        KeyboardInterrupt: Ctrl-C, or SIGTERM once updates are made. Then the running update has been finished and its
            state written, unless the signal came twice. Before, answers that were written are kept.
    """
    try:
        config = TrainConfig(**options)
    except TypeError as error:
        raise ValueError(f"train: {error}; the options are the fields of jspec.train.TrainConfig") from None
    refuse_unused(config, options)
    out, data = Path(out), Path(data)
    check_file(data)
    _check_folder(out, resume)
    pair = _load(target, tokenizer, dtype=dtype, quantize=quantize)
    method = METHODS[config.method](config)
    if config.init is None:
        method.check(pair.target)
    mesh = mesh_of(config.devices)
    tokens = write.special_ids(pair.folder) if pair.folder is not None else {}
    ends = {name: value for name, value in config.to_json().items() if name in ENDS}
    about = {**config.to_json(), "quantize": quantize, **_identity(pair.target, tokenizer, data)}
    about = {name: value for name, value in about.items() if name not in ENDS}
    with _described(out / STATE, about):
        data = _answers(method, pair, data, out / STATE, about) if config.regenerate else data
        material = prepare(data, pair.tokenizer, pair.target.config.vocab_size, config, out / STATE / DATA)
        head, coverage = _head(method, pair, material)
        method.files(head, pair.target, tokens)  # a head that the format cannot hold is refused before it is trained
        steps = config.steps or math.ceil(config.epochs * len(material.train) / config.batch)
        _check_same(out / STATE / ABOUT, {"updates": steps, "rows": material.describe(), **ends})
    checkpoints = Checkpoints(out / STATE / CHECKPOINTS)

    def export(head: Any) -> None:
        files = method.files(head, pair.target, tokens)
        with write_errors(out, checkpoints.steps[-1:]):
            write.write_head(out, *files, method.weights_file)

    with out_of_memory_named(config):
        program = TrainingProgram(method, pair.target, head, steps, mesh)
        state, measured = program.start(head), None
        if checkpoints.steps:
            state, measured = checkpoints.restore(state)
        journal = Journal(out / STATE / JOURNAL, int(state.step))
        figures = Loop(config, material, program, steps).run(state, Meter(measured), checkpoints, journal, export)
    return Result(out, steps, figures, coverage, journal.path)


def _check_folder(out: Path, resume: bool) -> None:
    """Raise OSError if a new run finds a folder that is not empty, or a run that goes on finds none."""
    if resume and not (out / STATE).is_dir():
        raise FileNotFoundError(f"{out}: expected a run to resume, got none; leave out --resume to begin one")
    begun = (out / STATE / ABOUT).is_file()
    if not resume and out.exists() and (not out.is_dir() or begun or any(path.name != STATE for path in out.iterdir())):
        raise FileExistsError(f"{out}: expected a new folder, got one with files; pass --resume, or name another")


def _load(target: str | Path | Model, tokenizer: Any, **options: str | None) -> TrainingTarget:
    folder = None if isinstance(target, Model) else find(target)
    model = target if isinstance(target, Model) else Model.from_pretrained(find(target), **options)
    made = load_tokenizer(folder if tokenizer is None else tokenizer)
    if made is None:
        raise ValueError(
            'train: tokenizer: expected one, because the target has none; pass tokenizer= ("bytes" if tokens are bytes)'
        )
    check_size(made, model.config.vocab_size)
    if folder is not None:
        warn_if_replaced(made, folder)
    return TrainingTarget(model, made, folder)


def _eos(pair: TrainingTarget) -> tuple[int, ...]:
    """Return the tokens that end texts."""
    return eos_ids(pair.folder, pair.tokenizer, pair.target.config.vocab_size)


def _answers(method: Method, pair: TrainingTarget, data: Path, folder: Path, about: dict[str, Any]) -> Path:
    """Return the file of the data with the target's answers; answers that were made otherwise are deleted first."""
    answers, described = (folder / f"{ANSWERS}.{kind}" for kind in ("jsonl", "json"))
    options = {name: about[name] for name in ANSWERED}
    if not described.is_file() or json.loads(described.read_text(encoding="utf-8")) != options:
        answers.unlink(missing_ok=True)
        write_text(described, json.dumps(options))
    return regenerate(data, answers, pair.target, pair.tokenizer, _eos(pair), method.config)


def _head(method: Method, pair: TrainingTarget, material: Material) -> tuple[Any, float]:
    """Make the head, or load the one to go on with; return it with the coverage of its draft vocabulary."""
    config, vocab = method.config, pair.target.config.vocab_size
    if config.init is not None:
        head = method.load(config.init, pair.target)
        ids = getattr(head, "draft_to_target", None)
        return head, 1.0 if ids is None else coverage_of(material.train, np.asarray(ids), vocab)
    if not method.has_vocabulary:
        return method.create(pair.target, np.arange(vocab, dtype=np.int32)), 1.0
    ids, coverage = draft_vocabulary(material.train, config.draft_vocab, vocab, _eos(pair))
    return method.create(pair.target, ids), coverage


def _identity(target: Model, tokenizer: Any, data: Path) -> dict[str, Any]:
    """Return JSON values that differ for another target (a few values of each array), tokenizer (its name) or data."""
    corners = jax.jit(lambda leaves: [leaf[(slice(CORNER),) * leaf.ndim] for leaf in leaves])
    values = b"".join(np.asarray(leaf).tobytes() for leaf in jax.device_get(corners(jax.tree.leaves(target))))
    is_named = tokenizer is None or isinstance(tokenizer, str | Path)
    name = None if tokenizer is None else str(tokenizer) if is_named else type(tokenizer).__name__
    checksum = 0
    with data.open("rb") as file:
        while block := file.read(BLOCK):
            checksum = zlib.crc32(block, checksum)
    return {"target": zlib.crc32(values), "tokenizer": name, "data": checksum}


@contextlib.contextmanager
def _described(folder: Path, about: dict[str, Any]) -> Iterator[None]:
    """Describe a run before its data is made; a new run that is refused in the context may begin again with others.

    Args:
        folder: folder of what the run needs to go on; without a description, its files are of no run and deleted,
            except answers of the target.
        about: what must be equal when a run goes on, as JSON values.
    """
    file = folder / ABOUT
    is_new = not file.is_file()
    if is_new:
        for part in (DATA, CHECKPOINTS):
            shutil.rmtree(folder / part, ignore_errors=True)
        (folder / JOURNAL).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    _check_same(file, about)
    try:
        yield
    except (ValueError, NotImplementedError):
        if is_new:
            file.unlink()
            shutil.rmtree(folder / DATA, ignore_errors=True)
            with contextlib.suppress(OSError):  # what was there before, and answers of the target, stay
                folder.rmdir()
                folder.parent.rmdir()
        raise


@contextlib.contextmanager
def out_of_memory_named(config: TrainConfig) -> Iterator[None]:
    """Name the options to lower if the device's memory runs out."""
    try:
        yield
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"train: length: expected rows of which an update of {config.batch} fits into the device's memory, got "
            f"{config.length} tokens a row; lower length or batch, or divide the rows over more devices"
        ) from error


def _check_same(file: Path, about: dict[str, Any]) -> None:
    """Add to the description of a run, or raise ValueError if that of the run to resume is another."""
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name, value in about.items():
        if name == "updates" and before.get(name, value) > value:
            raise ValueError(
                f"train: steps: expected at least {before[name]}, with which {file.parent.parent} was begun, got "
                f"{value}; resume with as many or more, or begin a new run"
            )
        if name not in (*ENDS, "updates") and name in before and before[name] != value:
            raise ValueError(
                f"train: {name}: expected {short(before[name])}, with which {file.parent.parent} was begun, got "
                f"{short(value)}; resume with the same options, or begin a new run with init= of this head"
            )
    if before != before | about:
        write_text(file, json.dumps(before | about, indent=1) + "\n")
