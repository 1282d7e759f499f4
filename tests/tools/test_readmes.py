"""Test READMEs, pages and notebooks: commands parse, Python names, options and paths exist, examples of pages run."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import jspec
from jspec.core.config import EngineConfig
from jspec.core.foreign_names import FOREIGN_NAMES
from jspec.draft.formats import head_layers
from jspec.models import families
from jspec.models.families.llama import Llama
from jspec.server.ask.fields import CHAT, read_fields
from jspec.server.http.errors import ApiError
from jspec.step import side
from jspec.tools.command_line import make_parser
from jspec.train import TrainConfig
from tests.support import engines

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).resolve().parent.parent.parent
READMES = [
    REPOSITORY / folder / "README.md"
    for folder in (
        ".",
        "jspec",
        "jspec/distributed",
        "jspec/draft",
        "jspec/models/families",
        "jspec/server",
        "jspec/train",
        "tests",
        "tests/data/golden",
    )
]
PAGES = [
    *sorted((REPOSITORY / "notebooks").glob("*.md")),
    *(REPOSITORY / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")),
]
LONGEST = 150  # largest number of lines of the first README
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
LONG = ("training.md", "speed.md")  # examples that train a head, and that compile a pair as the README's does
EXAMPLES = [
    pytest.param(path, marks=[pytest.mark.long] * (path.name in LONG), id=path.name)
    for path in PAGES
    if "```python" in path.read_text()
]

each_document = pytest.mark.parametrize(
    "path", READMES + PAGES + NOTEBOOKS, ids=lambda path: str(path.relative_to(REPOSITORY))
)


def text_of(path: Path) -> str:
    """Return the text of a README, or of a notebook's text cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def blocks(text: str, language: str) -> list[str]:
    """Return fenced blocks of a language; the language "" selects blocks without one."""
    return [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if kind == language]


def inline_code(text: str) -> list[str]:
    """Return the words between backticks and the targets of links outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", prose) + re.findall(r"\]\(([^)\s]+)\)", prose)


def wrong_paths(text: str, folder: Path) -> list[str]:
    """Return paths that exist neither from the README's folder nor from the repository's root."""
    words = [word for word in inline_code(text) if re.fullmatch(r"[\w./-]+", word)]
    paths = [word for word in words if "/" in word or re.search(r"\.(py|md|ipynb|json)$", word)]
    return [path for path in paths if not any((base / path).exists() for base in (folder, REPOSITORY))]


def commands(text: str) -> list[str]:
    """Return command lines of `jspec` from fenced blocks and inline code; join lines that end in a backslash."""
    lines = "\n".join(blocks(text, "")).replace("\\\n", " ").splitlines() + inline_code(text)
    found = [re.search(r"(?:^|/| )jspec ([a-z].*)", line) for line in lines]
    return [match[1].strip() for match in found if match]


def parses(command: str) -> bool:
    """Return whether the command line accepts a command; of a command without arguments, whether it exists."""
    words = shlex.split(command)
    names = [word for word in words if re.fullmatch("[a-z]+", word)]
    try:
        make_parser().parse_args([*words, "--help"] if words == names else words)  # --help needs no required arguments
    except SystemExit as stop:
        return stop.code == 0
    return True


def resolve(node: ast.expr) -> Any:
    """Return the object that an expression like `jspec.a.b` names, or None for other expressions.

    Raises:
        AttributeError: there is no such object.
    """
    if isinstance(node, ast.Name):
        return jspec if node.id == "jspec" else None
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value)
        return None if owner is None else getattr(owner, node.attr)
    return None


def wrong_names(source: str) -> list[str]:
    """Return names of jspec that do not exist, and keyword arguments that their function does not take."""
    found = []
    for node in ast.walk(ast.parse(source)):
        try:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jspec"):
                exec(ast.unparse(node), {})
            if isinstance(node, ast.Attribute):
                resolve(node)
            called = resolve(node.func) if isinstance(node, ast.Call) else None
        except (AttributeError, ImportError) as error:
            found.append(str(error))
            continue
        if called is not None:
            found += [f"{ast.unparse(node.func)}: {name}" for name in wrong_keywords(node, called)]
    return list(dict.fromkeys(found))


def wrong_keywords(call: ast.Call, called: Any) -> list[str]:
    parameters = inspect.signature(called).parameters
    config = TrainConfig if called.__module__.startswith("jspec.train") else EngineConfig
    allowed = set(parameters) | (set(config.__dataclass_fields__) if "options" in parameters else set())
    return [keyword.arg for keyword in call.keywords if keyword.arg and keyword.arg not in allowed]


@each_document
def test_paths_in_each_document_exist(path: Path) -> None:
    assert wrong_paths(text_of(path), path.parent) == []


@each_document
def test_commands_in_each_document_parse(path: Path) -> None:
    assert [command for command in commands(text_of(path)) if not parses(command)] == []


@each_document
def test_python_names_and_options_in_each_document_exist(path: Path) -> None:
    assert [name for block in blocks(text_of(path), "python") for name in wrong_names(block)] == []


@pytest.mark.parametrize("path", EXAMPLES)
def test_python_blocks_of_each_page_run_in_their_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_small(path, blocks(text_of(path), "python"), monkeypatch)


def test_python_block_with_a_wrong_statement_ends_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    with pytest.raises(AssertionError, match="a wrong block"):
        run_small(READMES[0], ["import jspec", "assert jspec.Tree.chain(4).depth == 3, 'a wrong block'"], monkeypatch)


def run_small(path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Python blocks in one namespace, with engines whose programs compile sooner."""
    small: dict[str, Any] = dict(controls="regex" in "".join(sources), prefill_buckets=(128,))
    monkeypatch.setattr(jspec.Engine, "from_pretrained", partial(jspec.Engine.from_pretrained, **small))
    monkeypatch.setattr(side, "Executables", engines.KnownExecutables)  # examples have engines of the same sizes
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, str(path), "exec"), names)


def test_first_readme_first_python_block_prints_one_text_twice(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's greedy text once from `generate` and once from `stream`, from programs that compile sooner."""
    run_small(READMES[0], blocks(text_of(READMES[0]), "python")[:1], monkeypatch)
    printed = capsys.readouterr().out
    text, length = re.fullmatch(r"(.*) ([\d.]+)\n\1", printed, re.S).groups()  # type: ignore[union-attr]
    assert len(text) > 64 and float(length) > 1


def test_first_readme_of_at_most_150_lines_names_every_command() -> None:
    text = text_of(READMES[0])
    assert len(text.splitlines()) <= LONGEST
    assert {command.split()[0] for command in commands(text)} == {
        "demo",
        "info",
        "generate",
        "chat",
        "serve",
        "convert",
        "bench",
        "train",
        "heads",
    }
    assert blocks(text, "python")


def test_documents_list_the_registered_families_of_targets_and_of_head_layers() -> None:
    assert f"\n\n{families.table()}\n\n" in text_of(REPOSITORY / "notebooks" / "targets.md")
    (of_heads,) = re.findall(r"speculators, with layers of (.*?), quantised", text_of(READMES[0]), re.S)
    assert re.findall(r"`(\w+)`", of_heads) == list(head_layers.FAMILIES)


def test_limits_of_the_first_readme_are_refused_by_name() -> None:
    (limits,) = re.findall(r"\*\*Not supported:\*\* (.*?)\n- ", text_of(READMES[0]), re.S)
    assert "beam search" in limits and FOREIGN_NAMES["num_beams"].startswith("no such option")
    with pytest.raises(ApiError, match="models of texts alone"):
        read_fields({"image_url": "https://example.org/a.png"}, CHAT)
    assert limits.startswith("images,")


def test_table_of_extras_has_those_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (`[^|]*`) \| [^|]+ \|$", text_of(REPOSITORY / "notebooks" / "install.md"), re.M)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(project["optional-dependencies"])


def test_recipes_of_targets_parse_and_name_every_family() -> None:
    text = text_of(REPOSITORY / "notebooks" / "targets.md")
    recipes = re.findall(r"^\| ([^|]+) \| `(--target [^`]+)`[^|]*\| [^|]*GB[^|]* \|$", text, re.M)
    assert [line for _, line in recipes if not parses(f"serve {line}")] == []
    assert not parses("serve --target a --suffix --tree"), "negative control"
    named = " ".join(name.replace("*", "") for name, _ in recipes)
    published = {re.split(r"[ ;,]", line.strip("| "))[0] for line in families.table().splitlines()[2:]}
    assert len(published) > 10 and [name for name in sorted(published) if name not in named] == []


def test_list_of_files_to_read_has_as_many_files_and_lines_as_it_says() -> None:
    text = text_of(REPOSITORY / "jspec" / "README.md")
    section = text.partition("## Read it in 26 files")[2].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", section)
    lines = sum(len((REPOSITORY / "jspec" / file).read_text().splitlines()) for file in files)
    (said,) = re.findall(r"26 files of ([\d,]+) lines", section)
    assert len(set(files)) == len(files) == 26
    assert lines == pytest.approx(int(said.replace(",", "")), rel=0.05)


def test_table_of_families_has_each_model_type_once_and_no_family_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    before = families.table()
    named = re.findall(r"`(\w+)`", before)
    assert sorted(named) == sorted(["model_type", *families.model_types()])

    class Mine(Llama):
        published = "Mine"

    monkeypatch.setitem(families.FAMILIES, "mine", Mine())
    assert families.table() == before
    Mine.__module__ = f"{families.__name__}.mine"
    assert families.table() == f"{before}\n| Mine | `mine` |".replace(  # rows are in the order of the files' names
        "\n| MiniMax", "\n| Mine | `mine` |\n| MiniMax"
    ).removesuffix("\n| Mine | `mine` |")


def test_example_of_a_family_is_the_whole_file_that_it_names() -> None:
    """The example leaves out docstrings and the import of annotations."""
    path = REPOSITORY / "jspec" / "models" / "families" / "README.md"
    (example,), file = blocks(path.read_text(), "python"), path.with_name("seed.py").read_text()
    assert ast.dump(ast.parse(example)) == ast.dump(
        ast.parse(re.sub(r'^ *""".*?"""\n|^from __future.*?\n', "", file, flags=re.M))
    )
    assert f"{len(file.splitlines())} lines with its docstrings" in path.read_text()


@pytest.mark.parametrize("name", ["jspec/engine/nowhere.py", "nowhere.md", "engine/"])
def test_readme_check_of_missing_paths_finds_each_one(name: str) -> None:
    """Negative control; the path `engine/` exists relative to `jspec/README.md` but not to the first README."""
    assert wrong_paths(f"see `{name}` and [this]({name}) and `jspec/core/`", REPOSITORY) == [name, name]


@pytest.mark.parametrize("command", ["jspec fly", "jspec bench fly", "jspec info --fly a", "jspec convert a b --fly"])
def test_readme_check_of_an_invalid_command_finds_it(command: str) -> None:
    """Negative control of the test of commands."""
    assert [parses(one) for one in commands(f"`{command}`\n```\n$ .venv/bin/{command}\n```")] == [False, False]


@pytest.mark.parametrize(
    "source",
    [
        "jspec.Enginge",
        "jspec.Tree.chains(4)",
        "jspec.SamplingParams(max_token=3)",
        "jspec.Engine.from_pretrained('a', slot=3)",
        "jspec.train.HeadTrainer(drafter, model, slots=3)",
        "from jspec.draft.base import Draft_er",
    ],
)
def test_readme_check_of_an_invalid_python_line_finds_it(source: str) -> None:
    """Negative control of the test of Python names and options."""
    assert len(wrong_names(source)) == 1
