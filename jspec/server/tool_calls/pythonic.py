"""Tool calls as Llama 3.2 and 4 write them: a Python list of calls, ``[f(x=1), g(y="a")]``.

The list is the whole answer, or it stands between ``<|python_start|>`` and ``<|python_end|>``. It is read to its end
before anything is handed on: only then is it known to be calls, and JSON can be made of it.

The list is parsed by `ast`, after a check that it nests by brackets alone and not too deep. Without it, chains such as
``- - - 1`` or ``f()()()`` would nest as deep as they are long, and exhaust the stack of Python's parser.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import Any

from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.text_reader import Reader, Reading

START, END = "<|python_start|>", "<|python_end|>"
MAX_CHARACTERS = 2**16  # most characters of a list of calls
MAX_LEVELS = 50  # most brackets inside one another
CLOSERS = {"(": ")", "[": "]", "{": "}"}
CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

RUN = re.compile(r"[\w.+-]*")  # characters of a name or a number
NAME = re.compile(r"[^\W\d][\w.]*")
NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
BODIES = [(quote, rf"[^\\{quote}]*(?:\\.[^\\{quote}]*)*") for quote in "'\""]
STRING = re.compile("|".join(rf"{q * 3}(?:[^\\]|\\.)*?{q * 3}|{q}(?!{q * 2}){body}{q}" for q, body in BODIES), re.S)
STRING_BEGUN = re.compile("|".join(rf"{q * 3}.*|{q * 2}|{q}(?!{q * 2}){body}\\?" for q, body in BODIES), re.S)
UNESCAPED = re.compile(r"\\(.)|[\n\r\0]", re.S)  # an escape, or a character that Python takes in no string of one line
RAW = {"\n": "\\n", "\r": "\\r", "\0": "\\x00"}
ESCAPES = "\n\\'\"abfnrtvxuUN01234567"  # what may follow a backslash; Python warns of others, and keeps the backslash


def read(reader: Reader, calls: AnswerCalls) -> Reading[None]:
    """Read an answer that is a list of calls, or has lists of calls between markers."""
    has_more = True
    while has_more:
        yield from reader.skip_blanks()
        text = yield from _read_list(reader, calls.schemas)
        made = [] if text is None else _parsed(text)
        yield from reader.skip_blanks()
        if made and ((yield from reader.take(END)) or reader.at == len(reader.text)):
            for name, arguments in made:
                calls.begin(name)
                calls.add(arguments)
            yield from reader.drop_blanks_at_end()
        has_more = yield from reader.pass_until(START)


def _read_list(reader: Reader, names: Collection[str]) -> Reading[str | None]:
    """Read a list of calls; return its text, or None as soon as the text can be no such list."""
    start = reader.at
    if not (yield from reader.take("[")):
        return None
    closers, previous = ["]"], "["
    while closers:
        token = yield from _read_token(reader, names if len(closers) == 1 else None)
        if token is None or not _may_follow(previous, token, closers, names) or reader.at - start > MAX_CHARACTERS:
            return None
        if token in CLOSERS:
            closers.append(CLOSERS[token])
        elif token == closers[-1]:
            closers.pop()
        previous = token
    return reader.text[start : reader.at]


def _read_token(reader: Reader, names: Collection[str] | None) -> Reading[str | None]:
    """Read blanks and a token of Python; return the token, or None if there is none.

    Args:
        names: names of the tools, if a name must be one of them.
    """
    yield from reader.skip_blanks()
    first = reader.text[reader.at : reader.at + 1]
    if first and first in "()[]{},:=":
        reader.at += 1
        return first
    whole, begun = (STRING, STRING_BEGUN) if first in ("'", '"') else (RUN, RUN)
    while True:
        match = whole.match(reader.text, reader.at)
        # A match that reaches the end of the text may go on in what comes next, such as 12 in 123 or "" in """a""".
        if match is not None and (match.end() < len(reader.text) or reader.ended):
            reader.at = match.end()
            return match.group() or None
        rest = reader.text[reader.at :]
        if reader.ended or len(rest) > MAX_CHARACTERS or not (match or begun.fullmatch(rest)):
            return None  # more text cannot make a token of it
        if names is not None and not any(name.startswith(rest) for name in names):
            return None
        yield from _wait(reader, "" if match else first)  # a string that has begun ends at its quote


def _wait(reader: Reader, characters: str) -> Reading[None]:
    """Wait for more text, and for one of the characters if any are given, so that a long string is not read again."""
    seen = len(reader.text)
    yield
    while characters and not reader.ended and len(reader.text) - reader.at <= MAX_CHARACTERS:
        if any(character in reader.text[seen:] for character in characters):
            return
        seen = len(reader.text)
        yield


def _may_follow(previous: str, token: str, closers: list[str], names: Collection[str]) -> bool:
    """Return whether a token may come after another in a list of calls with named arguments.

    Args:
        closers: closing brackets of those that are open.
    """
    level = len(closers)
    if previous in CLOSERS.values() or _is_literal(previous):
        return token in (",", ":", closers[-1])
    if token == closers[-1]:
        return previous in CLOSERS or previous == ","
    if NAME.fullmatch(previous) and previous not in CONSTANTS:
        return token == ("(" if level == 1 else "=")
    if level == 1:
        return token in names
    if level == 2 and previous != "=":
        return NAME.fullmatch(token) is not None and token not in CONSTANTS
    return _is_literal(token) or (token in CLOSERS and level < MAX_LEVELS)


def _is_literal(token: str) -> bool:
    return token[:1] in ("'", '"') or token in CONSTANTS or NUMBER.fullmatch(token) is not None


def value_text(text: str) -> str | None:
    """Return the JSON of a value that is written as Python writes it; None: the text is no such value."""
    reader = Reader()
    reader.text, reader.ended = f"[f(x={text})]", True
    try:
        next(_read_list(reader, ("f",)))
    except StopIteration as stop:
        made = [json.loads(arguments) for _, arguments in (_parsed(stop.value) if stop.value == reader.text else ())]
        return json.dumps(made[0]["x"], ensure_ascii=False) if [*map(list, made)] == [["x"]] else None
    raise AssertionError("a text that has ended waits for nothing")


def _parsed(text: str) -> list[tuple[str, str]]:
    """Return the name and the arguments, as JSON, of each call of a list; [] if this is no list of calls."""
    written = STRING.sub(lambda string: UNESCAPED.sub(_escaped, string[0]), text)
    try:
        tree = ast.parse(written, mode="eval").body
        assert isinstance(tree, ast.List)
        return [_call(node) for node in tree.elts]
    except (SyntaxError, ValueError):  # of Python, of our own, or of json
        return []


def _escaped(match: re.Match[str]) -> str:
    """Return an escape, or a character of a string, as Python takes it; models write line ends as they are."""
    if match[1] is None:
        return RAW[match[0]]
    return match[0] if match[1] in ESCAPES else f"\\\\{RAW.get(match[1], match[1])}"


def _call(node: ast.expr) -> tuple[str, str]:
    assert isinstance(node, ast.Call) and not node.args
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if len(arguments) < len(node.keywords):
        raise ValueError("an argument is given twice")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return ast.unparse(node.func), written


def _value(node: ast.expr) -> Any:
    """Return the value of an expression that JSON can represent."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):  # a bool is an int
            return value
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError(f"expected a value that JSON has, got {type(node).__name__}")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("expected a text as a key")
