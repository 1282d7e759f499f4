"""Which JSON schemas are followed to the letter: the libraries drop what they do not know.

Those of bounded depth become regular expressions, within what `check` allows. Those that hold themselves do not: of
them `check_words` leaves to the library llguidance what is a word of JSON Schema, all of which it follows or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

SAYS_NOTHING = frozenset(
    [
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions"),
    ]
)
TAKEN = {  # what stands beside the keyword that decides, the first of these in a schema, and is followed
    "anyOf": frozenset[str](),
    "$ref": frozenset[str](),
    "enum": frozenset({"type"}),
    "const": frozenset({"type"}),
    "prefixItems": frozenset({"type"}),
    "properties": frozenset({"type", "required", "additionalProperties"}),
}
OF_TYPE = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"additionalProperties"}),
}
WORDS = SAYS_NOTHING | frozenset(  # of JSON Schema, of whatever draft
    [
        *("$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "id"),
        *("type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains"),
        *("minItems", "maxItems", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType", "contentSchema"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ]
)
NO_SCHEMAS = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired"})
BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"})
KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def check(schema: Any, is_plain: Callable[[str], bool], path: str = "#") -> None:
    """Refuse a schema of which a part would be dropped.

    Args:
        is_plain: whether a regular expression's texts can stand in a JSON string as they are.
        path: where in the whole schema this one stands.

    Raises:
        ValueError: naming the keyword and where it stands.
    """
    if not isinstance(schema, Mapping):
        return
    asked = [key for key in schema if key not in SAYS_NOTHING]
    decides = next((key for key in TAKEN if key in schema), "type")
    kind = schema.get("type")
    followed = TAKEN.get(decides, OF_TYPE.get(kind, frozenset()) if isinstance(kind, str) else frozenset())
    wrong = next((key for key in asked if key != decides and key not in followed), None)
    if wrong is not None:
        raise ValueError(
            f"json_schema: {wrong!r} at {path} cannot be followed beside {decides!r}, expected "
            f"{sorted(followed) or 'nothing'}; leave it out, or say it otherwise (anyOf, enum, properties, a regex)"
        )
    _check_values(schema, decides, is_plain, path)
    inner = {name: schema.get(name) for name in ("items", "additionalProperties")}
    for name in ("properties", "$defs", "definitions"):
        if not isinstance(schema.get(name, {}), Mapping):
            raise ValueError(f"json_schema: {name!r} at {path}: expected schemas by name, got {schema[name]!r}")
        inner |= {f"{name}/{key}": part for key, part in schema.get(name, {}).items()}
    for name in ("anyOf", "prefixItems"):
        inner |= {f"{name}/{index}": part for index, part in enumerate(schema.get(name, []))}
    for name, part in inner.items():
        check(part, is_plain, f"{path}/{name}")


def _check_values(schema: Mapping[str, Any], decides: str, is_plain: Callable[[str], bool], path: str) -> None:
    """Refuse values of followed keywords that are not followed themselves."""
    kind, pattern = schema.get("type"), schema.get("pattern")
    unlisted = sorted(set(schema.get("required", [])) - set(schema.get("properties", [])))
    if unlisted:
        raise ValueError(f"json_schema: 'required' at {path} names {unlisted}, expected names in 'properties'")
    if decides in ("properties", "prefixItems") and kind not in (None, {"properties": "object"}.get(decides, "array")):
        raise ValueError(f"json_schema: 'type' at {path}: {decides!r} is of another one, got {kind!r}")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    kinds = [kind] if isinstance(kind, str) else kind or list(KINDS)
    stranger = [value for value in values if not any(KINDS.get(name, lambda _: True)(value) for name in kinds)]
    if stranger:
        raise ValueError(f"json_schema: {decides!r} at {path}: expected values of type {kind!r}, got {stranger[0]!r}")
    if pattern is None:
        return
    others = sorted({"minLength", "maxLength", "format"} & set(schema))
    if others:
        raise ValueError(f"json_schema: {others[0]!r} at {path} cannot be followed beside 'pattern'; say it there")
    if not (isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$") and is_plain(pattern[1:-1])):
        raise ValueError(
            f"json_schema: 'pattern' at {path}: expected '^...$' around what no text with a quote, a backslash or a "
            f"control character matches, got {pattern!r}; write it so"
        )


def holds_itself(schema: Any) -> bool:
    """Whether a `$ref` leads back to what it stands in, so that its texts have no bounded depth."""
    done: set[str] = set()

    def leads_back(part: Any, behind: frozenset[str]) -> bool:
        if not isinstance(part, Mapping):
            return False
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in done:
            if ref in behind or leads_back(_at(schema, ref), behind | {ref}):
                return True
            done.add(ref)
        inner = (one for name, one in _parts(part) if name.split("/")[0] not in ("$defs", "definitions"))
        return any(leads_back(one, behind) for one in inner)

    return leads_back(schema, frozenset({"#"}))


def check_words(schema: Any, path: str = "#") -> None:
    """Refuse what is no word of JSON Schema, which says that it be ignored: a slip of the pen, as a rule.

    Raises:
        ValueError: naming the word and where it stands.
    """
    if not isinstance(schema, Mapping):
        return
    wrong = next((key for key in schema if key not in WORDS), None)
    if wrong is not None:
        raise ValueError(f"json_schema: {wrong!r} at {path}: expected words of JSON Schema; leave it out or mend it")
    for name, part in _parts(schema):
        check_words(part, f"{path}/{name}")


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas that stand in one, and where."""
    for key, value in schema.items():
        if key in NO_SCHEMAS:
            continue
        if key in BY_NAME and isinstance(value, Mapping):
            yield from ((f"{key}/{name}", part) for name, part in value.items())
        elif isinstance(value, list):
            yield from ((f"{key}/{index}", part) for index, part in enumerate(value))
        else:
            yield key, value


def _at(schema: Any, ref: str) -> Any:
    """What a reference within a schema leads to; None where that is nothing."""
    found, (start, *names) = schema, ref.split("/")
    for name in names:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found if start == "#" else None
