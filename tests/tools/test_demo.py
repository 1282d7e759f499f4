"""`jspec demo`, and `jspec info` of the embedded head."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from jspec.__main__ import main
from jspec.tools import demo


@pytest.mark.once
def test_demo_command_prints_that_both_texts_are_equal() -> None:
    out = io.StringIO()
    assert demo.run(out) == 0
    lines = out.getvalue().splitlines()
    assert lines[-1] == "the two texts are equal"
    assert any("EAGLE-3 chain of 3" in line for line in lines)
    assert "[" in out.getvalue()


def test_info_command_of_the_embedded_head_prints_eagle3(capsys: pytest.CaptureFixture) -> None:
    assert main(["info", str(demo.HEAD)]) == 0
    out = capsys.readouterr().out
    assert "EAGLE-3" in out
    assert out.splitlines()[-1].startswith("kernels: references on cpu")


def test_info_command_missing_folder_prints_the_folder_and_exits_2(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert main(["info", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
