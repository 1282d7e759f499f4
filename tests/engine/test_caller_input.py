"""Test that prompts, parameters, conversations and drafters give equal results in every accepted form."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jspec
from jspec import DraftModel, Eagle, Eagle3, Engine, EngineConfig, Medusa, NGram, SamplingParams, Suffix, Tree
from jspec.core.engine_options import EngineOptions
from jspec.core.tree import DEFAULT_TREE
from jspec.draft.named import make_drafter
from jspec.engine.input import caller_input
from jspec.engine.request.request import Completion
from jspec.engine.request.sampling_fields import SamplingFields
from tests.support import byte_pair, engines, tiny

pytestmark = pytest.mark.once

GREEDY = SamplingParams(max_tokens=4, temperature=0)
PLAIN = [list(b"abc"), [1, 2], [7]]
BATCHES: dict[str, Callable[[], Any]] = {
    "lists": lambda: PLAIN,
    "tuples": lambda: tuple(map(tuple, PLAIN)),
    "generator": lambda: (prompt for prompt in PLAIN),
    "text and dicts": lambda: ["abc", {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": (7,)}],
    "text in a dict": lambda: [{"prompt": "abc"}, [1, 2], [7]],
    "arrays": lambda: [np.array(PLAIN[0], np.uint8), jnp.array([1, 2]), np.array([7])],
    "iterators": lambda: [iter(PLAIN[0]), range(1, 3), iter([7])],
    "scalars": lambda: [[np.int64(97), jnp.int32(98), np.array(99)], [jnp.int8(1), 2], [np.uint8(7)]],
}


def ids(done: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in done]


@pytest.fixture
def wanted(engine: Engine) -> list[list[int]]:
    return ids(engine.generate(PLAIN, GREEDY))


@pytest.mark.parametrize("form", BATCHES)
def test_generate_of_prompts_in_any_form_returns_the_tokens_of_lists(
    engine: Engine, wanted: list[list[int]], form: str
) -> None:
    assert ids(engine.generate(BATCHES[form](), GREEDY)) == wanted


def test_generate_of_an_array_with_two_axes_takes_each_row_as_a_prompt(engine: Engine) -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    wanted = ids(engine.generate(rows, GREEDY))
    assert ids(engine.generate(np.array(rows), GREEDY)) == ids(engine.generate(jnp.array(rows), GREEDY)) == wanted


@pytest.mark.parametrize("prompt", [itertools.count(), itertools.repeat("a"), range(10**30), [itertools.count()]])
def test_prompts_without_end_raise_before_they_fill_the_memory(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_input, "MAX_ITEMS", 1000)
    with pytest.raises(ValueError, match="expected at most 1000 prompts, tokens or ids at once, got more in"):
        caller_input.read_prompts(prompt)
    assert caller_input.read_prompts(range(1000)) == [tuple(range(1000))]


@pytest.mark.parametrize("prompt", ["abc", {"prompt": "abc"}, (97, 98, 99), np.array([97, 98, 99]), range(97, 100)])
def test_single_prompt_in_any_form_returns_equal_tokens_from_every_call(
    engine: Engine, wanted: list[list[int]], prompt: Any
) -> None:
    assert ids(engine.generate(prompt, GREEDY)) == wanted[:1]
    assert engine.result(engine.submit(prompt, GREEDY)).token_ids == wanted[0]
    assert [token for chunk in engine.stream(prompt, GREEDY) for token in chunk.token_ids] == wanted[0]


def test_generate_of_torch_tensors_returns_the_tokens_of_lists(engine: Engine, wanted: list[list[int]]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    prompts = [torch.tensor(PLAIN[0]), [torch.tensor(1), 2], torch.tensor([7])]
    assert ids(engine.generate(prompts, GREEDY)) == wanted


def test_generate_without_prompts_returns_no_completions(engine: Engine) -> None:
    assert engine.generate([]) == engine.generate(iter([])) == []


def test_parameters_as_dict_list_or_keywords_return_the_tokens_of_sampling_params(
    engine: Engine, wanted: list[list[int]]
) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    for params in (fields, [fields, GREEDY, fields], (GREEDY for _ in PLAIN)):
        assert ids(engine.generate(PLAIN, params)) == wanted
    assert ids(engine.generate(PLAIN, **fields)) == wanted
    assert ids(engine.generate(PLAIN, sampling_params=[GREEDY] * 3)) == wanted
    assert engine.result(engine.submit("abc", **fields)).token_ids == wanted[0]
    assert [token for chunk in engine.stream("abc", fields) for token in chunk.token_ids] == wanted[0]


def test_request_with_max_tokens_none_ends_at_max_len(engine: Engine) -> None:
    (done,) = engine.generate([1, 2], max_tokens=None, ignore_eos=True)
    assert len(done.token_ids) == engine.config.max_len - 2 and done.finish_reason == "length"
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None


def test_logit_bias_with_ids_as_texts_biases_the_tokens_of_these_ids(engine: Engine) -> None:
    (done,) = engine.generate([1], max_tokens=3, logit_bias={"5": 100, 7: -100})
    assert done.token_ids == [5, 5, 5]


def test_result_of_an_ended_request_returns_its_completion_again(engine: Engine) -> None:
    request = engine.submit([1], GREEDY)
    assert engine.result(request).token_ids == engine.result(request).token_ids


# -- conversations


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "s"}, {"role": "user", "content": text}]


@pytest.fixture
def chatting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return the shared engine with a chat template that joins the contents of messages with bars."""
    monkeypatch.setattr(
        engine.tokenizer,
        "chat",
        lambda messages: list("|".join(m["content"] for m in messages).encode()),
        raising=False,
    )
    return engine


def test_chat_of_one_or_several_conversations_returns_one_completion_each(chatting: Engine) -> None:
    wanted = ids(chatting.generate(["s|a", "s|bb"], GREEDY))
    assert ids(chatting.chat(conversation("a"), GREEDY)) == wanted[:1]
    assert ids(chatting.chat([conversation("a"), conversation("bb")], GREEDY)) == wanted
    assert (
        ids(chatting.chat((tuple(conversation(text)) for text in ("a", "bb")), max_tokens=4, temperature=0)) == wanted
    )
    chunks = chatting.chat_stream(conversation("a"), GREEDY)
    assert [token for chunk in chunks for token in chunk.token_ids] == wanted[0]
    with pytest.raises(ValueError, match="messages: expected one conversation, got 2; call chat_stream for each"):
        chatting.chat_stream([conversation("a")] * 2)


def test_chat_in_all_forms_passes_the_options_of_the_template_to_the_tokenizer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "tools": [{"type": "function"}],
        "documents": [{"text": "d"}],
        "chat_template": "{{ x }}",
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    seen = []

    def chat(messages: Any, **given: Any) -> list[int]:
        seen.append(given)
        return list(b"abc")

    monkeypatch.setattr(engine.tokenizer, "chat", chat, raising=False)
    wanted = ids(engine.generate(["abc"], GREEDY))
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    assert ids(engine.chat(conversation("a"), GREEDY, **options)) == wanted
    assert ids(engine.chat([conversation("a")], **options, **fields)) == wanted
    assert ids(asyncio.run(engine.achat(conversation("a"), sampling_params=GREEDY, **options))) == wanted
    chunks = engine.chat_stream(conversation("a"), sampling_params=GREEDY, **options)
    assert [[token for chunk in chunks for token in chunk.token_ids]] == wanted
    assert seen == [options] * 4
    engine.chat(conversation("a"), GREEDY, tools=None, continue_final_message=True)
    assert seen[-1] == {"continue_final_message": True}, "None counts as not given"


def test_chat_with_a_template_that_raises_gives_a_value_error_with_its_message(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: Any) -> None:
        raise KeyError("roles must alternate")

    monkeypatch.setattr(engine.tokenizer, "chat", refuse, raising=False)
    with pytest.raises(ValueError, match=r"messages: expected a conversation .* accepts.*roles must alternate"):
        engine.chat(conversation("a"))


def test_agenerate_and_achat_in_tasks_return_the_completions_of_generate(chatting: Engine) -> None:
    wanted = ids(chatting.generate(["s|a", [1, 2], [7]], GREEDY))

    async def gather() -> list[list[Completion]]:
        return await asyncio.gather(
            chatting.achat(conversation("a"), GREEDY), chatting.agenerate([[1, 2], [7]], max_tokens=4, temperature=0)
        )

    first, second = asyncio.run(gather())
    assert ids([*first, *second]) == wanted


def test_cancelled_agenerate_aborts_its_requests(engine: Engine) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(engine.agenerate([[1], [2]], max_tokens=None, ignore_eos=True))
        while not engine.scheduler.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work


# -- drafters


def test_every_drafter_without_a_tree_drafts_the_default_chain() -> None:
    target = engines.target()
    head = tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1))
    drafters = [NGram(), Suffix(), DraftModel(target), Eagle3(head), Eagle(tiny.eagle1_head(target))]
    assert {drafter.tree for drafter in drafters} == {DEFAULT_TREE}
    assert Medusa(tiny.medusa_heads(target, 3)).tree == Tree.chain(3)
    assert Medusa(tiny.medusa_heads(target, 7)).tree == DEFAULT_TREE
    assert (
        Eagle3.from_pretrained(byte_pair.HEAD).tree == DraftModel.from_pretrained(byte_pair.TARGET).tree == DEFAULT_TREE
    )


def test_every_drafter_accepts_its_tree_as_text() -> None:
    target = engines.target()
    head = tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1))
    makes: list[Callable[[str], Any]] = [
        *(NGram, Suffix),
        *(lambda tree: DraftModel(target, tree), lambda tree: Eagle3(head, tree)),
        *(lambda tree: Eagle(tiny.eagle1_head(target), tree), lambda tree: Medusa(tiny.medusa_heads(target, 3), tree)),
        lambda tree: Eagle3.from_pretrained(byte_pair.HEAD, tree=tree),
        lambda tree: DraftModel.from_pretrained(byte_pair.TARGET, tree=tree),
    ]
    assert {make("static:0,1,0.0").tree for make in makes} == {Tree.static([(0,), (1,), (0, 0)])}


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (None, "None"),
        ("none", "None"),
        ("ngram", "NGram('chain:5')"),
        ("suffix", "Suffix('chain:5')"),
        (byte_pair.HEAD, "Eagle3('chain:5')"),
        (str(byte_pair.TARGET), "DraftModel('chain:5')"),
        (f"{byte_pair.HEAD}+ngram", "Beside(Eagle3('chain:5'), NGram('chain:5'), 'replace', threshold=None)"),
    ],
)
def test_make_drafter_of_a_name_or_path_returns_the_named_drafter(source: str | Path | None, shown: str) -> None:
    assert repr(make_drafter(source)) == shown


def test_engine_given_the_path_of_a_head_drafts_with_that_head() -> None:
    options: dict[str, Any] = dict(slots=1, max_len=64, tokenizer="bytes", dtype="float32")
    with Engine.from_pretrained(byte_pair.TARGET, drafter=byte_pair.HEAD, **options) as engine:
        (done,) = engine.generate("def main(", max_tokens=16, temperature=0)
        assert done.metrics.mean_acceptance_length > 1.5
        assert repr(engine) == (
            f"Engine(llama model of {engine.core.runner.params.target.config.num_layers} layers and 256 tokens, "
            "drafter=Eagle3('chain:5'), slots=1, max_len=64)"
        )
    assert repr(engine).startswith("Engine(closed, llama")


# -- types for editors


@pytest.mark.parametrize(("keywords", "record"), [(EngineOptions, EngineConfig), (SamplingFields, SamplingParams)])
def test_typed_keywords_have_the_names_and_types_of_their_record(keywords: Any, record: Any) -> None:
    names = {"Mesh": Mesh}  # which the records import for type checkers alone
    hints = get_type_hints(record, localns=names)
    wanted = {field.name: hints[field.name] for field in fields(record)}
    assert list(wanted) == list(keywords.__annotations__)
    assert get_type_hints(keywords, localns=names) == wanted


def test_records_with_checked_names_keep_their_constructor_signatures() -> None:
    assert list(inspect.signature(EngineConfig).parameters) == [field.name for field in fields(EngineConfig)]
    assert list(inspect.signature(SamplingParams).parameters) == [field.name for field in fields(SamplingParams)]
    assert SamplingParams(3, 0.5) == SamplingParams(max_tokens=3, temperature=0.5)
    assert jspec.EngineConfig is EngineConfig
