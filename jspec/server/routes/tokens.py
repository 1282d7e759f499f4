"""The routes /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from jspec.core.shorten import short
from jspec.engine.request.sampling_params import is_int
from jspec.engine.text.tokenizer import Tokenizer
from jspec.server.ask.fields import DETOKENIZE, TOKENIZE
from jspec.server.http.errors import ApiError, invalid, refused
from jspec.server.http.events import send_json
from jspec.server.routes.chat import check_conversation, check_length, render, template_names
from jspec.server.routes.service import Service


class Tokenize:
    """The ASGI application of /tokenize: the token ids of a text or a conversation."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ask = await self._service.read(scope, receive, TOKENIZE)
        if ("prompt" in ask.own) == ("messages" in ask.own):
            raise invalid("prompt", "expected a text, or messages instead; give one of the two")
        tokens = await self._service.in_thread(self._work(ask.own))
        body = {"count": len(tokens), "max_model_len": self._service.engine.config.max_len, "tokens": tokens}
        if ask.own.get("return_token_strs", False):
            await self._service.in_thread(self._service.texts.prepare)
            body["token_strs"] = [self._service.texts.text_of(token) for token in tokens]
        await send_json(send, body)

    def _work(self, fields: dict[str, Any]) -> Callable[[], list[int]]:
        """Return the function that tokenises, for a worker thread."""
        tokenizer = _tokenizer(self._service)
        if "prompt" in fields:
            check_length(self._service.engine, "prompt", len(fields["prompt"]))
            options = {} if fields.get("add_special_tokens", True) else {"add_special_tokens": False}
            return lambda: tokenizer.encode(fields["prompt"], **options)
        check_conversation(self._service.engine, fields)

        def work() -> list[int]:
            try:
                return render(tokenizer, fields)
            except (TypeError, ValueError) as error:
                raise refused(error, template_names(fields), TOKENIZE, "messages") from error

        return work


class Detokenize:
    """The ASGI application of /detokenize: the text of token ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ask = await self._service.read(scope, receive, DETOKENIZE)
        tokens, size = ask.own.get("tokens"), self._service.engine.input_processor.vocab_size
        if tokens is None:
            raise invalid("tokens", "expected a list of token ids, got nothing")
        if wrong := [token for token in tokens if not is_int(token) or not 0 <= token < size]:
            raise invalid("tokens", f"expected ids in [0, {size}), got {short(wrong[0])}")
        tokenizer = _tokenizer(self._service)
        await send_json(send, {"prompt": await self._service.in_thread(lambda: tokenizer.decode(tokens))})


def _tokenizer(service: Service) -> Tokenizer:
    if service.engine.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer: its prompts and answers are token ids", code="no_tokenizer")
    return service.engine.tokenizer
