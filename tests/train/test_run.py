"""Test whole runs: they learn, go on after being killed with the same numbers, and lose nothing by a fault."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.draft.dflash import DFlash
from jspec.draft.dspark import DSpark
from jspec.draft.eagle import Eagle3
from jspec.draft.medusa import Medusa
from jspec.models.decoder import Model
from jspec.step.compile_cache import keep_compiled
from jspec.tools.testing import check_lossless
from jspec.train import fit, loop, run
from jspec.train.checkpoints import Checkpoints
from jspec.train.journal import read_journal
from jspec.train.run import Result
from tests.train import runs
from tests.train.test_data import ChatBytes

pytestmark = pytest.mark.once


@pytest.fixture(scope="module", autouse=True)
def known_programs() -> Iterator[None]:
    """Trace the programs of equal runs once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "TrainingProgram", runs.KnownTraining)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, data, and the head of an unbroken run."""
    made = tmp_path_factory.mktemp("runs")
    keep_compiled(None)  # runs in another process have the same programs
    runs.target_folder(made / "target")
    runs.data_file(made / "data.jsonl")
    return made


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> Result:
    return runs.train(folder, "unbroken")


def measured(head: Path) -> list[dict[str, Any]]:
    """Return the measurements of a run without its speed."""
    found = read_journal(head / "training" / "journal.jsonl")
    return [{name: value for name, value in entry.items() if name != "tokens_per_second"} for entry in found]


def assert_same_run(head: Path, other: Path) -> None:
    """Assert that two runs have the same numbers bit for bit: the best heads, the last states, the measurements."""
    own, expected = runs.weights(head), runs.weights(other)
    assert own.keys() == expected.keys() and all(own[name].tobytes() == expected[name].tobytes() for name in own)
    assert measured(head) == measured(other)


def test_a_run_lowers_the_loss_and_writes_the_head_of_its_best_evaluation(folder: Path, unbroken: Result) -> None:
    entries = measured(unbroken.out)
    assert [entry["step"] for entry in entries if entry["kind"] == "eval"] == [4, 8, 12]
    assert [entry["step"] for entry in entries if entry["kind"] == "train"] == list(range(1, 13))
    losses = [entry["loss"] for entry in entries if entry["kind"] == "eval"]
    assert losses[-1] < losses[0] - 0.01
    best = max((entry for entry in entries if entry["kind"] == "eval"), key=lambda entry: entry["acceptance"])
    assert unbroken.figures.acceptance == best["acceptance"] and unbroken.steps == 12
    head = Eagle3.from_pretrained(unbroken.out, tree="chain:2").head
    assert head.config.draft_vocab_size == 24 and 10 in np.asarray(head.draft_to_target)  # the EOS token
    config = json.loads((unbroken.out / "config.json").read_text())
    assert config["eos_token_id"] == 10 and config["max_position_embeddings"] == 32


@pytest.mark.parametrize(
    ("method", "reader", "options"),
    [
        ("eagle3", Eagle3, {"eagle31": True}),
        pytest.param("dflash", DFlash, {"feature_layers": (1, 2), "layers": 1}, marks=pytest.mark.long),
        ("dspark", DSpark, {"feature_layers": (1, 2), "layers": 1, "markov_rank": 4}),
        pytest.param("medusa", Medusa, {"feature_layers": None}, marks=pytest.mark.long),
    ],
)
def test_heads_of_each_method_are_trained_and_draft(
    folder: Path, method: str, reader: Any, options: dict[str, Any]
) -> None:
    vocabulary = {} if method == "eagle3" else {"draft_vocab": None}
    result = runs.train(folder, method, method=method, steps=8, **options, **vocabulary)
    losses = [entry["loss"] for entry in measured(result.out) if entry["kind"] == "eval"]
    assert losses[-1] < losses[0]
    drafter = reader.from_pretrained(result.out, tree="chain:2")
    target = Model.from_pretrained(folder / "target")
    options = dict(slots=1, max_len=32, max_tokens=8, controls=False)
    assert check_lossless(drafter, target, [[100, 101, 102]], **options) == {0.0: [], 1.0: []}
    if method == "eagle3":
        assert drafter.head.config.norm_output and drafter.head.config.fc_norm
        again = runs.train(folder, "again", init=str(result.out), steps=8, **runs.NO_SHAPE)
        first = measured(again.out)[0]
        assert first["loss"] < measured(result.out)[0]["loss"]  # it goes on from trained weights


def kill_when(folder: Path, out: str, wait: Any) -> None:
    """Begin a run in a process, and kill it when a function says so."""
    process = runs.start(folder, out)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and not wait() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -9, "the run ended before it was killed"


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_numbers(folder: Path, unbroken: Result) -> None:
    journal = folder / "killed" / "training" / "journal.jsonl"
    kill_when(folder, "killed", lambda: journal.is_file() and journal.read_text().count("\n") >= 7)
    assert Checkpoints(folder / "killed" / "training" / "checkpoints").steps[-1] < 12
    result = runs.train(folder, "killed", resume=True)
    assert result.figures == unbroken.figures
    assert_same_run(folder / "killed", unbroken.out)
    other = shutil.copytree(unbroken.out, folder / "other")
    tensors = runs.weights(other)
    tensors["norm.weight"][0] = np.nextafter(tensors["norm.weight"][0], np.float32(2))
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(AssertionError):
        assert_same_run(other, unbroken.out)  # one bit differs


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt, which a process that a shell starts in the background ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_run_that_a_signal_ends_between_two_records_goes_on_with_the_same_numbers(
    folder: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    update, handlers = loop.Loop._update, [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]

    def update_and_signal(self: Any, state: Any, step: int) -> Any:
        if step == 6:
            signal.raise_signal(number)
        return update(self, state, step)

    options: dict[str, Any] = dict(eval_every=40)  # a record of each two updates, and one evaluation
    expected = runs.train(folder, f"expected{number}", **options)
    monkeypatch.setattr(loop.Loop, "_update", update_and_signal)
    name = f"signalled{number}"
    with pytest.raises(KeyboardInterrupt, match=r"after update 7 of 12, whose state is in .*: go on with --resume"):
        runs.train(folder, name, **options)
    monkeypatch.undo()
    assert handlers == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    assert f"a second {number.name} ends it at once" in caplog.text
    checkpoints = Checkpoints(folder / name / "training" / "checkpoints")
    assert checkpoints.steps == [7] and [entry["step"] for entry in measured(folder / name)] == [2, 4, 6]
    assert runs.train(folder, name, resume=True, **options).figures == expected.figures
    assert_same_run(folder / name, expected.out)


@pytest.mark.long
def test_runs_killed_at_ten_random_times_go_on_with_the_same_numbers(folder: Path, unbroken: Result) -> None:
    rng = np.random.default_rng(0)
    began = time.monotonic()
    process = runs.start(folder, "timed")
    process.communicate()
    whole = time.monotonic() - began
    for index in range(10):
        name, until = f"random{index}", time.monotonic() + rng.uniform(0.05, 0.95) * whole
        process = runs.start(folder, name)
        time.sleep(max(0.0, until - time.monotonic()))
        process.kill()
        process.communicate()
        runs.train(folder, name, resume=(folder / name / "training").is_dir())
        assert_same_run(folder / name, unbroken.out)


def test_a_run_does_not_go_on_with_other_options_data_or_target(folder: Path, unbroken: Result) -> None:
    assert runs.train(folder, "unbroken", resume=True).figures == unbroken.figures  # nothing is left to do
    with pytest.raises(ValueError, match=r"learning_rate: expected 0.005, with which .*unbroken was begun, got 0.01"):
        runs.train(folder, "unbroken", resume=True, learning_rate=1e-2)
    with pytest.raises(ValueError, match=r"steps: expected at least 12, with which .*unbroken was begun, got 11"):
        runs.train(folder, "unbroken", resume=True, steps=11)
    (folder / "moved").mkdir()
    runs.data_file(folder / "moved" / "data.jsonl", lines=30)
    (folder / "moved" / "target").symlink_to(folder / "target")
    (folder / "moved" / "unbroken").symlink_to(folder / "unbroken")
    with pytest.raises(ValueError, match=r"data: expected"):
        runs.train(folder / "moved", "unbroken", resume=True)
    (folder / "swapped").mkdir()
    (folder / "swapped" / "data.jsonl").symlink_to(folder / "data.jsonl")
    (folder / "swapped" / "unbroken").symlink_to(folder / "unbroken")
    tensors = runs.folders.target_tensors(runs.TARGET)
    runs.folders.write(folder / "swapped" / "target", runs.TARGET, {n: 2 * tensor for n, tensor in tensors.items()})
    with pytest.raises(ValueError, match=r"target: expected"):
        runs.train(folder / "swapped", "unbroken", resume=True)
    with pytest.raises(FileExistsError, match="pass --resume, or name another"):
        runs.train(folder, "unbroken")
    with pytest.raises(FileNotFoundError, match="got none; leave out --resume"):
        runs.train(folder, "nowhere", resume=True)


def test_a_run_goes_on_to_more_updates_at_the_learning_rate_of_the_longer_run(folder: Path) -> None:
    level: dict[str, Any] = dict(warmup=0.0, final=1.0)  # the learning rate of a run of any length
    whole = runs.train(folder, "whole_at_once", steps=8, **level)
    runs.train(folder, "in_two_parts", steps=4, **level)
    assert runs.train(folder, "in_two_parts", steps=8, resume=True, **level).steps == 8
    assert_same_run(folder / "in_two_parts", whole.out)
    assert json.loads((whole.out / "training" / "run.json").read_text()) == json.loads(
        (folder / "in_two_parts" / "training" / "run.json").read_text()
    )
    with pytest.raises(ValueError, match=r"steps: expected at least 8"):
        runs.train(folder, "in_two_parts", steps=4, resume=True, **level)


def test_a_run_does_not_go_on_with_other_words_for_the_target_or_one_other_weight(
    folder: Path, unbroken: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "prepare", lambda *arguments: pytest.fail("data was made"))
    for options in ({"quantize": "int8"}, {"tokenizer": ChatBytes()}, {"seed": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}: expected .*unbroken was begun"):
            runs.train(folder, "unbroken", resume=True, **options)
    (folder / "nudged").mkdir()
    (folder / "nudged" / "data.jsonl").symlink_to(folder / "data.jsonl")
    (folder / "nudged" / "unbroken").symlink_to(folder / "unbroken")
    tensors = runs.folders.target_tensors(runs.TARGET)
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] += 1
    runs.folders.write(folder / "nudged" / "target", runs.TARGET, tensors)
    with pytest.raises(ValueError, match="target: expected"):
        runs.train(folder / "nudged", "unbroken", resume=True)


def test_a_run_that_was_refused_begins_with_the_same_command_when_the_cause_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[int]()

    def answer(data: Path, out: Path, *arguments: Any) -> Path:
        """Take the data as the target's answers; note whether there were some already."""
        kept.append(out.is_file())
        return shutil.copy(data, out)

    (tmp_path / "target").symlink_to(runs.target_folder(tmp_path / "made"))
    file = runs.data_file(tmp_path / "data.jsonl", lines=8)
    good = file.read_text()
    file.write_text(good + "[]\n")
    with pytest.raises(ValueError, match="line 9: "):
        runs.train(tmp_path, "head")
    assert not (tmp_path / "head").exists()
    file.write_text(good)
    with pytest.raises(NotImplementedError, match="ascending states"):  # before any update
        runs.train(tmp_path, "head", feature_layers=[3, 1, 0])
    assert not (tmp_path / "head" / "training" / "journal.jsonl").exists()
    target = Model.from_pretrained(tmp_path / "target")
    tokenizer = ChatBytes()
    tokenizer.eos_id = 250
    options = {**runs.OPTIONS, "eval_every": 12, "tokenizer": tokenizer}
    result = fit(target, file, tmp_path / "head", **options)
    ids = np.asarray(Eagle3.from_pretrained(result.out, tree="chain:2").head.draft_to_target)
    assert 250 in ids and result.coverage < 1
    again = runs.train(tmp_path, "again", init=str(result.out), eval_every=12, **runs.NO_SHAPE)
    assert again.coverage == pytest.approx(result.coverage)
    monkeypatch.setattr(run, "regenerate", answer)
    own: dict[str, Any] = dict(regenerate=True, eval_every=12, max_tokens=6)
    for layers, temperature, known in (
        ((3, 1, 0), 0.5, 0),
        ((3, 1, 0), 0.5, 1),
        ((3, 1, 0), 0.7, 0),
        ((0, 1, 3), 0.7, 1),
    ):
        refused = nullcontext() if layers == (0, 1, 3) else pytest.raises(NotImplementedError, match="ascending")
        with refused:
            runs.train(tmp_path, "own", feature_layers=layers, temperature=temperature, **own)
        assert kept.pop() == known  # answers that were made with the same options are kept
    with pytest.raises(FileExistsError, match="pass --resume"):
        fit(target, file, tmp_path / "head", **options)


def test_a_run_without_held_out_rows_keeps_its_last_head_and_has_nothing_left_to_do(folder: Path) -> None:
    result = runs.train(folder, "whole", held_out=0)
    assert {entry["kind"] for entry in measured(result.out)} == {"train"}
    assert runs.train(folder, "whole", held_out=0, resume=True).figures == result.figures
    kept = (result.out / "training" / "data" / "train.tokens.npy").read_bytes()
    (folder / "data.jsonl").rename(folder / "elsewhere.jsonl")
    try:
        with pytest.raises(FileNotFoundError, match="got no such file; check --data"):
            runs.train(folder, "whole", held_out=0, resume=True)
    finally:
        (folder / "elsewhere.jsonl").rename(folder / "data.jsonl")
    assert (result.out / "training" / "data" / "train.tokens.npy").read_bytes() == kept


@pytest.mark.long
def test_a_run_on_the_targets_own_answers_goes_on_with_the_same_answers(folder: Path) -> None:
    options: dict[str, Any] = dict(regenerate=True, max_tokens=6, steps=2)
    result = runs.train(folder, "own", **options)
    answers = (result.out / "training" / "regenerated.jsonl").read_text()
    assert answers.count("documents") == answers.count("\n") > 20
    assert runs.train(folder, "own", resume=True, **options).figures == result.figures
    assert (result.out / "training" / "regenerated.jsonl").read_text() == answers


def test_options_and_data_that_do_not_fit_the_target_are_refused_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(ValueError, match="draft_vocab: expected at most 256, the target's vocabulary, got 300"):
        runs.train(folder, "large", draft_vocab=300)
    own: dict[str, Any] = dict(draft_vocab=None, feature_layers=(1, 2))
    with pytest.raises(ValueError, match=r"mask_token: expected at most 255, the last id .*, got 256"):
        runs.train(folder, "large", method="dflash", mask_token=256, **own)
    with pytest.raises(ValueError, match="markov_rank: expected at most 16, the channels of a hidden state, got 17"):
        runs.train(folder, "large", method="dspark", markov_rank=17, **own)
    with pytest.raises(ValueError, match=r"feature layers .*do not exist"):
        runs.train(folder, "layers", feature_layers=(0, 1, 9))
    with pytest.raises(ValueError, match="unexpected keyword argument 'lerning_rate'"):
        runs.train(folder, "typo", lerning_rate=1)
    with pytest.raises(ValueError, match="anchors: expected none with method 'eagle3'"):
        runs.train(folder, "unused", anchors=4)
    assert not any((folder / name).exists() for name in ("large", "layers", "typo", "unused"))


def test_a_run_whose_memory_runs_out_names_the_options_to_lower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any, *arguments: Any) -> None:
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(loop.Loop, "_update", update)
    message = "RESOURCE_EXHAUSTED: Out of memory allocating 1050096933109416 bytes."
    with pytest.raises(
        ValueError, match=r"^train: length: expected rows .* an update of \d+ .*; lower length or batch"
    ):
        runs.train(folder, "memory")
    message = "INTERNAL: another error"
    with pytest.raises(jax.errors.JaxRuntimeError, match="another error"):
        runs.train(folder, "internal")


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_documents(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, seen = loop.rows_of, []

    def poisoned(packed: Any, chosen: Any, count: int) -> Any:
        """Give the seventh batch an embedding row of NaN."""
        rows = find(packed, chosen, count)
        seen.append(packed.lines_of(chosen))
        return rows.replace(tokens=rows.tokens * 0 + 255) if len(seen) == 9 else rows

    monkeypatch.setattr(loop, "rows_of", poisoned)
    tensors = runs.folders.target_tensors(runs.TARGET)
    tensors["model.embed_tokens.weight"][255] = np.nan
    (folder / "nan").mkdir()
    runs.data_file(folder / "nan" / "data.jsonl")
    runs.folders.write(folder / "nan" / "target", runs.TARGET, tensors)
    with pytest.raises(loop.LossError) as raised:
        runs.train(folder / "nan", "head", held_out=0)
    assert f"update 9: expected a finite loss and gradient, got others on the documents of lines {seen[8][0]}, " in str(
        raised.value
    )
    assert Checkpoints(folder / "nan" / "head" / "training" / "checkpoints").steps == [4, 8]
    assert all(np.isfinite(value).all() for value in runs.weights(folder / "nan" / "head").values())


@pytest.fixture
def small_files() -> Iterator[Any]:
    """A function that lets no file grow beyond a number of bytes until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_while_data_is_packed_is_an_error_that_names_it(folder: Path, small_files: Any) -> None:
    small_files(900)
    with pytest.raises(OSError, match="File too large"):
        runs.train(folder, "unpacked")
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert runs.train(folder, "unpacked", resume=True).steps == 12


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of orbax's tasks
@pytest.mark.parametrize("part", ["head", "checkpoint"])
def test_a_disk_that_is_full_stops_the_run_and_loses_nothing(
    folder: Path, unbroken: Result, small_files: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    name, evaluations = f"full_{part}", 0
    measure = loop.Loop.measure

    def measure_and_fill(self: Any, state: Any) -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 2:
            small_files(2000)
        return measure(self, state)

    monkeypatch.setattr(loop.Loop, "measure", measure_and_fill)
    if part == "checkpoint":
        monkeypatch.setattr("jspec.train.run.write.write_head", lambda *files: None)
    with pytest.raises(OSError, match=r"File too large.*the checkpoint of step 4 is whole: make room and go on"):
        runs.train(folder, name)
    monkeypatch.undo()
    small_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    if part == "head":
        assert Eagle3.from_pretrained(folder / name, tree="chain:2")  # that of the first evaluation
    runs.train(folder, name, resume=True)
    assert measured(folder / name) == measured(unbroken.out)
