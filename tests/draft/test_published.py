"""The table of published heads: its rows, the names that it matches, `jspec heads`, and what `--draft auto` says."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path

import pytest

from jspec.__main__ import main
from jspec.draft import choice
from jspec.draft.auto import DRAFTERS
from jspec.draft.formats.mtp_format import FAMILIES
from jspec.draft.mtp import MTP
from jspec.draft.published import PublishedHead, heads_of, published_heads
from jspec.models import families
from jspec.tools import generate
from jspec.tools.parser import Parser
from tests.support import folders

pytestmark = pytest.mark.once
ROWS = published_heads()


def test_published_heads_have_methods_and_targets_that_jspec_reads_and_a_source_with_a_commit() -> None:
    known, methods = families.model_types(), {*DRAFTERS, MTP.method} - {"target"}
    for row in ROWS:
        assert row.model_type in known and row.method in methods
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{7} [\w./]+", row.source) and row.checked == "names"
        assert re.fullmatch(r"[\w-]+/[\w.-]+", row.target) and re.fullmatch(r"[\w-]+/[\w.-]+", row.head)
        assert (row.head == row.target) == (row.method == MTP.method)
        assert row.method != MTP.method or row.model_type in FAMILIES
    assert max(Counter((row.target, row.head) for row in ROWS).values()) == 1
    types = {row.target: {other.model_type for other in ROWS if other.target == row.target} for row in ROWS}
    assert all(len(found) == 1 for found in types.values())


@pytest.mark.parametrize("row", {row.method: row for row in ROWS}.values(), ids=lambda row: row.method)
def test_published_heads_option_is_one_of_the_command_line(row: PublishedHead) -> None:
    parser = Parser()
    generate.add_arguments(parser)
    arguments = parser.parse_args(["--target", row.target, *row.option.split(), "prompt"])
    assert getattr(arguments, row.method) == row.head


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("RedHatAI/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("somebody/qwen3-8b-awq", "Qwen/Qwen3-8B"),
        ("nvidia/Qwen3-8B-NVFP4@refs/pr/1", "Qwen/Qwen3-8B"),
        ("/models/Qwen3-8B-bf16/", "Qwen/Qwen3-8B"),
        (Path("/models/gpt-oss-20b"), "openai/gpt-oss-20b"),
    ],
)
def test_published_heads_are_found_by_exact_name_without_owner_folder_and_storage(name: str, target: str) -> None:
    assert {row.target for row in heads_of(name)} == {target}
    assert len(heads_of(name)) == sum(row.target == target for row in ROWS) > 0


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B-Base", "Qwen3", "Qwen3-8", "8B", "my-Qwen3-8B", "Qwen3-8B-FP8-tuned", "Qwen3-8B-GGUF", ""]
)
def test_published_heads_of_another_name_that_holds_a_targets_are_none(name: str) -> None:
    assert heads_of(name) == []


def test_heads_command_lists_a_targets_heads_and_says_that_they_were_not_loaded(capsys: pytest.CaptureFixture) -> None:
    assert main(["heads", "meta-llama/Llama-3.1-8B-Instruct"]) == 0
    printed = capsys.readouterr().out
    rows = heads_of("Llama-3.1-8B-Instruct")
    assert len(rows) >= 3 and all(row.option in printed and row.source in printed for row in rows)
    assert sum("Llama-3.1-8B-Instruct " in line for line in printed.splitlines()) == len(rows)
    assert "Not loaded by us" in printed and "jspec info --check HEAD TARGET" in printed
    assert main(["heads"]) == 0
    printed = capsys.readouterr().out
    assert all(row.head in printed for row in ROWS)


def test_heads_command_for_an_unknown_target_fails_and_names_like_ones(capsys: pytest.CaptureFixture) -> None:
    assert main(["heads", "Qwen/Qwen3-8B-Base"]) == 1
    assert capsys.readouterr().out.startswith("no head of Qwen/Qwen3-8B-Base is in the table")
    assert main(["heads", "Qwen3-8"]) == 1
    assert "like names: Qwen/Qwen3-8B" in capsys.readouterr().out


def test_automatic_choice_says_which_heads_are_published_and_downloads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, find = [], choice.hub.find
    monkeypatch.setattr(choice.hub, "find", lambda path: asked.append(path) or find(path))
    known, other = tmp_path / "Qwen3-8B-FP8", tmp_path / "Qwen3-8B-Base"
    for folder in (known, other):
        folders.write(folder, folders.TARGET, folders.target_tensors())
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        assert str(choice.choose_drafter(known)) == "--suffix"
    assert all(row.option in caplog.text for row in heads_of("Qwen3-8B")) and asked == [known]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        choice.choose_drafter(other)
    assert "--suffix" in caplog.text and "published" not in caplog.text
