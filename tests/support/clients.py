"""Commands of other projects that measure servers, and an engine for them whose tokenizer these commands read too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from jspec import Engine, NGram, Tree

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
MAX_LEN = 512


def run(*command: str, home: Path) -> str:
    """Return what a command printed; skip the test if it is not installed, fail if it fails.

    Args:
        home: folder for the files that the command keeps.
    """
    if (path := shutil.which(command[0])) is None:
        pytest.skip(f"needs the command {command[0]}: see 'Clients' in tests/README.md")
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(home)}
    done = subprocess.run([path, *command[1:]], env=environment, cwd=home, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def story_folder(data: Path, folder: Path) -> Path:
    """Copy a small model that writes stories, with a chat template."""
    shutil.copytree(data / "tinystories656k", folder, copy_function=shutil.copyfile)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return folder


def story_engine(folder: Path) -> Engine:
    """Return an engine of such a model, with drafts from the text."""
    return Engine.from_pretrained(str(folder), drafter=NGram(Tree.chain(4)), slots=4, max_len=MAX_LEN)
