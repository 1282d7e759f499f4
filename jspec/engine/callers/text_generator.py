"""The calls with which callers complete prompts, for one engine and for several.

They read prompts and parameters and make requests; a subclass says how requests are run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, Unpack

import numpy as np
from tqdm import tqdm

from jspec.core.config import EngineConfig
from jspec.core.foreign_names import check_names
from jspec.core.shorten import short
from jspec.engine.callers.clients import Clients, raise_error
from jspec.engine.input.caller_input import PARAMETERS, Params, Prompt, Prompts, read_params
from jspec.engine.input.chat_input import (
    TEMPLATE_FIELDS,
    ChatFields,
    Conversation,
    format_conversations,
    read_conversations,
)
from jspec.engine.reading.answers import ChatSplitter
from jspec.engine.request.request import Chunk, Completion, Request
from jspec.engine.request.sampling_fields import SamplingFields
from jspec.engine.run.output_processor import make_completion

BAR_SECONDS = 0.1  # time between two updates of a progress bar, each of which looks at all requests
OPTIONS = tuple(field.name for field in fields(EngineConfig))


class TextGenerator(Clients):
    """Completes prompts and conversations, for any number of threads and asyncio tasks."""

    def generate(
        self,
        prompts: Prompts,
        params: Params | Iterable[Params] | None = None,
        *,
        sampling_params: Params | Iterable[Params] | None = None,
        trace: bool = False,
        progress: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Complete prompts; return the completions in the order of the prompts.

        A request that fails while it runs ends with ``finish_reason="error"`` and its ``error``; other requests go on.

        Args:
            prompts: one prompt or several, in any form that `jspec.engine.input.caller_input.read_prompts` reads:
                texts, lists or arrays of token ids, dicts with "prompt" or "prompt_token_ids".
            params: a `SamplingParams` or a dict of its fields for all prompts, or one of these per prompt.
            sampling_params: another name of ``params``.
            trace: whether to record every round's draft tree in ``Completion.rounds``.
            progress: whether to show a progress bar with tokens per second and mean acceptance length.
            fields: fields of `SamplingParams` for all prompts, instead of ``params``.

        Raises:
            TypeError, ValueError: a prompt or a parameter cannot be served. No prompt is queued in this case.
        """
        asked = self._make_requests(prompts, params, sampling_params=sampling_params, trace=trace, keywords=fields)
        requests = [sample for request in asked for sample in request.samples]
        with tqdm(total=sum(r.max_new_tokens for r in requests), unit="tok", disable=not progress) as bar:
            for _ in self._complete(asked, BAR_SECONDS if progress else None):
                if progress:
                    self._update_bar(bar, requests)
        return [make_completion(request) for request in asked]

    async def agenerate(
        self,
        prompts: Prompts,
        params: Params | Iterable[Params] | None = None,
        *,
        sampling_params: Params | Iterable[Params] | None = None,
        trace: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Complete prompts as `generate` does, for use in asyncio tasks; cancelling the task aborts the requests."""
        make = partial(self._make_requests, prompts, params, sampling_params=sampling_params, trace=trace)
        asked = await self._acomplete(partial(make, keywords=fields))
        return [make_completion(request) for request in asked]

    def log_probs(self, texts: Sequence[Sequence[int]], *, adapter: str | None = None) -> list[np.ndarray]:
        """Return the log-probability of each token of some texts after the tokens before it.

        With ``deterministic=True`` these are the bits of ``Completion.logprobs`` of the same tokens, however they were
        drafted, and those of `jspec.train.log_probs`.

        Args:
            texts: token ids of each text.
            adapter: name of an adapter of the target (`load_adapter`) that scores them; None: none.

        Returns:
            For each text of n tokens a float32 array [n - 1], of its second token to its last. The values are those of
            the model's raw logits.

        Raises:
            TypeError, ValueError: a text is no list of token ids, or longer than ``max_len`` minus 1; or no adapter has
                this name.
        """
        asked = self._make_requests(
            [{"prompt_token_ids": text} for text in texts],
            {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True, "adapter": adapter},
        )
        for _ in self._complete(asked):
            pass
        for request in asked:
            raise_error(request)
        return [request.output.prompt_logprobs.chosen for request in asked if request.output.prompt_logprobs]

    def prepare(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        trace: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> Request:
        """Make the request of one prompt, which `jspec.engine.callers.engine_thread.EngineThread.submit` takes.

        The prompt is tokenised, the parameters are checked and a grammar is compiled; nothing is queued. This may take
        seconds, and any thread may do it while others run steps.

        Args:
            trace: whether to record every round's draft tree in ``Chunk.rounds``.

        Raises:
            TypeError, ValueError: the prompt or a parameter cannot be served.
        """
        self._check_open()
        _check_fields(fields)
        request = self.input_processor.request(
            prompt, params, sampling_params=sampling_params, trace=trace, keywords=fields
        )
        self._check(request)
        return request

    def submit(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Request:
        """Queue one prompt; return its request, which `result` and `abort` take.

        Raises:
            TypeError, ValueError: the prompt or a parameter cannot be served.
        """
        request = self.prepare(prompt, params, sampling_params=sampling_params, **fields)
        self._submit(request)
        return request

    def result(self, request: Request) -> Completion:
        """Wait until a request from `submit` has ended; return its completion, at every call again.

        Raises:
            TypeError, ValueError: `submit` of this engine has not returned this request.
        """
        self._check_own("result", request)
        self._wait(request)
        return make_completion(request)

    def abort(self, request: Request) -> None:
        """End all unfinished completions of a request, and free their slots and cache pages.

        Raises:
            TypeError, ValueError: `submit` of this engine has not returned this request.
        """
        self._check_own("abort", request)
        self._abort(request)

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        trace: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> Iterator[Chunk]:
        """Complete one prompt; yield a chunk of output after each round.

        The prompt is checked at once, and queued when the caller asks for the first chunk. Closing the iterator aborts
        the request. If the request fails, its error is raised after the last chunk. With ``n`` > 1 the chunks of all
        completions are interleaved; each chunk has the index of its completion.

        Args:
            trace: whether to record every round's draft tree in ``Chunk.rounds``.

        Raises:
            TypeError, ValueError: the prompt or a parameter cannot be served.
        """
        request = self.prepare(prompt, params, sampling_params=sampling_params, trace=trace, **fields)
        return self._stream(request)

    def astream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        trace: bool = False,
        **fields: Unpack[SamplingFields],
    ) -> AsyncIterator[Chunk]:
        """Yield the chunks that `stream` yields, for use in asyncio tasks; cancelling the task aborts the request.

        Errors in the prompt or a parameter are raised with the first chunk.
        """
        make = partial(self.prepare, prompt, params, sampling_params=sampling_params, trace=trace, **fields)
        return self._astream(make)

    # -- conversations

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: Params | Iterable[Params] | None = None,
        *,
        sampling_params: Params | Iterable[Params] | None = None,
        trace: bool = False,
        progress: bool = False,
        **fields: Unpack[ChatFields],
    ) -> list[Completion]:
        """Format conversations with the chat template and complete them.

        Args:
            messages: one conversation, a list of messages ``{"role": ..., "content": ...}`` as
                `jspec.engine.input.chat_input.read_messages` takes them; or a list of conversations.
            params, sampling_params, trace, progress: arguments of `generate`.
            fields: options of the chat template (`jspec.engine.input.chat_input.TemplateFields`): ``tools``,
                ``documents``, ``chat_template``, ``add_generation_prompt``, ``continue_final_message``,
                ``chat_template_kwargs``; and fields of `SamplingParams`, instead of ``params``.

        Returns:
            One completion per conversation, in their order. If the chat template is of a model that reasons, the
            reasoning is in `Completion.reasoning` and no part of `Completion.text`.

        Raises:
            TypeError, ValueError: a message or an option is wrong, the chat template leaves a message out, or there is
                no tokenizer or no chat template.
        """
        prompts, splitters = self._format(messages, params, sampling_params, fields)
        made = self.generate(prompts, [each.params for each in splitters], trace=trace, progress=progress)
        return [each.completed(done) for each, done in zip(splitters, made, strict=True)]

    async def achat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: Params | Iterable[Params] | None = None,
        *,
        sampling_params: Params | Iterable[Params] | None = None,
        trace: bool = False,
        **fields: Unpack[ChatFields],
    ) -> list[Completion]:
        """Complete conversations as `chat` does, for use in asyncio tasks; cancelling the task aborts the requests."""
        prompts, splitters = self._format(messages, params, sampling_params, fields)
        made = await self.agenerate(prompts, [each.params for each in splitters], trace=trace)
        return [each.completed(done) for each, done in zip(splitters, made, strict=True)]

    def chat_stream(
        self,
        messages: Conversation,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        trace: bool = False,
        **fields: Unpack[ChatFields],
    ) -> Iterator[Chunk]:
        """Format one conversation as `chat` does; yield the chunks of its completion, as `stream` does."""
        prompts, splitters = self._format(messages, params, sampling_params, fields)
        if len(prompts) != 1:
            raise ValueError(f"messages: expected one conversation, got {len(prompts)}; call chat_stream for each")
        return splitters[0].streamed(self.stream(prompts[0], splitters[0].params, trace=trace))

    def _format(
        self, messages: Any, params: Any, sampling_params: Any, fields: Mapping[str, Any]
    ) -> tuple[list[list[int]], list[ChatSplitter]]:
        """Return the token ids of each conversation, and what splits its answers and has their parameters."""
        check_names("chat", fields, (*PARAMETERS, *TEMPLATE_FIELDS), {"Engine": OPTIONS})
        rest = {name: value for name, value in fields.items() if name not in TEMPLATE_FIELDS}
        chats = read_conversations(messages)
        prompts = format_conversations(self.tokenizer, chats, fields)
        every = read_params(params, len(prompts), sampling_params=sampling_params, keywords=rest)
        template, key = fields.get("chat_template"), fields.get("continue_final_message")
        begun = [key and chat[-1].get("content" if key is True else key) for chat in chats]
        splitters = []
        for ids, each, text in zip(prompts, every, begun, strict=True):
            waits = self.input_processor.thinking.of(each, ids).grammar_waits
            splitters.append(ChatSplitter(self.tokenizer, ids, each, template, text or "", grammar_waits=waits))
        return prompts, splitters

    # -- requests

    def _make_requests(self, prompts: Any, params: Any, **more: Any) -> list[Request]:
        """Make and check a caller's requests, before any of them is queued; ``more`` goes to the input processor."""
        self._check_open()
        _check_fields(more.get("keywords"))
        requests = self.input_processor.requests(prompts, params, **more)
        for request in requests:
            self._check(request)
        return requests

    def _check_own(self, call: str, request: Any) -> None:
        """Refuse what is no request of this engine."""
        if not isinstance(request, Request):
            raise TypeError(f"{call}: expected a request that submit returned, got {short(request)}")
        if request.owner is not self.input_processor:
            raise ValueError(f"{call}: expected a request of this engine, got request {request.id} of another engine")

    def _update_bar(self, bar: tqdm, requests: Sequence[Request]) -> None:
        bar.update(sum(len(request.token_ids) for request in requests) - bar.n)
        bar.set_postfix_str(f"mean acceptance length {self.metrics.mean_acceptance_length:.2f}", refresh=False)


def _check_fields(keywords: Mapping[str, Any] | None) -> None:
    check_names("generate", keywords or {}, PARAMETERS, {"Engine": OPTIONS, "Engine.chat": TEMPLATE_FIELDS})
