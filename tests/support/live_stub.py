"""A server with answers made up beforehand, and random rounds, for tests of the live page."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from jspec.server.http.page import page

Round = dict[str, Any]
FIRST = "Once"  # text of an answer's first token, which belongs to no round
TEXTS = (
    " a",
    "def",
    "\n",
    "    ",
    "漢字かな",
    "<b>bold</b>",
    "&amp;",
    "👩‍🚀",
    "",
    "a_very_long_identifier",
    "W" * 9,
    "é",
)


@dataclass
class Stub:
    """What the server answers, and what it was asked.

    Attributes:
        rounds: rounds of an answer with drafting.
        refusals: (status, error, headers) of the next answers, which are taken first.
        key: the API key that the server asks for; None: none.
        delay: seconds before each round.
        undrafted: text of an answer without drafting; None: that of the answer with drafting.
        asked: bodies of the requests, in order.
        keys: values of their Authorization headers.
    """

    rounds: list[Round] = field(default_factory=list)
    refusals: list[tuple[int, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    key: str | None = None
    delay: float = 0.0
    undrafted: str | None = None
    first_delay: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    @property
    def text(self) -> str:
        return FIRST + "".join(piece for one in self.rounds for piece in one["e"])

    def app(self) -> Starlette:
        routes = [
            Route("/", self._page),
            Route("/v1/models", self._models),
            Route("/stats", self._stats),
            Route("/v1/completions", self._answer, methods=["POST"]),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def _page(self, _: Request) -> Response:
        raw, headers = page()
        return Response(raw, headers=headers)

    async def _stats(self, _: Request) -> Response:
        return JSONResponse(STATS)

    async def _models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "Authorization: wrong key"}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("authorization"))
        if self.refusals:
            status, error, headers = self.refusals.pop(0)
            return JSONResponse({"error": error}, status, headers)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """The events of an answer: the first token, then one chunk a round; without drafting one token a round."""
        rounds = self.rounds
        if body.get("draft") is False:
            text = self.text if self.undrafted is None else self.undrafted
            rounds = [dict(t=["?"], p=[-1], s=[0.0], a=[0], e=[c], d=[False]) for c in text.removeprefix(FIRST)]
        yield ": ping\n\n"
        await asyncio.sleep(self.first_delay)
        yield _event(body, FIRST, [])
        for one in rounds:
            await asyncio.sleep(self.delay)
            yield _event(body, "".join(one["e"]), [one])
        yield _event(body, "", [], "length")
        usage = {"prompt_tokens": 3, "completion_tokens": 1 + sum(len(one["e"]) for one in rounds)}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


STATS = {"pages_used": 3, "pages_total": 64, "running": 1, "waiting": 2, "acceptance_by_position": [0.5], "live": True}


def _event(body: dict[str, Any], text: str, rounds: list[Round], finish: str | None = None) -> str:
    pieces = [piece for one in rounds for piece in one["e"]] if rounds else [text] * bool(text)
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if "messages" in body:
        top = [{"token": piece, "logprob": -0.5} for piece in pieces]
        scores = [
            {"token": piece, "logprob": -0.5, "top_logprobs": [one]} for piece, one in zip(pieces, top, strict=True)
        ]
        choice |= {"delta": {"content": text}, "logprobs": {"content": scores}}
    else:
        tops = [{piece: -0.5} for piece in pieces]
        choice |= {
            "text": text,
            "logprobs": dict(tokens=pieces, token_logprobs=[-0.5] * len(pieces), top_logprobs=tops),
        }
    data = {"choices": [choice]} | ({"jspec": {"rounds": rounds}} if "jspec" in body else {})
    return f"data: {json.dumps(data)}\n\n"


def random_round(rng: random.Random, nodes: int) -> Round:
    """Make a round whose tree has ``nodes`` nodes, at most 10 deep, and a random accepted path."""
    parents, depths, scores = [-1], [0], [0.0]
    for node in range(1, nodes):
        parent = rng.choice([i for i in range(node) if depths[i] < 10])
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(round(scores[parent] - rng.expovariate(1), 4))
    path = [0]
    while kids := [i for i, parent in enumerate(parents) if parent == path[-1]]:
        if rng.random() < 0.3:
            break
        path.append(rng.choice(kids))
    texts = [rng.choice(TEXTS) for _ in range(nodes)]
    emitted = [*(texts[node] for node in path[1:]), rng.choice(TEXTS)]
    return dict(t=texts, p=parents, s=scores, a=path, e=emitted, d=[True] * (len(path) - 1) + [False])


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """Serve an app from a thread of its own; yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
