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
from jspec.step.executables import Executables
from tests.support import folders, small

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
    with pytest.raises(ValueError, match=r"compile_cache: expected None or a folder's path, got 3"):
        Engine(small.target(), compile_cache=3)
    with pytest.raises(FileExistsError):
        Engine(small.target(), compile_cache=tmp_path / "file")
