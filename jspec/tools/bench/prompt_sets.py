"""Public sets of prompts by name, the sample of this package, and files of prompts.

The public sets, of 80 questions each, are those of EAGLE's authors (github.com/SafeAILab/EAGLE, folder eagle/data). The
first use of one downloads its file, of known content, to the user's cache folder.
"""

from __future__ import annotations

import hashlib
import urllib.request
from pathlib import Path

from jspec.core.shorten import short
from jspec.step.compile_cache import cache_folder
from jspec.tools.bench.options import PROMPT_FIELDS, PUBLIC_SETS, SAMPLE
from jspec.train.data import read_lines

SOURCE_TEXT = Path(__file__).with_name("ledger.txt").read_text(encoding="utf-8")
SAMPLED, SAMPLE_SIZE = 16, 96  # number of prompts of the sample, and characters of each: it has fewer tokens
URL = "https://raw.githubusercontent.com/SafeAILab/EAGLE/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b/eagle/data"
DIGESTS = {  # SHA-256 of each set's file
    "mt-bench": "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    "gsm8k": "a55920b2f2aac724241124c59e5b8e8168dbbeb2ab0fdbee17d5b0ab6db5ff27",
    "humaneval": "ce0244e2b228339e9a11afc63a151719beede1e389fdaec7cd9751d33902180e",
}


def sample(count: int = SAMPLED, size: int = SAMPLE_SIZE) -> list[str]:
    """Return ``count`` evenly spaced parts of `SOURCE_TEXT`, each of ``size`` characters."""
    last = len(SOURCE_TEXT) - size
    return [SOURCE_TEXT[start : start + size] for start in (last * i // (count - 1) for i in range(count))]


def prompts_of(name: str, count: int | None = None) -> list[str]:
    """Return the first ``count`` prompts, all if None, of one of `PUBLIC_SETS`, `SAMPLE`, or a file."""
    prompts = sample() if name == SAMPLE else read_prompts(_public(name) if name in PUBLIC_SETS else Path(name))
    if len(prompts) < (count or 1):
        raise ValueError(f"{name}: expected {count or 1} prompts or more, got {len(prompts)}")
    return prompts[:count]


def _public(name: str) -> Path:
    """Return the file of a public set, which is downloaded if the user's cache folder lacks it."""
    url, file = f"{URL}/{name.replace('-', '_')}/question.jsonl", cache_folder() / "prompts" / f"{name}.jsonl"
    if not file.is_file():
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                content = answer.read()
        except OSError as error:
            raise OSError(f"{name}: expected {url}, got {error}; download it elsewhere and save it as {file}") from None
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    if (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != DIGESTS[name]:
        raise ValueError(f"{file}: expected SHA-256 {DIGESTS[name]}, got {digest}; remove the file and try again")
    return file


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a file with one JSON object a line."""
    prompts = []
    for number, record in read_lines(path):
        where = f"{path}, line {number}"
        match record:
            case {"turns": [str(text), *_]} | {"prompt": str(text)} | {"question": str(text)}:
                prompts.append(text)
            case dict():
                got = ", ".join(record) or "no field"
                raise ValueError(f"{where}: expected the field {PROMPT_FIELDS}, got {got}")
            case _:
                raise ValueError(f"{where}: expected a JSON object, got {short(record)}")
    return prompts
