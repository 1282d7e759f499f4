"""Decode with each model family: greedy tokens equal those of transformers, with any page size and with prefix hits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DraftModel, Engine, Model, NGram, SamplingParams, Tree
from jspec.tools.convert import main
from jspec.tools.testing import last_logits
from tests.support import cover, engines, tiny
from tests.support.recordings import recording

pytestmark = pytest.mark.once

DENSE = (
    *("qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "gemma4_text", "olmo3", "granite"),
    "muse_glimmer",
)
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "llama4_text", "minimax_m2", "laguna")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
GEMMA4 = ("gemma4_e2b", "gemma4_26b_a4b")
HYBRID = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h")
FAMILIES = (*DENSE, *EXPERTS, *LATENT, *GEMMA4, *HYBRID)
# Families whose norms have weights in float32.
IN_FLOAT32 = (
    "gemma3_text",
    "gemma4_text",
    *GEMMA4,
    "muse_glimmer",
    "gpt_oss",
    "qwen3_5_text",
    "qwen3_next",
    "nemotron_h",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "pages of 16": dict(page_size=16),
    "pages of 1": dict(page_size=1),
    "deterministic": dict(page_size=16, deterministic=True),
}
ALWAYS = (("deepseek_v3", "deterministic"), ("laguna", "pages of 16"), ("nemotron_h", "pages of 16"))
LONG = (
    ("llama4_text", "pages of 1"),  # two tests below decode with it by default
    ("gemma2", "pages of 1"),  # decodes with a drafter by default
    ("olmo3", "pages of 16"),
    ("gemma3_text", "deterministic"),
    ("gemma4_text", "pages of 16"),  # decodes with a drafter by default
    ("gpt_oss", "pages of 1"),  # these two decode on two devices by default
    ("deepseek_v3", "pages of 16"),
    ("mistral4", "deterministic"),
    ("mistral4", "pages of 1"),
    ("glm4_moe_lite", "pages of 16"),
    ("minimax_m2", "pages of 16"),
    ("laguna", "deterministic"),
    ("muse_glimmer", "pages of 1"),
    ("muse_glimmer", "deterministic"),
    ("deepseek_v2", "pages of 1"),  # decodes with a drafter by default
    ("gemma4_e2b", "deterministic"),  # these two decode with drafters by default
    ("gemma4_26b_a4b", "deterministic"),
    ("nemotron_h", "pages of 1"),
    ("nemotron_h", "deterministic"),
    *itertools.product(("lfm2_moe", "qwen3_next"), OPTIONS),  # what they compute, lfm2 and qwen3_5_moe_text do too
)


CASES = [pytest.param(*case, marks=cover.marks_of(case, ALWAYS, LONG)) for case in itertools.product(FAMILIES, OPTIONS)]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_engine_of_each_family_emits_the_greedy_tokens_of_transformers_twice(
    family: str, options: str, golden: Path
) -> None:
    """The second time, the pages of the prompts are in the prefix cache; the longest prompt exceeds every window."""
    folder = golden / "families" / family
    target, data = tiny.load_target(folder), recording(folder / "expect.npz")
    prompts = [data[f"prompt{i}"].tolist() for i in range(3)]
    wanted = [data[f"greedy{i}"].tolist() for i in range(3)]
    own: dict[str, Any] = dict(slots=3, max_len=176, buckets=(3,), prefill_buckets=(32,))
    with engines.make(target, **own, **OPTIONS[options]) as engine:
        for time in range(2):
            done = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0))
            assert [one.token_ids for one in done] == wanted
            assert time == 0 or done[2].metrics.num_cached_tokens >= 64


def test_latent_cache_has_one_vector_and_one_key_a_token_and_may_be_float8(golden: Path) -> None:
    """Without a drafter; a float8 cache has a quarter of the bytes of a float32 one, and changes some tokens."""
    folder = golden / "families" / "deepseek_v3"
    target, data = tiny.load_target(folder), recording(folder / "expect.npz")
    own: dict[str, Any] = dict(slots=1, max_len=96, pages=13, page_size=8, buckets=(1,), prefill_buckets=(32,))
    for dtype, size in (("float32", 4), ("float8_e4m3fn", 1)):
        with engines.make(target, kv_dtype=dtype, **own) as engine:
            pools = 13 * 8 * (16 + 16) * size * target.config.num_layers  # latent and rotated channels
            assert engine.memory_plan.target_pool == pools
            if size == 1:
                (done,) = engine.generate(data["prompt1"].tolist(), SamplingParams(max_tokens=32, temperature=0))
    assert len(done.token_ids) == 32 and done.token_ids[0] == data["greedy1"][0]


@pytest.mark.parametrize(
    "family",
    [
        *("gemma4_text", *GEMMA4, "phi3", "gpt_oss", "deepseek_v2", "mistral4", "laguna", "lfm2", "qwen3_next"),
        "nemotron_h",
        *(
            pytest.param(family, marks=pytest.mark.long)
            for family in ("gemma3_text", "llama4_text", "qwen3_5_text", "muse_glimmer")
        ),
    ],
)
def test_converted_folder_of_a_family_gives_the_same_logits(family: str, golden: Path, tmp_path: Path) -> None:
    source = golden / "families" / family
    assert main([str(source), str(tmp_path / "out")]) == 0
    ids = recording(source / "expect.npz")["prompt1"].tolist()
    ours, again = (Model.from_pretrained(path, dtype="float32") for path in (source, tmp_path / "out"))
    np.testing.assert_array_equal(last_logits(again, ids), last_logits(ours, ids))
    assert again.config == ours.config
    norm = Model.from_pretrained(tmp_path / "out", dtype="bfloat16").layers[0].attn_norm
    assert norm is not None and norm.dtype == (jnp.float32 if family in IN_FLOAT32 else jnp.bfloat16)


@pytest.mark.parametrize(
    ("drafter", "prefix_cache", "drops"),
    [
        pytest.param(None, False, True, marks=pytest.mark.long),
        pytest.param(None, True, True, marks=pytest.mark.long),
        ("mistral", False, True),
        ("qwen3", False, False),
        pytest.param("ngram", False, False, marks=pytest.mark.long),
    ],
)
def test_engine_gives_back_pages_behind_the_windows_of_all_layers(
    drafter: str | None, prefix_cache: bool, drops: bool, golden: Path
) -> None:
    """A draft model without windows, and a drafter that looks up tokens of the whole text, need all pages."""
    folder = golden / "families" / "mistral"
    target, data = tiny.load_target(folder), recording(folder / "expect.npz")
    draft_model = tiny.load_target(folder.parent / drafter) if drafter in FAMILIES else None
    chosen = drafter if draft_model is None else DraftModel(draft_model, Tree.chain(2))
    own: dict[str, Any] = dict(slots=1, max_len=160, prefill_buckets=(32,), page_size=4, prefix_cache=prefix_cache)
    with engines.make(target, drafter=chosen, **own) as engine:
        pool, used = engine.core.scheduler.pages, []
        found: list[int] = []
        for chunk in engine.stream(data["prompt2"].tolist(), SamplingParams(max_tokens=64, temperature=0)):
            used.append(pool.num_used)
            found += chunk.token_ids
        assert found == data["greedy2"].tolist()
        of_prompt = pool.needed(len(data["prompt2"]))  # the window is a third of it
        assert (max(used[2:-1]) < of_prompt) == drops
        pool.check()


def test_engine_gives_back_pages_before_the_chunks_of_all_layers(golden: Path) -> None:
    """Of the recorded target, three of four layers have chunks; a drafter that reads the text keeps all pages."""
    folder = golden / "families" / "llama4_text"
    whole, prompt = tiny.load_target(folder), recording(folder / "expect.npz")["prompt2"].tolist()
    target = whole.replace(layers=whole.layers[:3], config=replace(whole.config, layers=whole.config.layers[:3]))
    found, most = [], []
    for drafter in (None, NGram("chain:1")):
        own: dict[str, Any] = dict(slots=1, max_len=160, prefill_buckets=(32,), page_size=4, prefix_cache=False)
        with engines.make(target, drafter=drafter, **own) as engine:
            pool, used = engine.core.scheduler.pages, []
            tokens: list[int] = []
            for part in engine.stream(prompt, SamplingParams(max_tokens=64, temperature=0)):
                used.append(pool.num_used)
                tokens += part.token_ids
            found.append(tokens)
            most.append(max(used[2:-1]))
            pool.check()
    assert found[0] == found[1] and most[0] < pool.needed(len(prompt)) < most[1]


@pytest.mark.parametrize(
    "family",
    [
        "llama4_text",
        *(pytest.param(family, marks=pytest.mark.long) for family in ("deepseek_v3", "glm4_moe", "mistral4")),
    ],
)
def test_engine_that_joins_shared_experts_to_experts_emits_the_greedy_tokens_of_transformers(
    family: str, golden: Path
) -> None:
    """Rounds have few rows, whose shared experts are among the experts, and the prompt has a dense product."""
    folder = golden / "families" / family
    data = recording(folder / "expect.npz")
    prompts, wanted = ([data[f"{kind}{i}"].tolist() for i in range(3)] for kind in ("prompt", "greedy"))
    with Engine.from_pretrained(folder, slots=3, max_len=176, buckets=(3,), dtype="float32", eos_ids=()) as engine:
        layers = engine.core.runner.params.target.layers
        assert any(one.down is None and one.experts_down is not None for one in layers)
        done = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0))
    assert [one.token_ids for one in done] == wanted
