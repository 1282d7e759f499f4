"""What the site has beside the files of notebooks/: READMEs as pages, pages made from the code, and llms.txt.

mkdocs calls the functions whose names begin with `on_` (`hooks` in mkdocs.yml). The rest needs no mkdocs.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = "notebooks"  # folder of the other pages
READMES = {  # name of the page by path in the repository
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "jspec/README.md": "code.md",
    "jspec/distributed/README.md": "several_devices.md",
    "jspec/draft/README.md": "write_a_drafter.md",
    "jspec/models/families/README.md": "add_a_family.md",
    "jspec/server/README.md": "server.md",
    "jspec/train/README.md": "training_and_rollouts.md",
    "tests/README.md": "tests.md",
}
CODE = {  # page made from a file of code
    "jspec/server/ask/fields.py": "server_fields.md",
    "jspec/tools/parser.py": "command_line.md",
}
WIDTH = 100  # columns of help texts
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def command_line() -> str:
    """Return the page of all commands with their help texts."""
    from jspec.tools.command_line import make_parser
    from jspec.tools.parser import parsers

    os.environ["COLUMNS"] = str(WIDTH)
    parts = [f"## {parser.prog}\n\n```text\n{parser.format_help()}```\n" for parser in parsers(make_parser())]
    return "\n".join(["# Command line\n\nThe help texts of all commands.\n", *parts])


def server_fields() -> str:
    """Return the page with a table of fields for each route of the server."""
    from jspec.server.ask import fields
    from jspec.server.routes.anthropic import MESSAGES
    from jspec.server.routes.responses import RESPONSES

    routes = {
        "/v1/completions": fields.COMPLETIONS,
        "/v1/chat/completions": fields.CHAT,
        "/v1/responses": RESPONSES,
        "/v1/messages": MESSAGES,
        "/tokenize": fields.TOKENIZE,
        "/detokenize": fields.DETOKENIZE,
    }
    about = (
        "# Fields of the server\n\nEach route takes these fields of a request; null counts as absent. A field that is "
        "not listed is refused by name. [The server](../jspec/server/README.md) says more about some.\n"
    )
    return "\n".join([about, *(f"## {route}\n\n{field_table(table)}\n" for route, table in routes.items())])


def field_table(table: Mapping[str, Any]) -> str:
    """Return a Markdown table that says of each field what value it takes and what becomes of it."""
    from jspec.server.ask.fields import WITHOUT_EFFECT

    lines = ["| field | value | becomes |", "|---|---|---|"]
    for name, field in sorted(table.items()):
        value = expected(name, field.read)
        becomes = f"`SamplingParams.{field.param}`" if field.param else ""
        lines.append(f"| `{name}` | {value} | {'nothing' if name in WITHOUT_EFFECT and not value else becomes} |")
    return "\n".join(lines)


def expected(name: str, read: Callable[[str, Any], Any]) -> str:
    """Return which values a field accepts, as its error says; "" if it accepts all."""
    from jspec.server.http.errors import ApiError

    try:
        read(name, object())
    except ApiError as error:
        return str(error).partition("expected ")[2].rpartition(", got ")[0].replace("|", "\\|")
    return ""


GENERATED: Mapping[str, Callable[[], str]] = {"command_line.md": command_line, "server_fields.md": server_fields}


def with_links(markdown: str, folder: str) -> str:
    """Return a page whose links to files lead to pages; a link to a file that is no page becomes its name.

    Args:
        markdown: text of the page.
        folder: folder of its source in the repository, from which its links count.
    """
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)  # with fenced blocks at odd places
    parts[::2] = (LINK.sub(lambda match: _link(match[1], match[2], folder), part) for part in parts[::2])
    text = "".join(parts)
    return re.sub(rf"(!\[[^\]]*\]\(|src(?:set)?=\"){SOURCES}/", r"\1", text)  # pictures of the first README


def _link(text: str, target: str, folder: str) -> str:
    path, mark, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return f"[{text}]({target})"
    whole = posixpath.normpath(posixpath.join(folder, path))
    page = (READMES | CODE).get(whole, whole.removeprefix(f"{SOURCES}/"))
    if page != whole:
        return f"[{text}]({page}{mark}{anchor})"
    return text if f"`{whole}`" == text or text == whole else f"{text} (`{whole}`)"


def llms_txt(nav: list[Any], sources: Mapping[str, str]) -> str:
    """Return llms.txt: the name of each page with a link to its text and its first sentence.

    Args:
        nav: `nav` of mkdocs.yml.
        sources: text of each page by its name.
    """
    lines = ["# jspec", "", "> Lossless speculative decoding for language models in JAX.", ""]
    for entry in nav:
        ((title, value),) = entry.items()
        lines += [f"## {title}", ""] if isinstance(value, list) else []
        for inner in value if isinstance(value, list) else [entry]:
            ((name, page),) = inner.items()
            lines.append(f"- [{name}]({page}): {first_sentence(sources[page])}")
        lines += [""] if isinstance(value, list) else []
    return "\n".join(lines).rstrip() + "\n"


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page's text."""
    paragraphs = [part for part in markdown.split("\n\n") if re.match(r"[\w*`\[]", part)]
    sentence = re.split(r"(?<=\.)\s", " ".join(paragraphs[0].split()))[0]
    return LINK.sub(r"\1", sentence).rstrip(":")


def text_of(path: Path) -> str:
    """Return the text of a page, or of a notebook's text cells."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


# -- what mkdocs calls


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, name in READMES.items():
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / source)))
    for name, make in GENERATED.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    sources = {name: source for source, name in READMES.items()}
    return with_links(markdown, posixpath.dirname(sources.get(page.file.src_uri, f"{SOURCES}/")))


def on_post_build(config: Any) -> None:
    """Write the text of each page beside its HTML, and llms.txt."""
    site = Path(config.site_dir)
    texts = {path.name: text_of(path) for path in (REPOSITORY / SOURCES).iterdir() if path.suffix in (".md", ".ipynb")}
    texts |= {name: text_of(REPOSITORY / source) for source, name in READMES.items()}
    texts |= {name: make() for name, make in GENERATED.items()}
    for name, text in texts.items():
        (site / Path(name).with_suffix(".md")).write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(llms_txt(config.nav, texts).replace(".ipynb)", ".md)"), encoding="utf-8")
