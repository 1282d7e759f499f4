"""Servers in a thread of this process, and a small engine with a chat template for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import openai

from jspec import Engine, NGram, Tree
from jspec.server.app import make_app
from jspec.server.run import Server, bind
from jspec.server.service import Service
from jspec.server.settings import Settings
from tests.support import tiny, tokenizer_folders

NAME = "tiny"
SLOTS, MAX_LEN = 4, 192


@cache
def engine() -> Engine:
    """Return an engine of a random model with a byte-level tokenizer, a chat template, and drafts from the text."""
    folder = tokenizer_folders.write(Path(mkdtemp()) / "chat", "chat")
    vocab = 1200
    return Engine(
        tiny.model(vocab, layers=1, sharpness=3.0),
        drafter=NGram(Tree.chain(2)),
        tokenizer=str(folder),
        eos_ids=(2,),
        slots=SLOTS,
        max_len=MAX_LEN,
        buckets=(SLOTS,),
        prefill_buckets=(MAX_LEN,),
        grammar_cells=2**16,
    )


@dataclass(frozen=True)
class Running:
    """A server that listens.

    Attributes:
        url: its address, without a path.
        service: what its routes share.
        server: the server.
    """

    url: str
    service: Service
    server: Server

    def client(self, **options: Any) -> openai.OpenAI:
        """Return OpenAI's client, which tries each request once."""
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextlib.contextmanager
def running(served: Engine | None = None, **settings: Any) -> Iterator[Running]:
    """Serve an engine, by default the small one, at a free port while the context is open.

    Args:
        settings: fields of `Settings`.
    """
    listener = bind("127.0.0.1", 0)
    app = make_app(served or engine(), Settings(**{"names": (NAME,), **settings}))
    ready = threading.Event()
    server = Server(app, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],), name="server")
    thread.start()
    try:
        assert ready.wait(30)
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service, server)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


def wait_until(holds: Any, seconds: float = 10.0) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.005)
