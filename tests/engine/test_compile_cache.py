"""The folder that keeps compiled programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jspec import Engine
from jspec.__main__ import main
from jspec.step.compile_cache import keep_compiled, user_folder
from jspec.step.executables import Executables
from tests.support import engines, folders

pytestmark = pytest.mark.once

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


@pytest.mark.usefixtures("restored")
def test_engine_with_a_compile_cache_folder_stores_compiled_programs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache works even if the process compiled its first program without a folder."""

    def compiled(*args: Any, **options: Any) -> None:
        jax.jit(lambda x: x * 7).lower(3.0).compile()
        raise ValueError("that will do")

    monkeypatch.setattr(Executables, "__init__", compiled)
    for folder, expected in ((False, 0), (tmp_path / "a" / "b", 1), (str(tmp_path / "c"), 1)):
        with pytest.raises(ValueError, match="that will do"):
            Engine(engines.target(), compile_cache=folder)
        own = 0 if folder is False else len(list(Path(folder).glob("jit__lambda*-cache")))
        assert own == expected


@pytest.mark.usefixtures("restored")
def test_generate_command_sets_the_compile_cache_before_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def load(*args: Any, **options: Any) -> None:
        seen.append(jax.config.jax_compilation_cache_dir)
        raise ValueError("that will do")

    monkeypatch.setattr("jspec.models.load.load", load)
    target = folders.write(tmp_path / "target", folders.TARGET, folders.target_tensors(folders.TARGET))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    for words in ((), ("--compile-cache", str(tmp_path / "kept"))):
        assert main(["generate", "--target", str(target), "--tokenizer", "bytes", *words, "hello"]) == 2
    assert seen == [str(user_folder()), str(tmp_path / "kept")] and user_folder().is_relative_to(tmp_path)


@pytest.mark.usefixtures("restored")
def test_train_command_sets_the_compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def fit(*args: Any, **options: Any) -> None:
        seen.append(jax.config.values["jax_compilation_cache_dir"])
        raise ValueError("that will do")

    monkeypatch.setattr("jspec.train.run.fit", fit)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    assert main(["train", "--target", "none", "--data", "none", "--out", str(tmp_path / "out")]) == 2
    assert seen == [str(user_folder())]


def test_engine_with_a_wrong_compile_cache_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"compile_cache: expected None, False or a folder's path, got 3"):
        Engine(engines.target(), compile_cache=3)
    with pytest.raises(ValueError, match=r"compile_cache: expected a folder that exists or can be made, got .*file"):
        Engine(engines.target(), compile_cache=tmp_path / "file")


@pytest.mark.usefixtures("restored")
def test_compile_cache_default_folder_is_private_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    keep_compiled(None)
    assert jax.config.values["jax_compilation_cache_dir"] == str(user_folder())
    assert user_folder().stat().st_mode & 0o077 == 0
    keep_compiled(tmp_path / "mine")
    keep_compiled(None)  # a folder that was chosen before stays in use
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mine")


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_compile_cache_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """Whoever can write to the folder can run code in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    user_folder().mkdir(parents=True)
    user_folder().chmod(mode)
    keep_compiled(None)
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert "run chmod 700" in caplog.text


@pytest.mark.usefixtures("restored")
def test_compile_cache_without_a_writable_home_is_off_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    jax.config.update("jax_compilation_cache_dir", None)
    keep_compiled(None)
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert "compiled programs are not kept" in caplog.text
