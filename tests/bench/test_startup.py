"""`jspec bench startup` and the folder that keeps compiled programs: the second process compiles nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jspec import Engine
from jspec.__main__ import main
from jspec.step.executables import Executables
from tests.support import folders, small

pytestmark = pytest.mark.once

MODEL = ("--shape", "tiny", "--dtype", "float32")
COMMAND = ("bench", "startup", *MODEL, "--batch", "1", "--prefill", "8", "--max-len", "32")
CONFIG = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the process's compile cache folder after a test, so other tests' programs are not stored."""
    before = {name: getattr(jax.config, name) for name in CONFIG}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.long
def test_startup_second_process_loads_every_program_from_cache(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    results, cache = tmp_path / "results.json", tmp_path / "cache"
    assert main([*COMMAND, "--tree", "chain:1", "--json", str(results), "--cache", str(cache)]) == 0
    said, written = capfd.readouterr(), json.loads(results.read_text())
    cold, warm = written["results"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    compiled = len(list(cache.glob("*-cache")))
    assert cold["asked"] - cold["hits"] == compiled > 2, "negative control: the first one had to compile"
    assert warm["hits"] == warm["asked"] == cold["asked"]
    programs = [
        f"chain:1: {name}" for name in ("round[1]", "prefill[8]", "update_page_table", "controls", "write_pending_rows")
    ]
    assert sorted(cold["compile"]) == sorted(warm["lower"]) == sorted(programs)
    assert sum(warm["compile"].values()) < sum(cold["compile"].values()) / 2
    stages = ["process, imports", "device", "weights", "chain:1: engine"]
    assert list(warm["stages"]) == [*stages, "chain:1: first answer"]
    assert warm["ready"] == pytest.approx(sum(warm["stages"][stage] for stage in stages))
    for row in (*programs, *stages):
        assert any(line.strip().startswith(row) for line in said.out.splitlines())
    assert f"{cold['hits']} of {cold['asked']} (cold), {warm['asked']} of {warm['asked']} (warm)" in said.out
    assert said.err.count("compiled round[1] in") == 2, "progress"
    assert written["case"]["options"]["buckets"] == [1] and any(cache.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cache", "FULL"), "expected a new or an empty folder"),
        (("--batch", "2,1"), "buckets: expected ascending"),
        (("--prefill", "0"), "prefill_buckets: expected ascending"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_startup_wrong_option_is_refused_before_a_process_starts(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("a process was started"))
    (tmp_path / "entry").touch()
    assert main([*COMMAND, *(str(tmp_path) if word == "FULL" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_startup_failing_process_raises_error_with_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: ended)
    assert main(COMMAND) == 2
    assert "ended with 1" in capsys.readouterr().err


@pytest.mark.usefixtures("restored")
def test_engine_compile_cache_folder_holds_compiled_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache works even if the process compiled its first program without a folder."""

    def compiled(*args: Any, **options: Any) -> None:
        jax.jit(lambda x: x * 7).lower(3.0).compile()
        raise ValueError("that will do")

    monkeypatch.setattr(Executables, "__init__", compiled)
    for folder, expected in ((None, 0), (tmp_path / "a" / "b", 1), (str(tmp_path / "c"), 1)):
        with pytest.raises(ValueError, match="that will do"):
            Engine(small.target(), compile_cache=folder)
        own = 0 if folder is None else len(list(Path(folder).glob("jit__lambda*-cache")))
        assert own == expected


@pytest.mark.usefixtures("restored")
def test_generate_compile_cache_is_used_before_weights_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def load(*args: Any, **options: Any) -> None:
        seen.append(jax.config.jax_compilation_cache_dir)
        raise ValueError("that will do")

    monkeypatch.setattr("jspec.models.load.load", load)
    target = folders.write(tmp_path / "target", folders.TARGET, folders.target_tensors(folders.TARGET))
    for words in ((), ("--compile-cache", str(tmp_path / "kept"))):
        assert main(["generate", "--target", str(target), *words, "hello"]) == 2
    assert seen == [None, str(tmp_path / "kept")]


def test_engine_wrong_compile_cache_folder_raises_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"compile_cache: expected None, False or a folder's path, got 3"):
        Engine(small.target(), compile_cache=3)
    with pytest.raises(ValueError, match=r"compile_cache: expected a folder that exists or can be made, got .*file"):
        Engine(small.target(), compile_cache=tmp_path / "file")
