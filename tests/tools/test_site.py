"""Test the site without mkdocs: navigation, links, generated pages, llms.txt, the table of memory; release files."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import pytest
import yaml

import jspec
from jspec.models import kv_cache
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.params import abstract_weights, model_params
from jspec.server.ask.fields import CHAT
from jspec.step.memory import tree_bytes
from jspec.tools.bench.random_models import target_config
from tests.tools.test_help import OURS

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PAGES = runpy.run_path(str(REPOSITORY / ".ci" / "pages.py"))
SITE = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())


def pages_of(nav: list[Any]) -> list[str]:
    """Return the pages of a navigation in their order."""
    values = [value for entry in nav for value in entry.values()]
    return [page for value in values for page in (pages_of(value) if isinstance(value, list) else [value])]


def existing() -> set[str]:
    files = {path.name for path in (REPOSITORY / "notebooks").iterdir() if path.suffix in (".md", ".ipynb")}
    return files | set(PAGES["READMES"].values()) | set(PAGES["GENERATED"])


def test_navigation_has_every_page_once() -> None:
    assert sorted(pages_of(SITE["nav"])) == sorted(existing())
    assert all((REPOSITORY / source).is_file() for source in (*PAGES["READMES"], *PAGES["CODE"]))
    assert set(PAGES["CODE"].values()) == set(PAGES["GENERATED"])
    assert (REPOSITORY / SITE["hooks"][0]).is_file() and SITE["docs_dir"] == PAGES["SOURCES"]
    assert re.search(r"mkdocs build --strict$", (REPOSITORY / ".ci" / "run").read_text(), re.M), "-q counts no warnings"


@pytest.mark.parametrize(
    ("link", "folder", "expected"),
    [
        ("[a](../jspec/README.md#floors)", "notebooks", "[a](code.md#floors)"),
        ("[a](notebooks/7_serving.ipynb)", "", "[a](7_serving.ipynb)"),
        ("[a](../../../README.md)", "jspec/models/families", "[a](index.md)"),
        ("[a](drafters.md)", "notebooks", "[a](drafters.md)"),
        ("[a](https://example.org/jspec/README.md)", "notebooks", "[a](https://example.org/jspec/README.md)"),
        ("[a](#here)", "notebooks", "[a](#here)"),
        ("[the licence](LICENSE)", "", "the licence (`LICENSE`)"),
        ("[Dockerfile](../Dockerfile)", "notebooks", "Dockerfile"),
        ("[a](../jspec/server/ask/fields.py)", "notebooks", "[a](server_fields.md)"),
        ('![a](notebooks/pictures/b.svg) <img src="notebooks/c.svg">', "", '![a](pictures/b.svg) <img src="c.svg">'),
        ("```\n[a](LICENSE)\n```\n", "", "```\n[a](LICENSE)\n```\n"),
    ],
)
def test_link_of_a_page_leads_to_the_page_of_its_file(link: str, folder: str, expected: str) -> None:
    assert PAGES["with_links"](link, folder) == expected


def test_page_of_commands_has_the_help_of_every_command() -> None:
    assert re.findall(r"^## (.*)$", PAGES["command_line"](), re.M) == OURS


def test_page_of_fields_says_what_each_field_takes_and_becomes() -> None:
    text = PAGES["server_fields"]()
    chat = text.partition("## /v1/chat/completions")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", chat, re.M)) == sorted(CHAT)
    for line in (
        "| `functions` | nothing, because it was replaced by tools |  |",
        "| `max_completion_tokens` |  | `SamplingParams.max_tokens` |",
        "| `parallel_tool_calls` | true or false |  |",
        "| `user` |  | nothing |",
    ):
        assert line in chat.splitlines()


def test_llms_txt_names_every_page_with_its_first_sentence() -> None:
    folder = REPOSITORY / "notebooks"
    sources = dict.fromkeys(existing(), "# A\n\n- no\n\nIt is\n[one](x.md). It is two.")
    sources["drafters.md"] = PAGES["text_of"](folder / "drafters.md")
    text = PAGES["llms_txt"](SITE["nav"], sources)
    assert re.findall(r"^- \[.*\]\((.*)\): .", text, re.M) == pages_of(SITE["nav"])
    assert "- [Install](install.md): It is one.\n" in text
    assert "- [Drafters](drafters.md): A drafter proposes tokens that the target then verifies" in text


def test_reference_has_every_public_name() -> None:
    text = (REPOSITORY / "notebooks" / "reference.md").read_text()
    named = set(re.findall(r"^::: jspec\.(\w+)$", text, re.M))
    assert named >= set(jspec.__all__) - {"__version__"} and named <= {*jspec.__all__, "verify"}


def test_table_of_memory_has_what_the_shapes_take() -> None:
    text = (REPOSITORY / "notebooks" / "targets.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert len(rows) == 12
    for shape, *cells in rows:
        weights = tree_bytes(abstract_weights(model_params(target_config(shape)), "bfloat16"))
        token = (cache_bytes(shape, 201, 8) - cache_bytes(shape, 101, 8)) / 1600
        slot = (cache_bytes(shape, 101, 16) - cache_bytes(shape, 101, 8)) / 8
        assert cells == [f"{weights / 2**30:.1f}", f"{token / 2**10:.4g}", f"{slot / 2**20:.4g}"]
    by_hand = 2 * 32 * 8 * 128 * 2 / 2**10  # keys and values, layers, heads, channels, bytes
    assert {shape: token for shape, _, token, _ in rows}["llama3-8b"] == f"{by_hand:.4g}"


def cache_bytes(shape: str, pages: int, slots: int) -> int:
    """Return the bytes of a target's caches in bfloat16, with pages of 16 tokens."""
    kinds: dict[str, Any] = dict(dtype="bfloat16", draft_dtype="bfloat16", state_dtype="bfloat16")
    pool = PoolShape(slots=slots, pages=pages, page_size=16, max_len=2048, **kinds)
    return tree_bytes(jax.eval_shape(lambda: kv_cache.create(target_config(shape).layers, pool, "bfloat16")))


def test_page_of_speed_shows_every_report_as_it_was_written() -> None:
    page, folder = (REPOSITORY / "notebooks" / "speed.md").read_text(), REPOSITORY / "notebooks" / "pictures"
    reports = sorted(path.name for path in folder.glob("*_report"))
    assert reports == ["demo_report", "h200_report"]
    for name in reports:
        assert f"](pictures/{name}/report.svg)" in page and f"](pictures/{name}/report.md)" in page
        assert (folder / name / "report.svg").is_file()
    written = (folder / "h200_report" / "report.md").read_text()
    rows = re.findall(r"^\| (?:sample|mt-bench|gsm8k) .*$", written, re.M)
    assert len(rows) == 9 and "\n".join(rows) in page
    speed_ups = {batch: [] for batch in ("1", "8", "32")}
    for row in rows:
        _, _, _, batch, _, _, plain, drafted, speed_up, *_ = (cell.strip() for cell in row.split("|"))
        assert float(drafted) / float(plain) == pytest.approx(float(speed_up), abs=0.011)
        speed_ups[batch].append(f"{float(speed_up):.1f}")
    first = (REPOSITORY / "README.md").read_text()
    least, most = ({batch: choose(speed_ups[batch]) for batch in ("1", "32")} for choose in (min, max))
    assert f"{least['1']} to {most['1']} times as fast at batch 1, {least['32']} to {most['32']} at 32" in first


def test_pictures_are_what_their_command_draws_from_the_code(tmp_path: Path) -> None:
    pictures = runpy.run_path(str(REPOSITORY / ".ci" / "pictures.py"))
    pictures["draw"](tmp_path)
    words = {}
    for name in ("round.svg", "memory.svg"):
        drawn = (tmp_path / name).read_text()
        assert drawn == (REPOSITORY / "notebooks" / "pictures" / name).read_text(), "run .ci/pictures.py"
        words[name] = re.findall(r"<text[^>]*>(.*)</text>", drawn)
    stages = re.findall(r'weight="bold"[^>]*>(\w+)<', (tmp_path / "round.svg").read_text())
    assert stages == ["view", "draft", "verify", "accept", "commit", "report"]
    # Tokens, layers and that of the head, keys and values, heads, channels, bytes.
    page = 16 * (32 + 1) * 2 * 8 * 128 * 2 / 2**20
    assert any(f"a page of 16 tokens {page:.2f} MiB" in line for line in words["memory.svg"])
    layer = 4096 * (2 * 32 + 2 * 8) * 128 + 3 * 4096 * 14336  # weights
    read = 2 * (32 * layer + 4096 * 128256) + 1024 * 32 * 2 * 8 * 128 * 2  # and rows of the cache, bytes
    assert f"reads at least {read / 2**30:.1f} GiB" in words["round.svg"]


@pytest.mark.parametrize("name", ["round", "memory"])
def test_words_of_a_picture_neither_overlap_nor_leave_it(name: str) -> None:
    """Widths are those of DejaVu Sans, which are larger than those of most fonts without serifs."""
    font_manager, textpath = map(pytest.importorskip, ("matplotlib.font_manager", "matplotlib.textpath"))
    root = ElementTree.parse(REPOSITORY / "notebooks" / "pictures" / f"{name}.svg").getroot()
    lines: dict[str, list[tuple[float, float]]] = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        font = font_manager.FontProperties(family="DejaVu Sans", weight=text.attrib["font-weight"])
        words = textpath.TextPath((0, 0), str(text.text), size=float(root.attrib["font-size"]), prop=font)
        width = words.get_extents().x1
        start = float(text.attrib["x"]) - width * (text.attrib["text-anchor"] == "end")
        lines.setdefault(text.attrib["y"], []).append((start, start + width))
    assert sum(map(len, lines.values())) > 9 and max(map(len, lines.values())) > 1
    for line in lines.values():
        line.sort()
        assert line[-1][1] < float(root.attrib["width"])
        assert all(end + 14 < start for (_, end), (start, _) in pairwise(line)), "14 pixels are for a box of colour"


def test_release_files_have_one_version_and_name_what_exists() -> None:
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.*?)\](?: - (\d{4}-\d\d-\d\d))?$", changes, re.M)
    assert cited["version"] == jspec.__version__ and cited["license"] == "Apache-2.0"
    assert headings[0][0] == "Unreleased" and all(date for _, date in headings[1:])
    assert [version for version, _ in headings[1:]][:1] in ([], [jspec.__version__])
    kinds = set(re.findall(r"^### (\w+)$", changes, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name
)
def test_workflow_has_jobs_whose_needs_and_files_exist(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and workflow[True], "YAML reads the key `on` as true"
    for job in workflow["jobs"].values():
        assert ("steps" in job) != ("uses" in job) and set(job.get("needs", [])) <= set(workflow["jobs"])
        assert "uses" not in job or (REPOSITORY / job["uses"]).is_file()
        for step in job.get("steps", []):
            assert ("uses" in step) != ("run" in step) and "@" in step.get("uses", "@")
            assert not step.get("run", "").startswith(".") or (REPOSITORY / step["run"]).is_file()
    publishing = {name for name, job in workflow["jobs"].items() if job.get("permissions") == {"id-token": "write"}}
    assert publishing == ({"publish"} if path.name == "release.yml" else set())
