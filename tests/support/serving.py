"""Servers in a thread of this process, and a small engine with a chat template for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import openai

from jspec import Engine, NGram, Replicas, Tree
from jspec.server.app import make_app
from jspec.server.http.settings import Settings
from jspec.server.routes.service import Service
from jspec.server.run import Server, bind
from tests.support import costs, paper, tiny, tokenizer_folders

NAME = "tiny"
SLOTS, MAX_LEN, VOCAB = 4, 512, 1200
PREFILL = 192  # tokens of a prefill
PREDICTED = 64  # largest number of predicted tokens


@cache
@costs.shared()
def engine() -> Engine:
    """Return an engine with a chat template without tools."""
    return small_engine(SLOTS, MAX_LEN)


def small_engine(
    slots: int, max_len: int, template: str | None = None, specials: Sequence[str] = (), **options: Any
) -> Engine:
    """Make an engine on a device of paper with a byte-level tokenizer and a chat template.

    Args:
        template: the chat template; None: that of the tokenizer.
        specials: further special tokens.
        options: further options of the engine.
    """
    folder = tokenizer_folders.write(Path(mkdtemp()) / "chat", "chat")
    if template is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {"id": VOCAB + i, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, text in enumerate(specials)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return paper.make(
        tiny.model(VOCAB + len(specials), layers=1),
        drafter=NGram(Tree.chain(2)),
        tokenizer=str(folder),
        eos_ids=(2,),
        slots=slots,
        max_len=max_len,
        buckets=(slots,),
        prefill_buckets=(min(max_len, PREFILL),),
        grammar_cells=2**16,
        predicted_tokens=PREDICTED,
        **options,
    )


@dataclass(frozen=True)
class Running:
    """A server that listens.

    Attributes:
        url: its address, without a path.
        service: what its routes share.
        server: the server.
        thread: the thread in which it runs.
    """

    url: str
    service: Service
    server: Server
    thread: threading.Thread

    def ended(self) -> bool:
        """Return whether the server has ended."""
        return not self.thread.is_alive()

    def client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's client, which tries each request once."""
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextlib.contextmanager
def running(
    served: Engine | Replicas | None = None, *, send_buffer: int | None = None, **settings: Any
) -> Iterator[Running]:
    """Serve an engine or replicas, by default the small engine, at a free port while the context is open.

    Args:
        send_buffer: bytes that the system buffers for a client that does not read; None: the system's choice.
        settings: fields of `Settings`.
    """
    listener = bind("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    app = make_app(served or engine(), Settings(**{"names": (NAME,), **settings}))
    ready = threading.Event()
    server = Server(app, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],), name="server")
    thread.start()
    try:
        assert ready.wait(30)
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service, server, thread)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def held(served: Engine) -> Iterator[threading.Event]:
    """Let the engine make no step until the yielded event is set, or the context ends."""
    gate = threading.Event()
    served.threads.start()
    served.threads.call(lambda: gate.wait(30))
    try:
        yield gate
    finally:
        gate.set()


def request(url: str, path: str, body: Any, **headers: str) -> bytes:
    """Return the bytes of a POST request; headers are named with underscores."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    own = {"Host": url.removeprefix("http://"), "Content-Type": "application/json", "Content-Length": str(len(raw))}
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in own.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + raw


async def post(url: str, path: str, body: Any, **headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a connection of its own; return the connection, to read, to wait or to leave."""
    reader, writer = await asyncio.open_connection(*address(url))
    writer.write(request(url, path, body, **headers))
    await writer.drain()
    return reader, writer


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read a whole response; return its status, headers and body; fail if it does not come in time."""
    async with asyncio.timeout(60):
        return await _answer(reader)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:] if line)}
    if headers.get("transfer-encoding") != "chunked":
        return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return int(lines[0].split()[1]), headers, body


def events(body: bytes) -> list[Any]:
    """Return the data of a stream's events; the last is "[DONE]", and comments are left out."""
    assert body.endswith(b"\n\n")
    blocks = [block for block in body.decode()[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def wait_until(holds: Any, seconds: float = 10.0) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.005)
