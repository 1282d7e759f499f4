"""The route /v1/completions."""

from __future__ import annotations

from typing import Any

from jspec.core.shorten import short
from jspec.engine.request.request import Chunk, Request
from jspec.engine.request.sampling_params import is_int
from jspec.engine.request.token_logprobs import TokenLogprob
from jspec.engine.text.detokenizer import IncrementalDetokenizer
from jspec.server.ask.fields import COMPLETIONS, Ask
from jspec.server.http.errors import invalid
from jspec.server.reading.logprobs import completion_logprobs, prompt_entries
from jspec.server.routes.answers import Answer, finish_reason, stop_reason
from jspec.server.routes.chat import check_length
from jspec.server.routes.service import Service

Prompt = str | list[int]


def read_prompts(value: Any) -> list[Prompt]:
    """Return the prompts of a request: a text, texts, token ids, or lists of token ids.

    Raises:
        ApiError: it is something else, or there is none.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid("prompt", f"expected a text, texts, token ids or lists of token ids, got {short(value)}")
    if all(map(is_int, value)):
        return [value]
    for index, prompt in enumerate(value):
        if not isinstance(prompt, type(value[0])) or not (isinstance(prompt, str) or _are_ids(prompt)):
            raise invalid(f"prompt[{index}]", f"expected a text or token ids like the first, got {short(prompt)}")
    return value


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(is_int, value))


class CompletionAnswer(Answer):
    """A request to /v1/completions, and its answer."""

    table = COMPLETIONS
    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    prompt_field = "prompt"

    def __init__(self, service: Service, ask: Ask) -> None:
        if "prompt" not in ask.own:
            raise invalid("prompt", "expected a text, texts, token ids or lists of token ids, got nothing")
        self.prompts = read_prompts(ask.own["prompt"])
        self.num_prompts = len(self.prompts)
        self.echoes: bool = ask.own.get("echo", False)
        if self.echoes and ask.params.get("logprobs") is not None:
            self._ask_for_prompt_scores(ask)
        super().__init__(service, ask)
        self._offsets: dict[int, int] = {}  # length of the text of each choice so far

    def _ask_for_prompt_scores(self, ask: Ask) -> None:
        if ask.own.get("stream", False):
            raise invalid("echo", "expected false with logprobs and stream; leave one of the three out")
        ask.params.setdefault("prompt_logprobs", ask.params["logprobs"])

    def make_requests(self) -> list[Request]:
        engine, requests = self.service.engine, []
        for index, prompt in enumerate(self.prompts):
            if len(self.prompts) > 1:
                self.names["prompt"] = f"prompt[{index}]"
            requests.append(engine.prepare(self._ids(prompt), self.params, trace=self.is_traced))
        return requests

    def _ids(self, prompt: Prompt) -> Prompt:
        tokenizer = self.service.engine.tokenizer
        if self.own.get("add_special_tokens", True) or tokenizer is None or isinstance(prompt, list):
            return prompt
        check_length(self.service.engine, self.names.get("prompt", "prompt"), len(prompt))
        return tokenizer.encode(prompt, add_special_tokens=False)

    def choice(self, index: int, chunk: Chunk) -> dict[str, Any]:
        (choice,) = self.deltas(index, chunk)
        records = self._prompt_scores(index) if "prompt_logprobs" in self.names else None
        if records is not None:
            choice["prompt_logprobs"] = prompt_entries(records, self.service.texts)
        return choice

    def deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        is_first = index not in self._offsets
        echo = self._prompt_text(index) if self.echoes and is_first else ""
        text = echo + (chunk.text or "")
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, chunk, len(echo)),
            "finish_reason": finish_reason(chunk),
            "stop_reason": stop_reason(chunk),
        }
        self._offsets[index] = self._offsets.get(index, 0) + len(text)
        if self.wants_ids:
            choice["token_ids"] = chunk.token_ids
            if is_first:
                choice["prompt_token_ids"] = list(self._request(index).prompt_token_ids)
        return [choice]

    def body(self, outputs: Any) -> dict[str, Any]:
        self._scores = {i // self.n: chunk.prompt_logprobs for i, chunk in outputs if i % self.n == 0}
        return super().body(outputs)

    def _request(self, index: int) -> Request:
        return self.requests[index // self.n]

    def _prompt_scores(self, index: int) -> list[TokenLogprob | None]:
        scores = self._scores[index // self.n]
        assert scores is not None
        return scores

    def _prompt_text(self, index: int) -> str:
        prompt, tokenizer = self.prompts[index // self.n], self.service.engine.tokenizer
        if isinstance(prompt, str):
            return prompt
        return "" if tokenizer is None else tokenizer.decode(prompt)

    def _logprobs(self, index: int, chunk: Chunk, echoed: int) -> dict[str, Any] | None:
        """Return the log-probabilities of new tokens, and before them those of the prompt if it is echoed.

        Args:
            echoed: length of the prompt's text in the same output.
        """
        if chunk.logprobs is None:
            return None
        records: list[TokenLogprob | None] = [*chunk.logprobs]
        tokens, pieces = chunk.token_ids, chunk.pieces or [""] * len(chunk.token_ids)
        offsets = _starts(self._offsets.get(index, 0) + echoed, pieces)
        if self.echoes:
            prompt = list(self._request(index).prompt_token_ids)
            records = [*self._prompt_scores(index), *records]
            offsets = _starts(0, self._pieces(prompt)) + offsets
            tokens = prompt + tokens
        return completion_logprobs(records, tokens, offsets, self.service.texts)

    def _pieces(self, tokens: list[int]) -> list[str]:
        """Return the text of each token of a prompt; all of them together are the prompt's text."""
        tokenizer = self.service.engine.tokenizer
        if tokenizer is None:
            return [""] * len(tokens)
        decoder = IncrementalDetokenizer(tokenizer)
        return [decoder.push([token]) for token in tokens]


def _starts(start: int, pieces: list[str]) -> list[int]:
    """Return where each piece begins in a text, if the first begins at ``start``."""
    starts = []
    for piece in pieces:
        starts.append(start)
        start += len(piece)
    return starts
