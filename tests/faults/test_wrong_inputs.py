"""Test that wrong input to public calls raises an error with the expected value, the given value and the remedy."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest

import jspec
from jspec import DraftModel, Eagle3, Engine, EngineConfig, Medusa, NGram, SamplingParams, Suffix, Tree
from jspec.core.foreign_names import FOREIGN_NAMES, check_names
from jspec.draft.named import make_drafter
from jspec.engine.input.chat_input import TEMPLATE_FIELDS
from jspec.step.executables import Executables
from tests.support import brittle, byte_pair, engines
from tests.support.odd_values import odd_value

pytestmark = pytest.mark.once

ALLOWED = (TypeError, ValueError, NotImplementedError, FileNotFoundError)
MAX_MESSAGE = 500  # most characters of an error
USER, TEXT = {"role": "user", "content": "hi"}, "expected a text or a list of int token ids"

Call = Callable[[Engine], Any]

# A call with wrong input, and words that its error must contain in this order.
PROMPTS: list[tuple[Call, str]] = [
    (lambda e: e.generate(None), f"prompt: {TEXT}, got None"),
    (lambda e: e.generate(5), f"prompt: {TEXT}, got 5; a prompt of one token is [5]"),
    (lambda e: e.generate(1.5), f"prompt: {TEXT}, got 1.5"),
    (lambda e: e.generate(b"abc"), f"prompt: {TEXT}, got b'abc'; decode it, as in prompt.decode()"),
    (lambda e: e.generate({1, 2}), f"prompt: {TEXT}, got {{1, 2}}; a set has no order, so give a list"),
    (lambda e: e.generate({"x": 1}), 'expected a dict with "prompt" or "prompt_token_ids" alone, got the keys [\'x\']'),
    (lambda e: e.generate({"prompt": "a", "prompt_token_ids": [1]}), "got the keys ['prompt', 'prompt_token_ids']"),
    (lambda e: e.generate({"prompt": [1]}), "prompt: expected a text in prompt or ids in prompt_token_ids, got [1]"),
    (lambda e: e.generate([None]), f"prompt: {TEXT}, got None"),
    (lambda e: e.generate(["a", b"b"]), f"prompts[1]: {TEXT}, got b'b'; decode it"),
    (lambda e: e.generate([[1], [2], []]), "prompts[2]: expected at least one token, got none; give a BOS token"),
    (lambda e: e.generate(["a", "b" * 99]), "prompts[1]: expected fewer tokens than max_len=64|got 99; shorten it"),
    (lambda e: e.generate([[1], [999]]), "prompts[1]: expected ids in [0, 256), got 999"),
    (lambda e: e.generate([1, 2.5]), "prompt: expected int token ids, got 2.5 in [1, 2.5]"),
    (lambda e: e.generate([True]), "prompt: expected int token ids, got True in [True]"),
    (lambda e: e.generate(np.array([0.5])), "prompt: expected int token ids, got 0.5"),
    (lambda e: e.generate(np.zeros((1, 1, 1), int)), "prompt: expected int token ids, got [0]|give one prompt here"),
    (lambda e: e.generate("\ud800"), "prompt: expected a text that UTF-8 can represent"),
    (
        lambda e: e.stream([[1], [2]]),
        "prompt: expected int token ids, got [1]|give one prompt here, and several to gen",
    ),
    (
        lambda e: e.submit(["a", "b"]),
        "prompt: expected int token ids, got 'a'|give one prompt here, and several to gen",
    ),
    (lambda e: asyncio.run(anext(e.astream(None))), f"prompt: {TEXT}, got None"),
]
PARAMETERS: list[tuple[Call, str]] = [
    (lambda e: e.generate([1], 16), "params: expected SamplingParams, a dict of its fields or a list of these, got 16"),
    (lambda e: e.generate([1], ["x"]), "params: expected SamplingParams or a dict of its fields, got 'x'"),
    (lambda e: e.generate([1], [{}, {}]), "params: expected one, got 2"),
    (lambda e: e.generate([1], {"max_new_tokens": 3}), "SamplingParams: expected max_tokens=, got max_new_tokens="),
    (lambda e: e.generate([1], {5: 3}), "SamplingParams: expected names of type str, got 5"),
    (lambda e: e.generate([1], {"n": 2}, n=3), "params: expected one of params, sampling_params= and single fields"),
    (lambda e: e.generate([1], {}, sampling_params={}), "params: expected one of params|got 2 of them"),
    (lambda e: e.generate([1], max_new_tokens=3), "generate: expected max_tokens=, got max_new_tokens="),
    (lambda e: e.stream([1], slots=3), "generate: expected this argument in Engine, not here, got slots="),
    (lambda e: e.submit([1], temprature=0), "generate: expected temperature=|got temprature="),
    (lambda e: SamplingParams(trace=True), "SamplingParams: expected this argument in Engine.generate, not here"),
    (lambda e: SamplingParams(best_of=2), "SamplingParams: expected n=|got best_of="),
    (lambda e: SamplingParams(max_tokens="64"), "SamplingParams.max_tokens: expected an int >= 1 or None, got '64'"),
    (lambda e: SamplingParams(logit_bias={"a": 1}), "SamplingParams.logit_bias: expected None or {token id"),
    (lambda e: SamplingParams(logit_bias={"5": 1, 5: 2}), "SamplingParams.logit_bias: expected None or {token id"),
]
CHATS: list[tuple[Call, str]] = [
    (
        lambda e: e.chat("hello"),
        'messages: expected a list of messages|got \'hello\'; give [{"role": "user", "content"',
    ),
    (lambda e: e.chat(USER), "messages: expected a list of messages|give the message in a list"),
    (lambda e: e.chat([]), "messages: expected at least one message, got none"),
    (lambda e: e.chat([USER, 5]), "messages[1]: expected a dict|got 5"),
    (lambda e: e.chat([{"role": "user"}]), "messages[0].content: expected a text or a list of parts|got None"),
    (lambda e: e.chat([{"text": "x"}]), "messages[0].role: expected a text, got None"),
    (lambda e: e.chat([[USER], [USER, {"role": 1}]]), "messages[1][1].role: expected a text, got 1"),
    (lambda e: e.chat([[USER], "x"]), "messages[1]: expected a list of messages|got 'x'"),
    (lambda e: e.chat([{**USER, "content": ["x"]}]), 'content[0]: expected {"type": "text", "text": ...}, got \'x\''),
    (lambda e: e.chat([{**USER, "content": [{"type": "image"}]}]), "this engine has no image input"),
    (lambda e: e.chat([USER], tools={"a": 1}), "tools: expected a list, got {'a': 1}; give one of the tools in a list"),
    (lambda e: e.chat([USER], tools=["x"]), "tools[0]: expected a JSON schema as a dict, or a Python function|got 'x'"),
    (lambda e: e.chat([USER], tools=[lambda a: a]), "tools[0]: expected a function with annotated arguments|docstring"),
    (lambda e: e.chat([USER], documents=["x"]), "documents[0]: expected a dict such as|got 'x'"),
    (lambda e: e.chat([USER], chat_template=5), "chat_template: expected a text, got 5"),
    (lambda e: e.chat([USER], add_generation_prompt=1), "add_generation_prompt: expected a bool, got 1"),
    (lambda e: e.chat([USER], continue_final_message=1), "continue_final_message: expected a bool or the key of"),
    (
        lambda e: e.chat([USER], continue_final_message=True, add_generation_prompt=True),
        "continue_final_message: expected False with add_generation_prompt=True, got True",
    ),
    (lambda e: e.chat([USER], chat_template_kwargs=["x"]), "chat_template_kwargs: expected a dict of the template's"),
    (
        lambda e: e.chat([USER], chat_template_kwargs={"tools": []}),
        "template's own variables, got 'tools'; pass tools=",
    ),
    (lambda e: e.chat([USER], chat_template_kwargs={5: 1}), "template's own variables, got 5"),
    (lambda e: e.chat([USER], enable_thinking=False), "chat: expected chat_template_kwargs= of Engine.chat, such as"),
    (lambda e: e.chat([USER], tool=[]), "chat: expected tools=|got tool="),
    (lambda e: e.chat([USER], slots=3), "chat: expected this argument in Engine, not here, got slots="),
    (lambda e: e.generate([1], tools=[]), "generate: expected this argument in Engine.chat, not here, got tools="),
    (lambda e: e.chat_stream([[USER], [USER]]), "the byte tokenizer has no chat template"),
]
OBJECTS: list[tuple[Call, str]] = [
    (lambda e: e.result("abc"), "result: expected a request that submit returned, got 'abc'"),
    (lambda e: e.abort(5), "abort: expected a request that submit returned, got 5"),
    (pickle.dumps, "Engine: expected an object that can be copied or pickled|make another engine"),
    (copy.deepcopy, "Engine: expected an object that can be copied or pickled|make another engine"),
    (lambda e: Engine("path"), "Engine: target: expected a loaded Model, got 'path'|call Engine.from_pretrained(path)"),
    (lambda e: Engine.from_pretrained(None), "path: expected a folder, a hub id (owner/name) or a Model, got None"),
    (lambda e: Engine.from_pretrained(engines.target(), dtype="float32"), "dtype: expected None with a loaded Model"),
    (lambda e: Engine(engines.target(), eos_ids=5), "eos_ids: expected a list of int token ids, got 5"),
    (lambda e: Engine(engines.target(), eos_ids="ab"), "eos_ids: expected a list of int token ids, got 'ab'"),
    (
        lambda e: Engine(engines.target(), compile_cache="/proc/x"),
        "compile_cache: expected a folder that exists or can be",
    ),
]
DRAFTERS: list[tuple[Call, str]] = [
    (lambda e: make(drafter="eagle3"), "drafter: expected a Drafter, \"ngram\"|got 'eagle3'; a method with weights"),
    (
        lambda e: make(drafter="eagle3+suffix"),
        "drafter: expected a Drafter|got 'eagle3'; a method with weights needs their",
    ),
    (lambda e: make(drafter="ngram+suffix"), "Beside: model: expected a head (Eagle3, Eagle|got NGram('chain:5')"),
    (lambda e: make(drafter="none+suffix"), "Beside: model: expected a head|got None"),
    (lambda e: make(drafter="a/b/c/d+suffix"), "a/b/c/d: expected a folder or a hub id"),
    (
        lambda e: make(drafter=f"{byte_pair.TARGET}+suffix"),
        "Beside: model: expected a head|got a DraftModel, whose cache",
    ),
    (lambda e: make(drafter=NGram), "drafter: expected a Drafter|NGram'>; pass an object: NGram()"),
    (lambda e: make(drafter=Eagle3), "Eagle3'>; pass an object: Eagle3.from_pretrained(path)"),
    (lambda e: make(drafter=engines.target()), "drafter: expected a Drafter|pass jspec.DraftModel(model)"),
    (lambda e: make(drafter={"method": "ngram"}), "drafter: expected a Drafter|got {'method': 'ngram'}"),
    (lambda e: make(drafter="no/such/folder/here"), "no/such/folder/here: expected a folder or a hub id"),
    (lambda e: NGram(4), 'NGram: tree: expected a Tree or a text such as "chain:4", got 4; pass Tree.chain(4)'),
    (lambda e: Suffix(None), "Suffix: tree: expected a Tree|got None"),
    (lambda e: NGram("4"), "tree: expected chain:LENGTH, topk:NODES,DEPTH,K or static|got '4'"),
    (lambda e: NGram("static:99999999999999"), "Tree.static: expected ranks below 2**31, got [(99999999999999,)]"),
    (lambda e: Tree.parse(4), "tree: expected a text, chain:LENGTH|got 4"),
    (
        lambda e: Tree.chain(300),
        "Tree.chain: expected at most 256 nodes with the root, got length 300; take a smaller tree",
    ),
    (lambda e: Tree.chain(10**9), "Tree.chain: expected at most 256 nodes with the root, got length 1000000000"),
    (lambda e: DraftModel(engines.target(), 4), "DraftModel: tree: expected a Tree|got 4; pass Tree.chain(4)"),
    (lambda e: Eagle3("path"), "Eagle3: head: expected EagleHead, got 'path'|call Eagle3.from_pretrained(path)"),
    (
        lambda e: DraftModel("path"),
        "DraftModel: model: expected Model, got 'path'|call DraftModel.from_pretrained(path)",
    ),
    (lambda e: Medusa("path"), "Medusa: heads: expected MedusaHeads, got 'path'|call Medusa.from_pretrained(path)"),
]
OPTIONS: list[tuple[Call, str]] = [
    (lambda e: make(max_model_len=5), "Engine: expected max_len=, got max_model_len="),
    (lambda e: make(max_num_seqs=5), "Engine: expected slots=, got max_num_seqs="),
    (lambda e: make(gpu_memory_utilization=0.5), "Engine: expected memory_fraction=, got gpu_memory_utilization="),
    (lambda e: make(tensor_parallel_size=2), "Engine: expected tensor_parallel=, got tensor_parallel_size="),
    (
        lambda e: make(num_speculative_tokens=2),
        "Engine: expected the tree of the drafter, such as tree=jspec.Tree.chain",
    ),
    (lambda e: make(slot=2), "Engine: expected slots=|got slot="),
    (lambda e: make(temperature=0), "Engine: expected this argument in SamplingParams, not here, got temperature="),
    (lambda e: make(dtype="float32"), "Engine: expected this argument in Engine.from_pretrained, not here, got dtype="),
    (lambda e: make(zzz=1), "Engine: expected one of slots, max_len|got zzz="),
    (
        lambda e: Engine.from_pretrained("x", torch_dtype="auto"),
        "Engine.from_pretrained: expected dtype= of|got torch_",
    ),
    (lambda e: EngineConfig(block_size=16), "EngineConfig: expected page_size=, got block_size="),
    (lambda e: make(memory_fraction="0.9"), "memory_fraction: expected in (0, 1], got '0.9'"),
    (lambda e: make(accept=np.zeros(2)), "accept: expected one of ('coupled'|got array"),
    (lambda e: make(slots=2**40), "slots: expected an int from 1 to 2147483647, got 1099511627776"),
    (
        lambda e: make(slots=2**30, max_len=4096),
        "pages: expected a pool below 2**31 elements|lower slots, max_len or page_size",
    ),
]
CASES = [*PROMPTS, *PARAMETERS, *CHATS, *OBJECTS, *DRAFTERS, *OPTIONS]


def make(**options: Any) -> Engine:
    """Make an engine for the small target."""
    return Engine(engines.target(), **options)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield the shared engine with a byte tokenizer; check afterwards that it holds no request and still generates."""
    brittle.expected()
    yield brittle.engine()
    brittle.check_idle(brittle.engine())


@pytest.mark.parametrize(("call", "words"), CASES, ids=[words[:60] for _, words in CASES])
def test_public_call_with_wrong_input_raises_an_error_with_the_listed_words(
    engine: Engine, call: Call, words: str
) -> None:
    with pytest.raises(ALLOWED) as error:
        call(engine)
    message = str(error.value)
    assert re.search(".*".join(map(re.escape, words.split("|"))), message, re.DOTALL), message
    assert len(message) < MAX_MESSAGE
    assert not engine.scheduler.has_work


def test_text_prompt_without_tokenizer_raises_before_anything_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(engines.target(), slots=1, max_len=16) as engine:
        compiled: list[Any] = []
        monkeypatch.setattr(engine.core.runner, "compile", compiled.append)
        for call in (
            engine.generate,
            engine.stream,
            engine.submit,
            lambda text: asyncio.run(anext(engine.astream(text))),
        ):
            with pytest.raises(ValueError, match="prompt: expected token ids, because this engine has no tokenizer"):
                call("hello")
        assert not compiled and not engine.compile_seconds
        monkeypatch.setattr(engine.core.runner, "compile", _reached)
        with pytest.raises(Reached):  # negative control: a prompt of token ids is queued and compiles programs
            engine.generate([1])


class Reached(Exception):
    """Error that replaces compilation; it shows that all values before it were accepted."""


def _reached(*args: Any, **options: Any) -> None:
    raise Reached


# -- names of other libraries


def public_names() -> set[str]:
    """Return the argument names of the public calls."""
    return {field.name for record in (EngineConfig, SamplingParams) for field in fields(record)} | {
        "drafter",
        "dtype",
        "eos_ids",
        "logits_processor",
        "progress",
        "tokenizer",
        "trace",
        "tree",
        "requests",
        "weights",
        *TEMPLATE_FIELDS,
    }


def test_foreign_names_are_unknown_to_jspec_and_their_hints_are_known() -> None:
    names = public_names()
    assert not names & set(FOREIGN_NAMES)
    for name, hint in FOREIGN_NAMES.items():
        ours = re.findall(r"(\w+)=", hint)
        calls = re.findall(r"jspec\.(\w+)", hint)
        assert all(hasattr(jspec, call) for call in calls), name
        parts = {*names, "device", "max_n", "min_n", "nodes", "depth", "k"}
        assert set(ours) <= parts, (name, hint)
        assert ours or hint.startswith(("no such option", "Engine.", "the prompts")), (name, hint)


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_foreign_name_as_engine_option_raises_an_error_with_its_hint(name: str) -> None:
    with pytest.raises(TypeError) as error:
        make(**{name: 1})
    assert str(error.value) == f"Engine: expected {FOREIGN_NAMES[name]}, got {name}="


LOADED: Any = (DraftModel, Eagle3, Medusa, jspec.DFlash, jspec.MTP, jspec.Model)
LOADS: dict[str, Callable[..., object]] = {
    **{f"{cls.__name__}.from_pretrained": partial(cls.from_pretrained, "nowhere") for cls in LOADED},
    **{cls.__name__: cls for cls in (NGram, Suffix)},
}


@pytest.mark.parametrize("name", LOADS)
def test_foreign_name_as_an_option_of_a_drafter_or_model_raises_an_error_with_its_hint(name: str) -> None:
    for foreign in ("num_speculative_tokens", "revision"):
        with pytest.raises(TypeError) as error:
            LOADS[name](**{foreign: 3})
        assert str(error.value) == f"{name}: expected {FOREIGN_NAMES[foreign]}, got {foreign}="


def test_foreign_attribute_of_a_completion_raises_an_error_with_jspecs_name() -> None:
    (done,) = brittle.engine().generate([1], max_tokens=1)
    with pytest.raises(AttributeError, match=r"Completion\.outputs: expected samples, the n completions of the prompt"):
        done.outputs  # noqa: B018
    with pytest.raises(AttributeError, match="'Completion' object has no attribute 'outptus'"):
        done.outptus  # noqa: B018
    assert copy.deepcopy(done) == done and not hasattr(done, "choices")


def test_name_check_of_a_known_name_raises_nothing() -> None:
    check_names("Engine", ["slots"], ["slots"])


# -- random values


def option(rng: random.Random, engine: Engine, value: Any) -> None:
    name = rng.choice([field.name for field in fields(EngineConfig)])
    if name == "compile_cache" and isinstance(value, str):
        return  # any text is a valid folder for programs
    make(**{name: value})


def field_of_params(rng: random.Random, engine: Engine, value: Any) -> None:
    name = rng.choice([field.name for field in fields(SamplingParams)])
    params = SamplingParams(**{name: value})
    if name not in ("n", "regex", "json_schema", "grammar") and params.logprobs is params.prompt_logprobs is None:
        engine.generate([1], params)


RANDOM_CALLS: dict[str, Callable[[random.Random, Engine, Any], Any]] = {
    "prompt": lambda rng, e, value: e.generate(value, max_tokens=1),
    "single prompt": lambda rng, e, value: e.abort(e.submit(value, max_tokens=1)),
    "params": lambda rng, e, value: e.generate([1], value),
    "field": field_of_params,
    "option": option,
    "chat": lambda rng, e, value: e.chat(value),
    "drafter": lambda rng, e, value: make_drafter(value),
    "engine's drafter": lambda rng, e, value: make(drafter=value),
    "tree": lambda rng, e, value: make(drafter=rng.choice([NGram, Suffix])(value)),
    "draft model's tree": lambda rng, e, value: DraftModel(engines.target(), value, draft_window=odd_value(rng)),
    "lengths": lambda rng, e, value: NGram(max_n=value, min_n=odd_value(rng)),
    "suffix": lambda rng, e, value: Suffix(scope=value, corpus_tokens=odd_value(rng)),
    "Tree.chain": lambda rng, e, value: Tree.chain(value),
    "Tree.static": lambda rng, e, value: Tree.static(value),
    "Tree.topk": lambda rng, e, value: Tree.topk(value, odd_value(rng), odd_value(rng)),
    "Tree.parse": lambda rng, e, value: Tree.parse(value),
    "head": lambda rng, e, value: rng.choice([Eagle3, Medusa, DraftModel])(value),
    "target": lambda rng, e, value: Engine(value),
    "path": lambda rng, e, value: Engine.from_pretrained(None if isinstance(value, str) else value),
    "eos_ids": lambda rng, e, value: make(eos_ids=value),
    "logits_processor": lambda rng, e, value: make(logits_processor=value),
    "request": lambda rng, e, value: rng.choice([e.result, e.abort])(value),
}


def faults(call: str, seeds: range, engine: Engine) -> tuple[list[str], int]:
    """Run a public call with random values; return what is wrong with its errors, and the number of errors."""
    found, refused = [], 0
    for seed in seeds:
        rng = random.Random(f"{call} {seed}")
        try:
            RANDOM_CALLS[call](rng, engine, odd_value(rng))
        except Reached:
            continue
        except Exception as error:
            refused += 1
            message = str(error)
            if not isinstance(error, ALLOWED) or "expected" not in message or len(message) >= MAX_MESSAGE:
                found.append(f"{call}, seed {seed}: {type(error).__name__}: {message[:200]}")
    return found, refused


@pytest.fixture
def _nothing_is_compiled_for_new_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executables, "__init__", _reached)


@pytest.mark.parametrize("count", [5, pytest.param(500, marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("call", RANDOM_CALLS)
@pytest.mark.usefixtures("_nothing_is_compiled_for_new_engines")
def test_public_call_with_random_values_succeeds_or_raises_an_error_saying_expected(
    engine: Engine, call: str, count: int
) -> None:
    found, refused = faults(call, range(count), engine)
    assert not found and refused
    brittle.check_idle(brittle.engine())


def test_random_value_check_of_a_call_without_checks_finds_a_raw_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the call passes its values to Python's len."""
    monkeypatch.setitem(RANDOM_CALLS, "raw", lambda rng, e, value: len(value))
    found, refused = faults("raw", range(20), engine)
    assert found and len(found) == refused
