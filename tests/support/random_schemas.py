"""Random JSON schemas, and random texts that a grammar's masks allow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from jspec.engine.grammar.cfg_matcher import LarkGrammar, Matcher
from jspec.engine.grammar.token_table import Grammar

END = 256
BYTES: list[bytes | None] = [*(bytes([byte]) for byte in range(256)), None]  # one token for each byte, and an end
SPECIAL = b'"\\{}[],:+-.0159eEuZT ab'
CLOSING = (END, *b'"]}0aeulstrn:{,[1-T.Z')  # bytes that soon lead to the end of a text
NAMES = [
    "a",
    "b",
    "",
    "a b",
    'q"q',
    "back\\slash",
    "new\nline",
    "tab\t",
    "é",
    "a+b",
    "x.y*",
    "\U0001f600",
    "/~",
    "$ref",
    "\x7f",
]
PATTERNS = [
    *("^[a-c]{2}-[0-9]+$", r"^\d{2}$", r"^\w+$", "a", "^a", "b$", "^a.b$", r"^\S+$", r"^a\s?b$", "^(a|b)*c$", "^a|b$"),
    *(
        "^[^a]{2}$",
        r"^[^\"\\\x00-\x1f]{2,3}$",
        r"^\"\\$",
        r"^[a&&b]+$",
        r"^\.\*\/$",
        "^é+$",
        "^$",
        r"^\x41\u00e9$",
        "[]-]$",
    ),
    *(r"^[\d.]+$", r"^\D$", r"^[\w-]{1,3}$", "^a{2,}?$", r"^(?:x(?:y|z))?$", r"^\t$", "^[[:a]$", "^~a--b$"),
]
FORMATS = ["date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "uri", "hostname", "duration"]
Random = np.random.Generator


def pick(rng: Random, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def value(rng: Random, levels: int = 2) -> Any:
    """A random JSON value."""
    simple = [None, True, False, 0, 1, -1, 7, 1.0, 0.5, -2.5, 10**30, 1e-7, -0.0, "", *NAMES]
    kind = rng.integers(4) if levels else 3
    if kind == 0:
        return {pick(rng, NAMES): value(rng, levels - 1) for _ in range(rng.integers(3))}
    if kind == 1:
        return [value(rng, levels - 1) for _ in range(rng.integers(3))]
    return pick(rng, simple)


def schema(rng: Random, levels: int = 3) -> Any:
    """A random JSON schema; it may have no instance, and hold keywords that are refused."""
    makers: list[Callable[[Random, int], dict[str, Any]]] = [_string, _number, _values, _simple]
    makers += [_object, _object, _array, _either, _either] if levels else []
    made = pick(rng, makers)(rng, levels)
    if rng.random() < 0.05:
        made |= pick(rng, makers)(rng, levels)
    if rng.random() < 0.05:
        made |= {"description": "x", "title": "minimum", "default": value(rng)}
    return made if rng.random() < 0.98 else bool(rng.random() < 0.7)


def with_definitions(rng: Random) -> dict[str, Any]:
    """A random schema with two definitions, which it may refer to, and which may refer to each other."""
    whole = schema(rng)
    whole = whole if isinstance(whole, dict) else {"anyOf": [whole]}
    names = ["n", "a/b"]
    return {**whole, "$defs": {name: schema(rng, 2) for name in names}} if "#/$defs" in json.dumps(whole) else whole


def _some(rng: Random, options: dict[str, Any], chance: float = 0.4) -> dict[str, Any]:
    return {name: option for name, option in options.items() if rng.random() < chance}


def _bounds(rng: Random, what: str, most: int = 4) -> dict[str, Any]:
    low, high = sorted(rng.integers(0, most, 2).tolist())
    return _some(rng, {f"min{what}": low, f"max{what}": high}, 0.3)


def _string(rng: Random, levels: int) -> dict[str, Any]:
    kind = rng.integers(4)
    more = {"pattern": pick(rng, PATTERNS)} if kind == 0 else {"format": pick(rng, FORMATS)} if kind == 1 else {}
    return {"type": "string", **more, **(_bounds(rng, "Length") if kind > 1 or rng.random() < 0.2 else {})}


def _number(rng: Random, levels: int) -> dict[str, Any]:
    low, high = sorted(pick(rng, [-3, 0, 2, 7, 10, 12.5, 99, 1000, -0.25]) for _ in range(2))
    bounds = {"minimum": low, "maximum": high, "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
    bounds["multipleOf"] = pick(rng, [1, 2, 3, 5, 10, 0.5, 0.25])
    return {"type": pick(rng, ["integer", "number"]), **_some(rng, bounds, 0.2)}


def _values(rng: Random, levels: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": value(rng)}
    made = {"enum": [value(rng) for _ in range(rng.integers(1, 4))]}
    return made | _some(rng, {"type": pick(rng, ["string", "integer", ["null", "number"], "object"])}, 0.2)


def _simple(rng: Random, levels: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"$ref": pick(rng, ["#/$defs/n", "#/$defs/a~1b", "#/$defs/n", "#"])}
    return {"type": pick(rng, ["boolean", "null", ["integer", "string"], ["boolean", "null"], "object", "array"])}


def _object(rng: Random, levels: int) -> dict[str, Any]:
    names = list(dict.fromkeys(pick(rng, NAMES) for _ in range(rng.integers(4))))
    made: dict[str, Any] = {"type": "object"}
    if names:
        made["properties"] = {name: schema(rng, levels - 1) for name in names}
    options = {
        "required": [name for name in [*names, "z"] if rng.random() < (0.6 if name != "z" else 0.1)],
        "additionalProperties": False if rng.random() < 0.5 else schema(rng, levels - 1),
    }
    rare = {"patternProperties": {pick(rng, PATTERNS): schema(rng, levels - 1)}, "propertyNames": {"maxLength": 2}}
    return (
        made
        | _some(rng, options, 0.5)
        | _some(rng, rare, 0.05)
        | (_bounds(rng, "Properties") if rng.random() < 0.1 else {})
    )


def _array(rng: Random, levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array", **_bounds(rng, "Items")}
    made |= _some(rng, {"items": schema(rng, levels - 1)}, 0.8)
    made |= _some(rng, {"prefixItems": [schema(rng, levels - 1) for _ in range(rng.integers(1, 3))]}, 0.25)
    return made | _some(rng, {"uniqueItems": bool(rng.integers(2)), "contains": schema(rng, 0)}, 0.05)


def _either(rng: Random, levels: int) -> dict[str, Any]:
    parts = [schema(rng, levels - 1) for _ in range(rng.integers(1, 4))]
    return {pick(rng, ["anyOf", "anyOf", "anyOf", "oneOf", "allOf"]): parts, **_some(rng, {"type": "object"}, 0.05)}


def text(grammar: Grammar | LarkGrammar, rng: Random, most: int = 400) -> bytes | None:
    """A random text that a grammar over `BYTES` allows; None if it does not end within ``most`` bytes.

    Raises:
        ValueError: no byte is allowed, and the text may not end.
    """
    ids: list[int] = []
    state, matcher = 0, Matcher(grammar) if isinstance(grammar, LarkGrammar) else None
    soon = int(rng.integers(5, 60))
    while len(ids) < most:
        if matcher is not None:
            allowed = np.flatnonzero(np.unpackbits(matcher.first().view(np.uint8), bitorder="little"))
        else:
            assert isinstance(grammar, Grammar)
            allowed = np.flatnonzero(grammar.next[state, grammar.class_of] >= 0)
        ids.append(_drawn(allowed.tolist(), rng, is_ending=len(ids) > soon))
        if matcher is not None:
            matcher.follow(ids)
        else:
            state = grammar.follow(ids[-1:], state)
        if ids[-1] == END:
            return bytes(ids[:-1])
    return None


def _drawn(allowed: list[int], rng: Random, *, is_ending: bool) -> int:
    if is_ending:
        return next(
            (byte for byte in CLOSING if byte in allowed and (byte == END or rng.random() < 0.9)), pick(rng, allowed)
        )
    kind = rng.random()
    special, ascii_ = ([byte for byte in allowed if byte in group] for group in ([*SPECIAL], range(128)))
    if kind < 0.4 and special:
        return int(pick(rng, special))
    return int(pick(rng, ascii_ if kind < 0.85 and ascii_ else allowed))
