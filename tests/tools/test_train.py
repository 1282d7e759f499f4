"""The command `jspec train`, and the picture of a run."""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from jspec import Eagle3, plot
from jspec.__main__ import main
from jspec.tools.command_line import make_parser
from jspec.tools.generate import make_drafter
from jspec.tools.train import GROUPS, OPTIONS
from jspec.train import TrainConfig
from jspec.train.journal import Journal
from jspec.train.loop import Loop
from jspec.train.measured import Figures
from tests.train import runs


def test_train_command_trains_resumes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs.target_folder(tmp_path / "target")
    runs.data_file(tmp_path / "data.jsonl")
    sizes = ("--steps", "4", "--length", "32", "--batch", "2", "--ttt", "2", "--eval-every", "2", "--held-out", "0.2")
    paths = [word for name in ("target", "out") for word in (f"--{name}", str(tmp_path / name))]
    words = ["train", *paths, "--data", str(tmp_path / "data.jsonl"), "--tokenizer", "bytes", *sizes]
    words += ["--draft-vocab", "24"]  # the target has 3 layers
    assert main([*words, "--plot", str(tmp_path / "run.png")]) == 0
    said = capsys.readouterr()
    assert "acceptance" in said.out and f"--eagle3 {tmp_path / 'out'}" in said.out
    assert "update 1 of 4: loss" in said.err and "tokens/s" in said.err and "held-out rows" in said.err
    assert re.search(r"update 4 of 4, held-out rows: .* predicted acceptance \d\.\d\d \(teacher-forced hits", said.err)
    assert (tmp_path / "run.png").stat().st_size > 1000
    assert main(words) == 2
    assert "pass --resume" in capsys.readouterr().err
    assert main([*words, "--decay", "0.8", "--method", "dflash"]) == 2  # the option's default, but no option of DFlash
    assert "train: --decay: expected none with method 'dflash'" in capsys.readouterr().err
    words[words.index("--steps") + 1] = "6"
    assert main([*words, "--resume"]) == 0
    assert "6 updates" in capsys.readouterr().out
    drafter = make_drafter(make_parser().parse_args(["generate", "--target", paths[1], "--eagle3", paths[3], "abc"]))
    assert isinstance(drafter, Eagle3), "as the last line recommends"


def test_train_command_that_a_signal_ends_prints_one_line_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update_and_signal(self: Any, state: Any, step: int) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return update(self, state, step)

    runs.target_folder(tmp_path / "target")
    runs.data_file(tmp_path / "data.jsonl", lines=8)
    words = ["train", "--target", str(tmp_path / "target"), "--data", str(tmp_path / "data.jsonl"), "--tokenizer"]
    words += ["bytes", "--out", str(tmp_path / "out"), "--steps", "2", "--length", "32", "--ttt", "1", "--batch", "1"]
    words += ["--feature-layers", "0", "1", "3"]
    update = Loop._update
    monkeypatch.setattr(Loop, "_update", update_and_signal)
    assert main(words) == 130
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("jspec: interrupted after update 1 of 2, whose state is in ")
    assert said.out == ""
    monkeypatch.undo()
    assert main([*words, "--resume"]) == 0


def test_every_field_of_the_options_has_a_help_text() -> None:
    assert list(OPTIONS) == [field.name for field in dataclasses.fields(TrainConfig)]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(OPTIONS)


def test_training_picture_shows_losses_and_acceptance_of_training_and_held_out_rows(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", 0)
    for step in (1, 2, 3):
        journal.add("train", step, Figures(3.0 - step, (0.5,), 1.0 + step / 4))
    journal.add("eval", 3, Figures(0.25, (0.5,), 1.5))
    ax = plot.training(journal.path)
    other = ax.figure.axes[1]
    drawn = [[line.get_xydata().tolist() for line in axes.lines if len(line.get_xdata())] for axes in (ax, other)]  # type: ignore[union-attr]
    assert drawn[0] == [[[1, 2.0], [2, 1.0], [3, 0.0]], [[3, 0.25]]]
    assert drawn[1] == [[[1, 1.25], [2, 1.5], [3, 1.75]], [[3, 1.5]]]
    assert other.get_ylim() == (1, 2)  # noise of a hundredth is no success
    assert len(ax.get_legend().get_texts()) == 4  # type: ignore[union-attr]
