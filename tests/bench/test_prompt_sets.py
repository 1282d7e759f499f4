"""Sets of prompts that the bench commands know by name, and files of prompts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from jspec.tools.bench import prompt_sets
from jspec.tools.bench.options import PUBLIC_SETS, SAMPLE
from jspec.tools.bench.prompt_sets import prompts_of, read_prompts

pytestmark = pytest.mark.once


def test_sample_prompts_are_different_parts_spread_over_the_whole_text() -> None:
    cuts = prompts_of(SAMPLE)
    sizes = {len(cut.encode()) for cut in cuts}
    assert len(set(cuts)) == prompt_sets.SAMPLED and sizes == {prompt_sets.SAMPLE_SIZE}
    assert prompt_sets.SOURCE_TEXT.startswith(cuts[0]) and prompt_sets.SOURCE_TEXT.endswith(cuts[-1])
    assert prompts_of(SAMPLE, 2) == cuts[:2]
    with pytest.raises(ValueError, match="sample: expected 17 prompts or more, got 16"):
        prompts_of(SAMPLE, 17)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the user's downloaded prompts, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jspec" / "prompts"


def test_public_sets_are_downloaded_once_and_checked(cache: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of outside data are those of the commit that the address names; a test reads no network."""
    asked = []

    def urlopen(url: str, timeout: float) -> Any:
        asked.append(url)
        return io.BytesIO((data / "prompts" / f"eagle_{url.split('/')[-2]}.jsonl").read_bytes())

    monkeypatch.setattr(prompt_sets.urllib.request, "urlopen", urlopen)
    firsts = [prompts_of(name)[0][:21] for name in PUBLIC_SETS]
    assert firsts == ["Compose an engaging t", "Darrell and Allen's a", "Complete the code I p"]
    assert asked == [f"{prompt_sets.URL}/{name}/question.jsonl" for name in ("mt_bench", "gsm8k", "humaneval")]
    assert [len(prompts_of(name)) for name in PUBLIC_SETS] == [80, 80, 80] and len(asked) == 3


def test_public_set_with_other_content_or_without_a_network_is_refused_with_a_remedy(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def urlopen(url: str, timeout: float) -> Any:
        raise OSError("no route")

    monkeypatch.setattr(prompt_sets.urllib.request, "urlopen", urlopen)
    with pytest.raises(OSError, match=r"gsm8k: expected https://.*got no route; download it .* as .*gsm8k.jsonl"):
        prompts_of("gsm8k")
    cache.mkdir(parents=True)
    (cache / "gsm8k.jsonl").write_text('{"prompt": "another"}')
    with pytest.raises(ValueError, match=r"expected SHA-256 a55920b2f2.*, got .*; remove the file"):
        prompts_of("gsm8k")


def test_prompts_of_every_shared_prompt_file_equal_those_read_with_json(data: Path) -> None:
    """The expected prompts are read with `json` alone; in a conversation the first message is the prompt."""
    counts = {}
    for path in sorted((data / "prompts").glob("*.jsonl")):
        found = read_prompts(path)
        objects = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        assert found == [
            next(o[name] for name in ("prompt", "question") if name in o) if "turns" not in o else o["turns"][0]
            for o in objects
        ]
        counts[path.stem] = len(found)
    assert counts["eagle_mt_bench"] == 80 and counts["spec_bench"] == 480 and counts["gsm8k_test"] == 1319
    assert prompts_of(str(data / "prompts" / "eagle_mt_bench.jsonl"), 3)[0].startswith("Compose an engaging travel")


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ([{"text": "a", "id": 1}], r"line 1: expected the field turns \(a list.*prompt.*question.*, got text, id"),
        ([{"prompt": "a"}, {"turns": []}], "line 2: expected the field turns"),
        ([{"prompt": 3}], "line 1: expected the field turns"),
        ([{"prompt": "a"}, "", "{nonsense"], "line 3: expected a JSON object"),
        (["[1]"], "line 1: expected a JSON object"),
        ([""], "expected 2 prompts or more, got 0"),
        ([{"prompt": "a"}], "expected 2 prompts or more, got 1"),
    ],
)
def test_prompt_file_with_a_wrong_line_raises_naming_the_line(
    objects: list[Any], expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in objects))
    with pytest.raises(ValueError, match=expected):
        prompts_of(str(path), 2)
