"""The options of the server."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jspec.engine.request.sampling_params import SamplingParams

KEY_VARIABLE = "JSPEC_API_KEY"
MEGABYTE = 2**20
YEAR = 365 * 24 * 3600
LIMITS = (  # name of a number, its least and its largest value
    ("port", 0, 65535),
    ("max_queue", 1, 2**20),
    ("max_body", 1, 2**30),
    ("body_seconds", 0.001, YEAR),
    ("request_timeout", 0.001, YEAR),
    ("drain_seconds", 0, YEAR),
    ("ping_seconds", 0.001, YEAR),
)
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Settings:
    """The options of the server; the command line has the same names.

    Attributes:
        names: names of the model; answers have the first.
        host, port: address to listen at.
        keys: SHA-256 digests of the API keys; empty: no key is asked for.
        allowed_hosts: further values of the header Host that a server at a loopback address accepts.
        allow_origins: origins of web pages that may call the server (CORS).
        max_queue: largest number of completions that run or wait; None: five times the engine's slots.
        max_body: largest size of a request's body in bytes.
        body_seconds: time for a request's body to arrive, in seconds.
        request_timeout: time for a request, in seconds; None: no limit.
        drain_seconds: time that running requests have to end after SIGTERM, in seconds.
        ping_seconds: time without output after which a stream gets a comment, in seconds.
        ignore_unknown: whether unknown fields are logged instead of refused.
        live: whether requests may record their rounds.
        adapter_routes: whether requests may load and unload adapters, from any folder that the server can read.
        log_text: whether requests are logged with their texts.
        tool_parser: name of the format of tool calls; None: the chat template tells.
        reasoning: whether to split the reasoning from the answer.
        reasoning_parser: name of the format of reasoning; None: the chat template tells.
        reasoning_field: name of the field that has the reasoning.
        sampling: fields of `SamplingParams` for requests that leave them out
            (`jspec.engine.request.model_sampling`).
        warm: what to compile before the first request: "logprobs", "grammar", "rounds".

    Raises:
        ValueError: a value is impossible; the message names the option.
    """

    names: tuple[str, ...] = ("jspec",)
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[bytes, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_queue: int | None = None
    max_body: int = 8 * MEGABYTE
    body_seconds: float = 30.0
    request_timeout: float | None = None
    drain_seconds: float = 30.0
    ping_seconds: float = 15.0
    ignore_unknown: bool = False
    live: bool = False
    adapter_routes: bool = False
    log_text: bool = False
    tool_parser: str | None = None
    reasoning: bool = True
    reasoning_parser: str | None = None
    reasoning_field: str = "reasoning_content"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    warm: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in LIMITS:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")
        SamplingParams(**self.sampling)  # raises for a wrong value

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine can reach the address."""
        return is_loopback(self.host)

    def accepts_host(self, host: str) -> bool:
        """Return whether to serve a request with this header Host.

        A web page can have its own name resolved to 127.0.0.1 and then read a local server's answers as its own (DNS
        rebinding). Its name then stands in the header.
        """
        if not self.is_loopback:
            return True
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.strip("[]").lower() in (*LOOPBACK_NAMES, *map(str.lower, (self.host, *self.allowed_hosts)))

    def accepts_key(self, api_key: bytes) -> bool:
        """Return whether a key is one of the keys; the time does not tell which or how far."""
        digest = hashlib.sha256(api_key).digest()
        matches = [hmac.compare_digest(digest, key) for key in self.keys]
        return any(matches)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def digest_of(key: str) -> bytes:
    """Return the digest of a key, which alone is kept."""
    return hashlib.sha256(key.encode()).digest()


def keys_of_environment() -> list[str]:
    """Return the API keys of the environment, which are separated by commas."""
    return [key for part in os.environ.get(KEY_VARIABLE, "").split(",") if (key := part.strip())]
