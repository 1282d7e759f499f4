"""Reads the JSON body of a request, with limits of its size and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from jspec.server.http.errors import ApiError, invalid

CLOSE = {"Connection": "close"}  # the rest of the body is not read
MAX_DIGITS = 40  # of an integer; no field takes more


class ClientGone(Exception):
    """The client has closed the connection, so nobody reads the answer."""


async def read_json(scope: Scope, receive: Receive, *, most: int, seconds: float) -> dict[str, Any]:
    """Read a request's body, a JSON object.

    Args:
        most: largest number of bytes; they are counted while the body arrives.
        seconds: time for the whole body.

    Raises:
        ApiError: the body is too large, too late, or no JSON object.
        ClientGone: the client left before the end of the body.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"Content-Type: expected application/json, got {kind[:80]!r}", code="unsupported_media_type"
        )
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length[:20]) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(seconds):
            raw = await _read(receive, most)
    except TimeoutError:
        raise ApiError(
            408, f"body: expected all of it within {seconds:g} s; send it faster", code="body_timeout", headers=CLOSE
        ) from None
    return parse(raw)


async def _read(receive: Receive, most: int) -> bytes:
    raw = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        raw += message.get("body", b"")
        if len(raw) > most:
            raise _too_large(most)
        if not message.get("more_body", False):
            return bytes(raw)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"body: expected at most {most} bytes; send less at once",
        code="body_too_large",
        headers=CLOSE,
    )


def parse(raw: bytes) -> dict[str, Any]:
    """Parse a body.

    Raises:
        ApiError: it is no JSON object in UTF-8, or has numbers or texts that nothing can represent.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise _wrong(f"UTF-8, got an error: {error}") from None
    except RecursionError:
        raise _wrong("values that are not nested so deep") from None
    except ValueError as error:
        raise _wrong(f"JSON, got an error: {error!s:.200}") from None
    if not isinstance(body, dict):
        raise _wrong(f"a JSON object, got {type(body).__name__}")
    if b"\\u" in raw:
        for name, value in body.items():
            _check_characters(name, value)
    return body


def _wrong(expected: str) -> ApiError:
    return ApiError(400, f"body: expected {expected}", code="invalid_json")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits")
    return int(digits)


def _check_characters(name: str, value: Any) -> None:
    """Refuse a field that contains half of a surrogate pair, which no tokenizer and no answer can represent."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        field = name.encode("ascii", "replace").decode()[:60]
        raise invalid(field, "expected whole characters, got half of a surrogate pair; leave it out") from None
