"""Test that inconsistent options and models raise a clear error before anything is allocated or compiled."""

from __future__ import annotations

import asyncio
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jspec import DraftModel, Eagle, Eagle3, Engine, Medusa, SamplingParams, Tree
from jspec.core.config import QUANTIZE
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.step.executables import Executables
from jspec.tools.testing import Random, Scripted
from pallas_kernels.layers.weights import EXPERT_KINDS, KINDS
from tests.support import engines, folders, paper, tiny
from tests.support.serving import wait_until

pytestmark = pytest.mark.once

CHAIN = Tree.chain(2)
DYNAMIC = Tree.topk(4, 2, 2)


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*args: Any, **options: Any) -> None:
        raise AssertionError("it came to compiling")

    monkeypatch.setattr(Executables, "__init__", compiled)


def test_engine_with_valid_options_starts_to_compile() -> None:
    """Negative control of the fixture that forbids compilation."""
    with pytest.raises(AssertionError, match="it came to compiling"):
        Engine(engines.target())


@pytest.mark.parametrize("given", ["bytes", ByteTokenizer()])
def test_engine_given_bytes_for_a_folder_with_a_tokenizer_warns(given: Any, tmp_path: Path) -> None:
    config = {**folders.TARGET, "vocab_size": 256}
    folder = folders.write(tmp_path / "target", config, folders.target_tensors(config))
    with warnings.catch_warnings(record=True) as before, pytest.raises(AssertionError, match="it came to compiling"):
        Engine.from_pretrained(folder, tokenizer=given, max_len=32)
    (folder / "tokenizer.json").write_text("{}")
    hint = r"own tokenizer \(tokenizer\.json\), got tokenizer=\"bytes\"; leave it out"
    with pytest.warns(UserWarning, match=hint), pytest.raises(AssertionError, match="it came to compiling"):
        Engine.from_pretrained(folder, tokenizer=given, max_len=32)
    assert before == []


def test_deterministic_engine_with_unsupported_weight_shape_on_a_gpu_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="it came to compiling"):
        Engine(engines.target(), deterministic=True)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=r"deterministic: on a GPU the weight must be \[multiple of 64"):
        Engine(engines.target(), deterministic=True)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    (dict(slots=0), r"slots: expected an int from 1 to 2147483647, got 0"),
    (dict(slots=2.0), r"slots: expected an int from 1 to 2147483647, got 2\.0"),
    (dict(eos_ids=(2, 99)), r"eos_ids: expected ids in \[0, 16\), got 99"),
    (dict(max_len=-5), r"max_len: expected an int from 1 to 2147483647, got -5"),
    (dict(page_size=0), r"page_size: expected an int from 1 to 2147483647, got 0"),
    (dict(rounds_per_dispatch=0), r"rounds_per_dispatch: expected an int from 1 to 2147483647, got 0"),
    (dict(buckets=()), r"buckets: expected ascending positive sizes, at least one, got \(\)"),
    (dict(slots=4, buckets=(2, 1, 4)), r"buckets: expected ascending .* got \(2, 1, 4\)"),
    (dict(slots=4, buckets=(1, 1, 4)), r"buckets: expected ascending .* got \(1, 1, 4\)"),
    (dict(slots=4, buckets=(0, 4)), r"buckets: expected ascending positive .* got \(0, 4\)"),
    (dict(slots=4, buckets=(1, 8)), r"buckets: expected slots=4 last, got \(1, 8\)"),
    (dict(slots=4, buckets=(1, 2)), r"buckets: expected slots=4 last, got \(1, 2\)"),
    (dict(buckets=8), r"buckets: expected None or a tuple of ints, got 8"),
    (dict(slots=2, buckets=(1.0, 2.0)), r"buckets: expected None or a tuple of ints, got \(1\.0, 2\.0\)"),
    (dict(prefill_buckets=()), r"prefill_buckets: expected ascending positive sizes, at least one, got \(\)"),
    (dict(prefill_buckets=(64, 16)), r"prefill_buckets: expected ascending .* got \(64, 16\)"),
    (dict(accept="greedy"), r"accept: expected one of \('coupled', .*'typical'\), got 'greedy'"),
    (dict(implementation="cuda"), r"implementation: expected one of \('auto', 'pallas', 'reference'\), got 'cuda'"),
    (dict(kv_dtype="int3"), r"kv_dtype: expected one of .* got 'int3'"),
    (
        dict(quantize="int3"),
        r"quantize: expected one of \(None, 'int8', 'fp8', 'fp8_dynamic', 'int4', 'mxfp4', 'none'\), got 'int3'",
    ),
    (dict(quantize=True), r"quantize: expected one of .* got True"),
    (dict(memory_fraction=0), r"memory_fraction: expected in \(0, 1\], got 0"),
    (dict(memory_fraction=1.5), r"memory_fraction: expected in \(0, 1\], got 1\.5"),
    (dict(pages=1), r"pages: expected None or an int from 2 to 2147483647, got 1"),
    (dict(prefill_budget=0), r"prefill_budget: expected None or an int from 1 to 2147483647, got 0"),
    (dict(predicted_tokens=-1), r"predicted_tokens: expected an int from 0 to 2147483647, got -1"),
    (dict(predicted_tokens=4), r"predicted_tokens: expected a drafter with a look-up, got NoDraft"),
    (dict(overlap=1), r"overlap: expected a bool, got 1"),
    (dict(controls=None), r"controls: expected a bool, got None"),
    (dict(seed=-1), r"seed: expected an int >= 0, got -1"),
    (dict(tokenizer="./no-such-folder"), r"tokenizer: expected a folder, \"bytes\" or None, got './no-such-folder'"),
    (dict(tokenizer="bytes"), r"tokenizer: expected ids below 16, the target's vocabulary, got a tokenizer of 256"),
    (dict(max_len=4097), r"max_len: expected at most 4096, the target's max_position_embeddings, got 4097"),
    (
        dict(slots=10**8, max_len=4096),
        r"pages: expected a pool below 2\*\*31 elements, got \d+ pages \(slots=.*; lower slots, .* at most \d+",
    ),
    (dict(pages=10**7, memory_fraction=0.01), r"out of memory: .* To fit, .*pass pages=\d+"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_engine_with_impossible_option_raises_naming_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(engines.target(), **options)


def test_engine_config_with_each_kind_of_quantisation_raises_nothing() -> None:
    assert set(QUANTIZE) == {*KINDS, *EXPERT_KINDS}


def test_engine_with_unknown_option_raises_naming_the_option() -> None:
    with pytest.raises(TypeError, match=r"^Engine: expected slots=.*, got slot_count=$"):
        Engine(engines.target(), slot_count=3)


def test_engine_with_too_many_slots_raises_naming_a_number_of_pages_that_fits() -> None:
    """With the number of pages in the message the engine starts."""
    options: dict[str, Any] = dict(memory_fraction=0.001, slots=8, page_size=16)
    target = engines.target().replace(config=replace(engines.target().config, max_position=2**31 - 1))
    with pytest.raises(ValueError, match="pass pages=") as error:
        Engine(target, max_len=100_000 * 16, **options)
    pages = int(str(error.value).split("pass pages=")[1])
    with pytest.raises(AssertionError, match="it came to compiling"):
        Engine(target, max_len=1000, pages=pages - 8, **options)


def eagle3(*, vocab: int = engines.VOCAB, hidden: int = 16, layers: tuple[int, ...] = (0, 1)) -> Eagle3:
    """Return an EAGLE-3 drafter whose head is made for a target of these sizes."""
    made_for = tiny.model(vocab, layers=1, hidden=hidden)
    return Eagle3(tiny.eagle_head(made_for, draft_vocab=8, feature_layers=layers), CHAIN)


def with_default_layers() -> Eagle3:
    head = tiny.eagle_head(engines.target(), draft_vocab=8, feature_layers=(0, 1))
    return Eagle3(head.replace(config=replace(head.config, feature_layers=None)), CHAIN)


BAD_PAIRS: dict[str, tuple[Any, str]] = {
    "draft model of another vocabulary": (
        lambda: DraftModel(tiny.model(600, layers=1), CHAIN),
        r"DraftModel: expected the target's vocabulary of 16 tokens, or .*, got 600; use a draft model of the ",
    ),
    "head of another vocabulary": (
        lambda: eagle3(vocab=20),
        r"Eagle3: vocabulary: the target needs 16, the head has 20; use a head made for this target",
    ),
    "head of another hidden size": (
        lambda: eagle3(hidden=32),
        r"Eagle3: target hidden size: the target needs 16, the head has 32; use a head made",
    ),
    "head with layers that do not exist": (
        lambda: eagle3(layers=(0, 1, 3)),
        r"Eagle3: feature layers \(0, 1, 3\) do not exist or repeat in a target of 1 layers; pass feature_layers=",
    ),
    "Medusa heads of another hidden size": (
        lambda: Medusa(tiny.medusa_heads(tiny.model(16, layers=1, hidden=32), heads=2), CHAIN),
        r"Medusa: hidden size: the target has 16, the heads have 32; use heads made for this target",
    ),
    "Medusa heads of another vocabulary": (
        lambda: Medusa(tiny.medusa_heads(tiny.model(20, layers=1), heads=2), CHAIN),
        r"Medusa: vocabulary: the target has 16, the heads have 20; use heads made for this target",
    ),
    "EAGLE-1 head of another hidden size": (
        lambda: Eagle(tiny.eagle1_head(tiny.model(16, layers=1, hidden=32)), CHAIN),
        r"Eagle: target hidden size: the target needs 16, the head has 32; use a head made",
    ),
    "EAGLE-1 head as EAGLE-3": (
        lambda: Eagle3(tiny.eagle1_head(engines.target()), CHAIN),
        r"Eagle3: expected a head of method 'eagle3', got 'eagle'",
    ),
    "head with default layers for a shallow target": (with_default_layers, r"needs at least 7 layers"),
}


@pytest.mark.parametrize("pair", BAD_PAIRS)
def test_engine_with_drafter_for_another_target_raises(pair: str) -> None:
    make, message = BAD_PAIRS[pair]
    with pytest.raises(ValueError, match=message):
        Engine(engines.target(), drafter=make())


@pytest.mark.parametrize("method", ["Medusa", "Random", "Scripted"])
def test_drafter_without_scores_with_a_dynamic_tree_raises(method: str) -> None:
    heads = tiny.medusa_heads(engines.target(), heads=2)
    make = {
        "Medusa": lambda: Medusa(heads, DYNAMIC),
        "Random": lambda: Random(DYNAMIC),
        "Scripted": lambda: Scripted([], [], DYNAMIC),
    }
    with pytest.raises(NotImplementedError, match=rf"{method}: expected a chain or a static tree, got topk:4,2,2"):
        make[method]()


def test_medusa_drafter_with_a_tree_deeper_than_its_heads_raises() -> None:
    with pytest.raises(
        ValueError, match=r"Medusa: expected a tree at most 2 deep.*, got chain:3, which is 3 deep; cut the tree"
    ):
        Medusa(tiny.medusa_heads(engines.target(), heads=2), Tree.chain(3))


@pytest.mark.parametrize("tree", [Tree.topk(20, 1, 19), Tree.static([(18,), (0,)])])
def test_drafter_with_a_tree_wider_than_the_vocabulary_raises(tree: Tree) -> None:
    with pytest.raises(ValueError, match=r"DraftModel: .* needs 19 children of a node, the vocabulary has 16"):
        DraftModel(engines.target(), tree)
    with pytest.raises(ValueError, match=r"Eagle3: .* needs 19 children of a node, the draft vocabulary has 8"):
        Eagle3(eagle3().head, tree)


def test_engine_that_is_closed_raises_on_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with paper.make(engines.target(), **engines.PLAIN_OPTIONS) as engine:
        late, begun = engine.stream([1]), engine.stream([1], SamplingParams(max_tokens=9))
        next(begun)
    assert [chunk.finish_reason for chunk in begun][-1] == "abort"
    assert engine.pages_in_use == 0
    for use in (lambda: engine.generate([1]), lambda: engine.stream([1]), lambda: next(late)):
        with pytest.raises(RuntimeError, match="this engine is closed; make a new one"):
            use()
    engine.close()


def test_engine_that_is_closed_has_no_threads_and_refuses_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = set(threading.enumerate())

    def own() -> list[str]:
        return [one.name for one in set(threading.enumerate()) - before if one.name.startswith("jspec")]

    async def ask() -> None:
        await asyncio.gather(*(engine.agenerate([1], SamplingParams(max_tokens=2)) for _ in range(3)))

    with paper.make(engines.target(), **engines.PLAIN_OPTIONS) as engine:
        asyncio.run(ask())
        assert own(), "control"
    wait_until(lambda: not own())
    with pytest.raises(RuntimeError, match="this engine is closed; make a new one"):
        asyncio.run(ask())
