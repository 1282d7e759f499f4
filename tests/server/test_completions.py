"""Test /v1/completions with OpenAI's Python client against the engine itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jspec import SamplingParams
from tests.support import engines, paper, serving

MESSAGES = [{"role": "user", "content": "a"}]
PROMPT = "Once upon a time, there was a little girl. Once upon a time"


@pytest.fixture(scope="module")
def server() -> Iterator[serving.Running]:
    with serving.running() as one:
        yield one


@pytest.fixture(scope="module")
def client(server: serving.Running) -> openai.OpenAI:
    return server.client()


def own(prompt: Any = PROMPT, **params: Any) -> Any:
    """Return the engine's completion of the same request."""
    (done,) = serving.engine().generate([prompt], SamplingParams(**params))
    return done


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """Return the client's answer; fields that it does not know go into the body."""
    known = {"prompt", "max_tokens", "temperature", "seed", "n", "stop", "logprobs", "echo", "stream", "model"}
    extra = {name: fields.pop(name) for name in list(fields) if name not in known}
    return client.completions.create(**{"model": serving.NAME, "prompt": PROMPT, **fields}, extra_body=extra)


SEEDED: dict[str, Any] = dict(max_tokens=24, temperature=0.8, seed=7)


@pytest.mark.parametrize(
    "fields", [{}, {"draft": False}, {"n": 3}, {"stream": True}, {"stream": True, "n": 3}], ids=str
)
def test_acceptance_in_an_answer_is_that_of_the_engines_completions(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    """Each token is the first, the target's own of a round, which a last round may lack, or an accepted draft token."""
    assert "metrics" not in (ask(client, **SEEDED).model_extra or {})
    answer = ask(client, **SEEDED, **fields, jspec={"metrics": True})
    last = [chunk for chunk in answer if chunk.choices][-1] if "stream" in fields else answer
    got = last.model_extra["metrics"]["speculative_decoding"]
    dones = own(**SEEDED, **{name: of for name, of in fields.items() if name != "stream"}).samples
    rounds, accepted = got["num_spec_steps"], got["num_accepted_draft_tokens"]
    histogram = got["acceptance_histogram"]
    assert 0 <= len(dones) + rounds + accepted - sum(len(done.token_ids) for done in dones) <= len(dones)
    assert (rounds, accepted) == tuple(
        sum(getattr(done.metrics, name) for done in dones) for name in ("num_drafts", "num_accepted_tokens")
    )
    assert sum(histogram) == rounds and min(histogram) >= 0
    assert sum(count * share for count, share in enumerate(histogram)) >= accepted
    assert got["num_draft_tokens"] == 0 if "draft" in fields else accepted > 0
    assert got["mean_acceptance_length"] == pytest.approx(1 + accepted / rounds)


@pytest.mark.parametrize(
    "fields",
    [
        SEEDED,
        {**SEEDED, "draft": False},
        {**SEEDED, "draft": 1},
        {**SEEDED, "temperature": 0},
        {**SEEDED, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
        {**SEEDED, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"300": 5.0}},
        {**SEEDED, "bad_words": ["the"], "min_tokens": 10, "stop_token_ids": [300]},
        {**SEEDED, "ignore_eos": True, "allowed_token_ids": [300, 301, 302, 303]},
    ],
)
def test_text_of_any_fields_equals_the_engines_own(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    done = own(**fields)
    answer = ask(client, **fields)
    (choice,) = answer.choices
    assert choice.text == done.text
    assert answer.usage.completion_tokens == len(done.token_ids)
    assert answer.usage.prompt_tokens == len(done.prompt_token_ids)
    chunks = list(ask(client, **fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == done.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == choice.finish_reason
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1


def test_text_of_another_seed_differs(client: openai.OpenAI) -> None:
    """A negative control: the comparison above tells texts apart."""
    assert ask(client, **{**SEEDED, "seed": 8}).choices[0].text != own(**SEEDED).text


def test_completions_of_several_prompts_are_in_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "The little girl"]
    answer = ask(client, prompt=prompts, n=2, max_tokens=8, temperature=1.0, seed=5)
    texts = [one.text for prompt in prompts for one in own(prompt, n=2, max_tokens=8, seed=5).samples]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == texts
    sizes = [len(own(prompt, max_tokens=1).prompt_token_ids) for prompt in prompts]
    assert answer.usage.prompt_tokens == sum(sizes)  # each prompt once, whatever n is
    streamed = [""] * 4
    for chunk in ask(client, prompt=prompts, n=2, max_tokens=8, temperature=1.0, seed=5, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
    assert streamed == texts


def test_prompt_as_token_ids_is_served_like_its_text(client: openai.OpenAI) -> None:
    ids = serving.engine().tokenizer.encode(PROMPT)  # type: ignore[union-attr]
    text = own(**SEEDED).text
    assert [choice.text for choice in ask(client, prompt=[ids, ids], **SEEDED).choices] == [text, text]
    assert ask(client, prompt=ids, **SEEDED).choices[0].text == text


def test_stop_string_ends_the_text_and_is_named(client: openai.OpenAI) -> None:
    text = own(**SEEDED).text
    stop = text[5:8]
    (choice,) = ask(client, **SEEDED, stop=[stop, "never there"]).choices
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    chunks = list(ask(client, **SEEDED, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].stop_reason == stop


def test_stop_token_ends_the_text_and_is_named(client: openai.OpenAI) -> None:
    token = own(**SEEDED).token_ids[3]
    (choice,) = ask(client, **SEEDED, stop_token_ids=[token]).choices
    assert choice.text == own(**SEEDED, stop_token_ids=[token]).text
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token)


def test_default_of_max_tokens_is_16(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0, ignore_eos=True)
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    chunks = list(ask(client, **SEEDED, stream=True, stream_options={"include_usage": True}))
    assert [chunk.choices for chunk in chunks].index([]) == len(chunks) - 1
    done = own(**SEEDED)
    assert chunks[-1].usage.completion_tokens == len(done.token_ids)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == done.metrics.num_cached_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    each = list(ask(client, **SEEDED, stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [chunk.usage.completion_tokens for chunk in each]
    assert counts == sorted(counts)
    assert counts[-1] == len(done.token_ids)


def test_logprobs_equal_the_engines_and_hold_the_sampled_token(client: openai.OpenAI) -> None:
    fields = dict(max_tokens=12, temperature=1.0, seed=3, logprobs=2)
    done = own(**fields)
    answer = ask(client, **fields)
    scores = answer.choices[0].logprobs
    assert scores.token_logprobs == pytest.approx([one.logprob for one in done.logprobs])
    for token, own_logprob, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert top[token] >= own_logprob
        assert 2 <= len(top) <= 3
    assert answer.choices[0].text.startswith(scores.tokens[0])
    assert scores.text_offset[0] == 0
    assert scores.text_offset == sorted(scores.text_offset)
    streamed = [chunk.choices[0].logprobs for chunk in ask(client, **fields, stream=True)]
    assert [x for one in streamed for x in one.token_logprobs] == scores.token_logprobs
    assert [x for one in streamed for x in one.text_offset] == scores.text_offset


def test_echo_scores_a_prompt_as_lm_eval_reads_it(client: openai.OpenAI) -> None:
    """lm-eval's local-completions sends prompts as ids, asks for one token, and reads the slice [context:-1]."""
    tokenizer = serving.engine().tokenizer
    assert tokenizer is not None
    contexts, rests = ["Once upon", "The little"], [" a time, there", " girl was"]
    ids = [tokenizer.encode(c) + tokenizer.encode(r) for c, r in zip(contexts, rests, strict=True)]
    lengths = [len(tokenizer.encode(c)) for c in contexts]
    answer = ask(client, prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    assert len(answer.choices) == 2
    for choice, prompt, start in zip(answer.choices, ids, lengths, strict=True):
        records = own(prompt, max_tokens=1, prompt_logprobs=1).prompt_logprobs
        scores = choice.logprobs
        assert len(scores.token_logprobs) == len(prompt) + 1
        assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
        assert scores.token_logprobs[start:-1] == pytest.approx([one.logprob for one in records[start:]])
        scored = zip(scores.token_logprobs[1:], scores.top_logprobs[1:], strict=True)
        is_greedy = [logprob == max(top.values()) for logprob, top in scored]
        assert is_greedy[:-1] == [one.rank == 1 for one in records[1:]]
        assert is_greedy[-1]
        assert choice.text.startswith(tokenizer.decode(prompt))
        starts = zip(scores.text_offset[:-1], scores.tokens[:-1], strict=True)
        assert all(choice.text[offset:].startswith(token) for offset, token in starts)


def test_echo_scores_the_prompt_of_each_of_several_completions(client: openai.OpenAI) -> None:
    answer = ask(client, prompt=["Once upon", "The little"], n=2, echo=True, logprobs=0, max_tokens=2, seed=1)
    scores = [choice.logprobs.token_logprobs for choice in answer.choices]
    sizes = [len(own(prompt, max_tokens=1).prompt_token_ids) for prompt in ("Once upon", "The little")]
    assert scores[0][: sizes[0]] == scores[1][: sizes[0]]
    assert scores[2][: sizes[1]] == scores[3][: sizes[1]] != scores[0][: sizes[1]]


def test_echo_puts_the_prompt_before_each_text(client: openai.OpenAI) -> None:
    text = PROMPT + own(**SEEDED).text
    assert ask(client, **SEEDED, echo=True).choices[0].text == text
    assert "".join(c.choices[0].text for c in ask(client, **SEEDED, echo=True, stream=True)) == text


def test_prompt_logprobs_have_vllms_form(client: openai.OpenAI) -> None:
    records = own(max_tokens=1, prompt_logprobs=1).prompt_logprobs
    scores = ask(client, max_tokens=1, prompt_logprobs=1).choices[0].prompt_logprobs
    assert scores[0] is None
    for record, entry in zip(records[1:], scores[1:], strict=True):
        assert entry[str(record.token_id)]["rank"] == record.rank
        assert math.isclose(entry[str(record.token_id)]["logprob"], record.logprob, rel_tol=1e-6)


def test_token_ids_are_returned_if_asked_for(client: openai.OpenAI) -> None:
    done = own(**SEEDED)
    (choice,) = ask(client, **SEEDED, return_token_ids=True).choices
    assert (choice.prompt_token_ids, choice.token_ids) == (done.prompt_token_ids, done.token_ids)
    chunks = [chunk.choices[0] for chunk in ask(client, **SEEDED, return_token_ids=True, stream=True)]
    assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids
    assert [hasattr(chunk, "prompt_token_ids") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        ({"structured_outputs": {"choice": ["red. (a)", "green"]}}, {"red. (a)", "green"}),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, {a + b + c for a in "ab" for b in "ab" for c in "ab"}),
        ({"structured_outputs": {"json": {"const": "x"}}}, {'"x"'}),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, {"yes", "no"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}}}, {"1", "2"}),
    ],
)
def test_constraint_holds_for_the_text(client: openai.OpenAI, constraint: dict[str, Any], text: set[str]) -> None:
    for seed in range(2):
        (choice,) = ask(client, **{**SEEDED, "seed": seed}, **constraint).choices
        assert choice.text in text
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"stop": ["a"] * 17}, openai.BadRequestError, "stop"),
        ({"stop": "a" * 257}, openai.BadRequestError, "stop"),
        ({"n": 17}, openai.BadRequestError, "n"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, openai.BadRequestError, "logit_bias"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": ["a", 5]}, openai.BadRequestError, "prompt[1]"),
        ({"prompt": [5, 10**6]}, openai.BadRequestError, "prompt"),
        ({"prompt": ["a", "b" * 10**5]}, openai.BadRequestError, "prompt[1]"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"best_of": 3}, openai.BadRequestError, "best_of"),
        ({"use_beam_search": True}, openai.BadRequestError, "use_beam_search"),
        ({"jspec": {"rounds": True}}, openai.BadRequestError, "jspec.rounds"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
        ({"structured_outputs": {"regex": "("}}, openai.BadRequestError, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, openai.BadRequestError, "structured_outputs"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format.type"),
        ({"max_token": 3}, openai.BadRequestError, "max_token"),
        ({"model": "another"}, openai.NotFoundError, "model"),
    ],
)
def test_wrong_field_raises_the_clients_error_that_names_it(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        ask(client, **fields)
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(param)  # type: ignore[index]


def test_neutral_values_of_fields_that_are_not_offered_are_accepted(client: openai.OpenAI) -> None:
    neutral = dict(best_of=1, use_beam_search=False, length_penalty=1.0, suffix=None, logprobs=None, user="me")
    assert ask(client, **SEEDED, **neutral).choices[0].text == own(**SEEDED).text


@pytest.mark.parametrize("is_chat", [False, True])
def test_requests_of_vllms_benchmark_are_served(server: serving.Running, is_chat: bool) -> None:
    """The bodies that `vllm bench serve` sends; it reads the chunks with choices, their text, and the usage."""
    body: dict[str, Any] = {"model": serving.NAME, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"repetition_penalty": 1.0, "temperature": 0.0, "ignore_eos": True, "top_p": 1.0, "min_p": 0.0}
    if is_chat:
        content = [{"type": "text", "text": PROMPT}]
        body |= {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 8}
    else:
        body |= {"prompt": PROMPT, "max_tokens": 8, "logprobs": None}
    with server.http() as http:
        answer = http.post("/v1/chat/completions" if is_chat else "/v1/completions", json=body)
    *chunks, usage, done = serving.events(answer.content)
    assert done == "[DONE]" and usage["usage"]["completion_tokens"] == 8
    texts = [c["delta"].get("content", "") if is_chat else c["text"] for one in chunks for c in one["choices"]]
    assert "".join(texts)


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == (serving.NAME, "jspec", serving.MAX_LEN)  # type: ignore[attr-defined]
    assert client.models.retrieve(serving.NAME) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_engine_without_tokenizer_takes_and_gives_token_ids() -> None:
    engine = paper.make(engines.target(), **engines.PLAIN_OPTIONS)
    (done,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=6, temperature=0, logprobs=0))
    with serving.running(engine) as server, server.http() as http:
        fields = dict(max_tokens=6, temperature=0, return_token_ids=True, logprobs=0)
        (choice,) = http.post("/v1/completions", json={"prompt": [1, 2, 3], **fields}).json()["choices"]
        assert (choice["token_ids"], choice["text"]) == (done.token_ids, "")
        assert choice["logprobs"]["tokens"] == [f"<{token}>" for token in done.token_ids]
        for path, body, param in (
            ("/v1/completions", {"prompt": "a"}, "prompt"),
            ("/v1/completions", {"prompt": [1], "stop": "a"}, "stop"),
            ("/v1/chat/completions", {"messages": MESSAGES}, "messages"),
            ("/tokenize", {"prompt": "a"}, None),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
