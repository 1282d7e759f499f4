"""Lets a target complete prompts: the text to train its head on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from jspec.engine.api import Engine
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.demo.training.prepare import COMPLETION

LENGTH = 256  # tokens of a prompt and its completion at most
SLOTS = 256
SAMPLED = 2  # one of so many completions is sampled at temperature 1, the others are greedy


def answer(prompts: Path, target: Path, out: Path, *, seconds: float, slots: int = SLOTS) -> None:
    """Write the target's completions of the first prompts, as many as it writes in a time.

    Args:
        prompts: file of lines with a prompt.
        target: folder of the target.
        out: file of lines with prompt and completion to write.
        seconds: time to write for, without loading and compiling.
        slots: completions that run at once; a multiple of `SAMPLED` times as many are written before the clock is read.
    """
    lines = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    sizes: Any = dict(slots=slots, buckets=(slots,), max_len=LENGTH, prefill_buckets=(8 * LENGTH,))
    with (
        out.open("w") as file,
        Engine.from_pretrained(target, controls=False, prefix_cache=False, compile_ahead=True, **sizes) as engine,
    ):
        began, size, done = time.perf_counter(), SAMPLED * slots, 0
        while done < len(lines) and time.perf_counter() - began < seconds:
            given = lines[done : done + size]
            params = [
                SamplingParams(max_tokens=COMPLETION, temperature=float(index % SAMPLED == 0), seed=done + index)
                for index in range(len(given))
            ]
            for prompt, one in zip(given, engine.generate(given, params), strict=True):
                if text := one.raise_for_error().text:  # none: the document ends there
                    file.write(json.dumps({"prompt": prompt, "completion": text}) + "\n")
            done += len(given)
    print(f"{out}: {done} completions in {time.perf_counter() - began:.0f} s")
