"""Errors of the HTTP routes, and their form in JSON, which is OpenAI's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from starlette.types import Scope

from jspec.engine.request.too_long import PromptTooLong, RequestTooLong

ANTHROPIC_TYPES = {  # by status
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ANTHROPIC_PATH = "/v1/messages"  # beginning of the routes of Anthropic's API
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}  # by status; see `kind_of`
OTHER = re.compile(r"(?<= beside )\w+")  # in an error, the argument that contradicts the one at its start
INDEX = re.compile(r"\[(\d+)\]")
FIELD = re.compile(
    r"(?:SamplingParams\.)?([A-Za-z_][\w.$-]*)((?:\[\d+\](?:\.[\w.$-]+)?)*)(?:: |(?==))"
)  # at the start of an error


class ApiError(Exception):
    """A request that cannot be served.

    Args:
        status: HTTP status.
        message: what was expected, what was given, and what to do.
        param: field of the request; None: the error concerns no field.
        code: short name of the error for programs.
        headers: further headers of the response.
        anthropic: the message in the words of Anthropic's API; None: the same message.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        anthropic: str | None = None,
    ) -> None:
        super().__init__(message)
        self.anthropic = message if anthropic is None else anthropic
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error as the body of a response, or as the data of an event in a stream."""
        error = {"message": self.message, "type": kind_of(self.status), "param": self.param, "code": self.code}
        return {"error": error}


def path_of(scope: Scope) -> str:
    """Return the path of a request, without that at which another application mounts this one."""
    return scope["path"].removeprefix(scope.get("root_path", "")) or "/"


def body_for(scope: Scope, error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the form of the API that has the route of a request."""
    return anthropic_body(error) if path_of(scope).startswith(ANTHROPIC_PATH) else error.body


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the form of Anthropic's API."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.anthropic}}


def kind_of(status: int) -> str:
    """Return OpenAI's name for the type of an error with this HTTP status."""
    return TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def invalid(field: str, message: str) -> ApiError:
    """Make the error for a field with a wrong value.

    Args:
        field: the field, perhaps with a path inside it, such as ``messages[0].content``.
        message: what was expected and what was given.
    """
    return ApiError(400, f"{field}: {message}", param=field, code="invalid_value")


def refused(
    error: Exception, names: Mapping[str, str], known: Collection[str] = (), default: str | None = None
) -> ApiError:
    """Turn an engine's error about an argument into an error about the field of the request that gave the argument.

    Args:
        error: an error whose message begins with the argument's name and a colon, or with ``name=value``.
        names: the field of the request for each argument, or part of one such as ``messages[0]``, whose name differs;
            ``[]`` stands for any index.
        known: the fields of the route; empty: any.
        default: the field of an error that begins with no field's name; None: it has no field.
    """
    message = OTHER.sub(lambda other: names.get(other[0], other[0]), str(error))
    match = FIELD.match(message)
    field = "" if match is None else _renamed(match[1] + match[2], names)
    if match is not None and (not known or re.split(r"[.\[]", field)[0] in known):
        if isinstance(error, PromptTooLong):
            return _too_long(error, field)
        is_named = message[match.end() - 2 : match.end()] == ": "
        return invalid(field, message[match.end() :] if is_named else message)
    if isinstance(error, RequestTooLong) and default is not None:
        return _too_long(error, default)
    if default is None:
        return ApiError(400, message, code="invalid_value")
    return invalid(default, message)


def _too_long(error: PromptTooLong | RequestTooLong, field: str) -> ApiError:
    """Make the error for a request that does not fit, in the words by which clients of both APIs know it."""
    if isinstance(error, PromptTooLong):
        limit, wrong = error.max_len, f"expected at most {error.most} {error.unit}, got {error.size}; shorten it"
        anthropic = f"prompt is too long: {error.size} {error.unit} > {error.most} maximum"
    else:
        limit, sizes = error.most, f"{error.prompt} + {error.answer} > {error.most}"
        wrong = f"expected a prompt and an answer that fit, got {sizes}; shorten it, or lower the limit of the answer"
        anthropic = (
            f"input length and `max_tokens` exceed context limit: {sizes}, decrease input length or `max_tokens` and "
            "try again"
        )
    words = f"This model's maximum context length is {limit} tokens, of prompt and answer together"
    return ApiError(400, f"{field}: {words}: {wrong}", param=field, code="context_length_exceeded", anthropic=anthropic)


def _renamed(path: str, names: Mapping[str, str]) -> str:
    """Return a path such as ``messages[0].role`` with the longest beginning that has another name under that name."""
    parts = re.split(r"(?=[.\[])", path)
    for size in range(len(parts), 0, -1):
        start = "".join(parts[:size])
        name = names.get(start) or names.get(INDEX.sub("[]", start))
        if name is not None:
            return name.replace("[]", "[{}]").format(*INDEX.findall(start)) + path[len(start) :]
    return path


def failed(error: BaseException) -> ApiError:
    """Make the error for a request that failed inside the engine."""
    return ApiError(500, f"the engine failed: {type(error).__name__}: {error!s:.300}", code="engine_error")
