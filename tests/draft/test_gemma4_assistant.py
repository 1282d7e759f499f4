"""Compare drafting with assistants of Gemma 4 with recordings of transformers, and test their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import Engine, Gemma4Assistant, Model, SamplingParams, Tree
from jspec.core.numerics import REFERENCE
from jspec.core.records import PromptBatch, SlotView
from jspec.draft import gemma4_assistant
from jspec.draft.expand_tree import EXCLUDED
from jspec.draft.gemma4_assistant_head import AssistantHead
from jspec.models.decoder import forward
from jspec.models.kv_cache import create
from jspec.models.parts.kv_pool import PoolShape
from pallas_kernels.layers.partial_sums import reduce_partials
from tests.support import block_rounds, engines, tiny
from tests.support.arrays import on_device
from tests.support.recordings import TOLERANCE, recording
from tests.support.views import view_of_rows

pytestmark = pytest.mark.once

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FAMILIES = {"e2b": "gemma4_e2b", "26b_a4b": "gemma4_26b_a4b"}  # the first has clusters and layers that share keys
LEAST = 1e-3  # a wrong reading moves some logit by more
ROWS, PAGE = 128, 16
CHAIN, STATIC, DYNAMIC = Tree.chain(4), Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]), Tree.topk(9, 3, 3)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
# Prompts are cut into pieces of at most 16 tokens, and three requests need more pages than there are.
OPTIONS: dict[str, Any] = dict(slots=3, max_len=136, buckets=(3,), prefill_buckets=(16,), page_size=8, controls=False)
PAGES = 24


def folder_of(name: str) -> Path:
    return GOLDEN / "gemma4_assistant" / name


@cache
def target(name: str) -> Model:
    return tiny.load_target(GOLDEN / "families" / FAMILIES[name])


def drafter(name: str, tree: Tree | str = CHAIN) -> Gemma4Assistant:
    return Gemma4Assistant.from_pretrained(folder_of(name), tree=tree, dtype="float32")


def texts(name: str) -> list[tuple[list[int], list[int]]]:
    """Return the recorded prompts, each with the target's greedy tokens after it."""
    data = recording(GOLDEN / "families" / FAMILIES[name] / "expect.npz")
    return [(data[f"prompt{i}"].tolist(), data[f"greedy{i}"].tolist()) for i in range(3)]


def prompts(name: str) -> list[list[int]]:
    return [prompt for prompt, _ in texts(name)]


# ---- against transformers, without an engine


@jax.jit
def prefilled(model: Model, tokens: Any) -> tuple[Any, Any]:
    """Return the caches of a text of `ROWS` tokens, and its states after the final norm."""
    shape = PoolShape(1, ROWS // PAGE, PAGE, ROWS, "float32", "float32")
    batch = PromptBatch.whole(
        on_device([ROWS]),
        tokens=tokens[None],
        positions=on_device(np.arange(ROWS))[None],
        valid=on_device(np.ones((1, ROWS), bool)),
        first_row=on_device(np.zeros(1, int)),
        page_table=on_device(np.arange(ROWS // PAGE))[None],
        bits=None,
        numerics=REFERENCE,
    )
    layers = model.config.layers
    states = (len(layers) + 1,)
    out, caches = forward(model, create(layers, shape, "float32"), batch, feature_layers=states, with_logits=False)
    return caches, out.features


@cache
def caches_of(name: str, prompt: int) -> tuple[Any, Any]:
    text = [token for part in texts(name)[prompt] for token in part]
    return prefilled(target(name), on_device(np.resize(text, ROWS), jnp.int32))


def view_at(name: str, prompt: int, length: int) -> SlotView:
    """Return the view of a round in which a text's first tokens are committed, and the next one is the root."""
    text = [token for part in texts(name)[prompt] for token in part]
    view = view_of_rows([text[length]], length=length, page_size=PAGE)
    pages = on_device(np.arange(ROWS // PAGE))[None]
    return replace(view, page_table=pages, target=caches_of(name, prompt)[0])


def computed(head: AssistantHead, name: str, prompt: int, length: int, path: list[int]) -> np.ndarray:
    """Return the logits after a root and after each token of a path but the last [path, vocab], by token id."""

    @jax.jit
    def step(head: AssistantHead, view: SlotView, tokens: Any, states: Any) -> Any:
        assert view.target is not None
        logits, states = head.run(view.target, gemma4_assistant.batch_of(view, tokens), states)
        return reduce_partials(logits, jnp.float32)[0, 0], states

    view, found = view_at(name, prompt, length), []
    tokens, states = view.root[:, None], caches_of(name, prompt)[1][:, length - 1 : length]
    ids = np.arange(head.config.vocab_size) if head.clusters is None else np.asarray(head.clusters.ids)
    for token in path:
        logits, states = step(head, view, tokens, states)
        found.append(np.asarray(logits)[np.argsort(ids)])
        tokens = on_device([[token]], jnp.int32)
    return np.stack(found)


def error(head: AssistantHead, name: str, cases: tuple[tuple[int, int], ...] = ((0, 0), (1, 1), (2, 2))) -> float:
    """Return the largest difference from the recorded logits, for each (prompt, index of a recorded round).

    transformers gives tokens that are no candidates one logit, below that of any candidate.
    """
    data, found = recording(folder_of(name) / "expect.npz"), []
    for prompt, index in cases:
        right, after = data[f"logits{prompt}"][index], (0, 7, 19)[index]
        length = len(texts(name)[prompt][0]) + after
        logits = computed(head, name, prompt, length, data[f"drafts{prompt}"][after].tolist())
        if head.clusters is not None:
            right = np.where(right == right.min(-1, keepdims=True), EXCLUDED, right)
        found.append(np.abs(logits - right).max())
    return float(max(found))


@pytest.mark.parametrize("name", FAMILIES)
def test_assistant_has_the_logits_of_transformers(name: str) -> None:
    every = tuple((prompt, index) for prompt in range(3) for index in range(3))
    assert error(drafter(name).bind(target(name)), name, every) < TOLERANCE


def with_window(head: AssistantHead, window: int) -> AssistantHead:
    layers = tuple(
        replace(layer, mixer=replace(layer.gqa, window=layer.gqa.window and window)) for layer in head.config.layers
    )
    return head.replace(config=replace(head.config, layers=layers))


WRONG: dict[str, Callable[[AssistantHead], AssistantHead]] = {
    "keys of an earlier layer": lambda head: head.replace(sources=(0, 0, 0, 2)),
    "no factor of the embedding": lambda head: head.replace(embed_scale=1.0),
    "state before the embedding": lambda head: head.replace(fc=jnp.roll(head.fc, head.config.target_hidden_size, 1)),
    "own state without the norm": lambda head: head.replace(project=head.project / head.norm),
    "a window of one token more": lambda head: with_window(head, 17),
    "clusters in the order of ids": lambda head: head.replace(
        clusters=head.clusters.replace(ids=jnp.arange(head.config.vocab_size))
    ),
}


@pytest.mark.parametrize("reading", WRONG)
def test_wrong_reading_differs_from_transformers(reading: str) -> None:
    assert error(WRONG[reading](drafter("e2b").bind(target("e2b"))), "e2b") > LEAST


@pytest.mark.parametrize("name", FAMILIES)
def test_position_of_transformers_own_generator_is_one_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At that position the drafts are those of its generator; at that of the last committed row few are."""
    right, own = recording(folder_of(name) / "expect.npz")["generator"], drafter(name)
    head = own.bind(target(name))
    lengths = range(4, 4 + len(right))  # texts within the window, of which that generator sees one row more

    def drafts() -> np.ndarray:
        draft = jax.jit(lambda *args: own.draft(*args)[0].tokens)
        state = gemma4_assistant.NewestState
        states = caches_of(name, 0)[1][0]
        rows = [draft(head, state(states[n - 1 : n]), view_at(name, 0, n))[0, 1:] for n in lengths]
        return np.array(rows)

    assert (drafts() != right).any(axis=1).mean() > 0.3
    assert error(head, name) < TOLERANCE
    monkeypatch.setattr(gemma4_assistant, "POSITION", 0)
    np.testing.assert_array_equal(drafts(), right)
    assert error(head, name) > LEAST


# ---- in an engine


def check_recorded_drafts(engine: Engine, name: str, times: int = 1) -> int:
    """Decode the recorded prompts, and compare outputs and the drafts of every round; return the number of rounds."""
    data, rounds = recording(folder_of(name) / "expect.npz"), 0
    for index, done in enumerate(engine.generate(prompts(name) * times, GREEDY, trace=True)):
        prompt, right = texts(name)[index % 3]
        assert done.raise_for_error().token_ids == right[: GREEDY.max_tokens]
        for one, text in block_rounds.texts(done, prompt):
            drafts = data[f"drafts{index % 3}"][len(text) - 1 - len(prompt)]
            assert one.tokens[1:].tolist() == drafts[: len(one.tokens) - 1].tolist()
            rounds += 1
    return rounds


@pytest.mark.parametrize("name", FAMILIES)
def test_every_round_of_preempted_requests_with_prefix_hits_drafts_as_transformers(name: str) -> None:
    with engines.make(target(name), drafter=drafter(name), pages=PAGES, **OPTIONS) as engine:
        assert check_recorded_drafts(engine, name, times=3) > 60
        assert engine.metrics.num_preemptions > 0 and engine.metrics.mean_acceptance_length > 1.4
        (again,) = engine.generate(prompts(name)[2:], GREEDY)
        assert again.metrics.num_cached_tokens > 80
        check_recorded_drafts(engine, name)
        engine.core.scheduler.pages.check()


def test_two_devices_with_one_key_value_head_draft_as_transformers() -> None:
    with engines.make(target("e2b"), drafter=drafter("e2b"), tensor_parallel=2, **OPTIONS) as engine:
        assert check_recorded_drafts(engine, "e2b") > 20


def test_two_devices_that_divide_key_value_heads_draft_as_one() -> None:
    """Experts of 26B-A4B in the recording cannot be divided; this target has heads of the same sizes."""
    dense, found = tiny.load_target(GOLDEN / "families/gemma4_text"), []
    for devices in (1, 2):
        options = {**OPTIONS, "tensor_parallel": devices}
        with engines.make(dense, drafter=drafter("26b_a4b", DYNAMIC), **options) as engine:
            done = engine.generate(prompts("26b_a4b"), GREEDY, trace=True)
        found.append([[one.tokens.tolist() for one in each.rounds or ()] for each in done])
    assert found[0] == found[1] and sum(map(len, found[0])) > 20


ACCEPT = ("coupled", "rejection", "traversal", "block", "multi_candidate")
CASES = [("e2b", "coupled", DYNAMIC), ("26b_a4b", "rejection", STATIC)]
CASES += [
    pytest.param(name, accept, tree, marks=pytest.mark.long)
    for name in FAMILIES
    for accept in ACCEPT
    for tree in (CHAIN, STATIC, DYNAMIC)
    if (name, accept, tree) not in CASES and (accept != "block" or tree.is_chain)
]


@pytest.mark.parametrize(("name", "accept", "tree"), CASES, ids=str)
def test_outputs_are_those_of_plain_decoding(name: str, accept: str, tree: Tree) -> None:
    """Under rules that draw other tokens than plain decoding, greedy outputs are compared alone."""
    temperatures = (0.0, 1.0) if accept == "coupled" else (0.0,)
    options: dict[str, Any] = dict(make_engine=engines.make, accept=accept, max_tokens=24, temperatures=temperatures)
    assert not jspec.testing.check_lossless(drafter(name, tree), target(name), prompts(name), **OPTIONS, **options)[0.0]
