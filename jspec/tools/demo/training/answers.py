"""Lets a target complete prompts: the text to train its head on."""

from __future__ import annotations

import json
from pathlib import Path

from jspec.tools.demo.training.prepare import COMPLETION, PROMPT
from jspec.tools.demo.training.sample import samples

SAMPLED = 2  # one of so many completions is sampled at temperature 1, the others are greedy


def answer(prompts: Path, target: Path, out: Path, *, seed: int = 0) -> None:
    """Write the target's completions of prompts.

    Args:
        prompts: file of lines with a prompt.
        target: folder of the target.
        out: file of lines with prompt and completion to write.
        seed: seed of the samples.
    """
    lines = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    temperatures = [float(index % SAMPLED == 0) for index in range(len(lines))]
    done = list(samples(target, lines, temperatures, PROMPT[1] + 1 + COMPLETION, seed=seed))
    pairs = [(line, one.text) for line, one in zip(lines, done, strict=True) if one.text]  # none: the document ends
    out.write_text("".join(json.dumps({"prompt": line, "completion": text}) + "\n" for line, text in pairs))
    print(f"{out}: {len(pairs)} completions")
