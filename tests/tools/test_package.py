"""Test the package that users get: the wheel, its metadata and data files, public names, and install hints."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import jspec

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("jspec", "convert", "pallas_kernels")
INSTALLED = {"jspec": "jspec", "convert": "jspec/_convert", "pallas_kernels": "jspec/_kernels"}  # folders of the wheel
SOURCES = (*PACKAGES, "pyproject.toml", "setup.py", "README.md", "LICENSE")
TEXTS = ("*.py", "*.md", "*.ipynb", "*.toml")
INSTALL = re.compile(r"(?:pip3? install|pipx install|uv add|poetry add)(?:\s+-[\w-]+)*\s+[\\\"'`]*jspec")


def run(*words: str | Path, folder: Path, **variables: str) -> str:
    """Run a command without network and without this repository on Python's path; return its standard output."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH" or name in variables}
    done = subprocess.run([str(word) for word in words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, with the setuptools of this environment."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 builds the wheel; it is not installed")
    copy = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    words = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", "out", ".")
    run(sys.executable, *words, folder=copy)
    (built,) = (copy / "out").iterdir()
    return built


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_metadata_has_name_version_licence_python_and_readme(wheel: Path) -> None:
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("jspec-decode", jspec.__version__)
    assert (found["License-Expression"], found["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert found["Description-Content-Type"] == "text/markdown"
    assert found.get_payload() == (REPOSITORY / "README.md").read_text()
    required = {re.split(r"[^\w-]", line)[0] for line in found.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {"jax", "numpy", "flax", "transformers", "tqdm"} <= required and "torch" not in required
    own = [line for line in found.get_all("Requires-Dist", []) if line.startswith("jspec")]
    assert own and all(line.startswith("jspec-decode[") for line in own)
    assert "Typing :: Typed" in found.get_all("Classifier", [])


def test_wheel_holds_every_module_and_data_file_under_the_one_name_jspec(wheel: Path) -> None:
    expected = {
        f"{INSTALLED[top]}/{path.relative_to(REPOSITORY / top)}"
        for top in PACKAGES
        for path in (REPOSITORY / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".md", ".pyc")
    }
    with ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        (top_level,) = (archive.read(name) for name in archive.namelist() if name.endswith("/top_level.txt"))
        texts = {name: archive.read(name).decode() for name in inside if name.endswith(".py")}
    assert inside == expected
    assert {f"{folder}/py.typed" for folder in INSTALLED.values()} <= inside
    data = ("head/model.safetensors", "dflash_head/model.safetensors", "target/tokenizer.json", "LICENSE-PSF")
    assert {f"jspec/tools/demo/{name}" for name in data} <= inside
    assert top_level == b"jspec\n"
    old = re.compile(r"^\s*(?:from|import) (?:convert|pallas_kernels)\b", re.M)
    assert [name for name, text in texts.items() if old.search(text)] == []
    assert old.search((REPOSITORY / "jspec/models/load.py").read_text()), "negative control: sources have such imports"


def test_wheel_installed_alone_runs_the_command_and_has_no_other_package(wheel: Path, tmp_path: Path) -> None:
    """The interpreter below the environment reads no .pth file of it, and so finds no editable installation."""
    target = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", target, wheel, folder=tmp_path)
    here = dict(folder=tmp_path, PYTHONPATH=os.pathsep.join([str(target), *site.getsitepackages()]))
    python = Path(sys._base_executable)  # type: ignore[attr-defined]
    assert run(python, target / "bin" / "jspec", "--version", **here) == f"jspec {jspec.__version__}\n"  # type: ignore[arg-type]
    code = (
        "import importlib.metadata as m, importlib.util as u, jspec, jspec._convert.plan, jspec._kernels as kernels; "
        "from jspec.models.families import Fields, register; assert Fields is jspec._convert.fields.Fields; "
        "print(jspec.__file__, jspec._convert.__file__, kernels.__file__, m.version('jspec-decode')); "
        "print(*(name for name in ('convert', 'pallas_kernels') if u.find_spec(name)))"
    )
    where, others = run(python, "-c", code, **here).splitlines()  # type: ignore[arg-type]
    *paths, version = where.split()
    assert all(path.startswith(str(target)) for path in paths), paths
    assert (version, others) == (jspec.__version__, "")
    assert {path.name.partition("-")[0] for path in target.iterdir()} == {"bin", "jspec", "jspec_decode"}
    words = ("generate", "--target", "demo", "--eagle3", "demo", "--max-tokens", "4", "--temperature", "0")
    said = run(python, "-m", "jspec", *words, "def parse_args(argv", **here)  # type: ignore[arg-type]
    assert said == "=sys.arg\n"
    assert "usage: jspec convert" in run(python, "-m", "jspec._convert", "--help", **here)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["import convert", "import convert.plan as plan", "from convert.plan import(\n a)"])
def test_build_of_an_import_that_cannot_be_renamed_is_refused(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="setup.py imports setuptools 77; it is not installed")
    monkeypatch.setattr("setuptools.setup", lambda **arguments: None)
    renamed = runpy.run_path(str(REPOSITORY / "setup.py"))["with_installed_names"]
    assert (
        renamed("def f():\n    from convert.plan import Plan") == "def f():\n    from jspec._convert.plan import Plan"
    )
    assert renamed("from converted import a\nimport jax") == "from converted import a\nimport jax"
    with pytest.raises(ValueError, match="expected `from convert"):
        renamed(f"import jax\n{line}\n")


def test_dockerfile_copies_what_the_wheel_is_built_from() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert sorted(copied) == sorted(SOURCES), "the test above builds the wheel from these"


def test_public_names_equal_the_names_that_type_checkers_see() -> None:
    tree = ast.parse(Path(jspec.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {name: module for name, module in seen.items() if module != "jspec"} == jspec.MODULES
    assert {*seen, "__version__"} == set(jspec.__all__)
    for name in jspec.__all__:
        assert name in dir(jspec) and getattr(jspec, name) is not None
    assert [name for name in dir(jspec) if name not in jspec.__all__ and not name.startswith("__")] == []
    with pytest.raises(AttributeError, match="'jspec' has no attribute 'Enginge'"):
        jspec.Enginge  # noqa: B018


def test_import_of_jspec_does_not_import_jax() -> None:
    code = (
        "import sys, jspec, jspec.__main__; print('jax' in sys.modules); jspec.Tree; print('jspec.core' in sys.modules)"
    )
    assert run(sys.executable, "-c", code, folder=REPOSITORY, PYTHONPATH=str(REPOSITORY)).split() == ["False", "True"]


def test_install_hints_name_the_folder_and_never_the_package() -> None:
    """Another project owns the package name, so the hints name the folder: pip install -e "." with the extra."""
    folders = (*PACKAGES, "tests", "notebooks")
    texts = [path for folder in folders for kind in TEXTS for path in (REPOSITORY / folder).rglob(kind)]
    texts += [REPOSITORY / "README.md", REPOSITORY / "pyproject.toml", REPOSITORY / ".ci" / "run"]
    assert [str(path) for path in texts if path.exists() and INSTALL.search(" ".join(path.read_text().split()))] == []
    assert len(texts) > 100


@pytest.mark.parametrize("options", ["", "-U ", "-q --upgrade ", "'", '\\"', "--pre '"])
def test_install_hint_check_of_a_package_name_finds_it(options: str) -> None:
    """Negative control of the test above."""
    assert INSTALL.search("pip install " + options + "jspec[grammar]")
    assert not INSTALL.search("pip install -q -e . && .venv/bin/jspec demo")
    assert not INSTALL.search('pip install -e ".[grammar]"')
