"""The fields of each route's requests: one table a route, with a reader for each field that is served or refused."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jspec.core.config import MAX_LOGPROBS
from jspec.core.foreign_names import FOREIGN_NAMES
from jspec.core.shorten import short
from jspec.engine.request.sampling_params import GRAMMARS, SamplingParams
from jspec.server.ask.messages import join_texts, messages
from jspec.server.ask.structured import response_format, structured_outputs
from jspec.server.ask.values import (
    Reader,
    boolean,
    check_keys,
    given,
    integer,
    listing,
    mapping,
    never,
    one_of,
    only,
    text,
)
from jspec.server.http.errors import invalid, refused
from jspec.server.tool_calls.tools import read_choice

MAX_N, MAX_STOPS, MAX_STOP, MAX_BIAS = 16, 16, 256, 1024

FOREIGN = {  # what to send instead of fields of other servers, where `FOREIGN_NAMES` has names of Python's calls
    **dict.fromkeys(("guided_json", "json_schema", "response_format"), 'structured_outputs {"json": ...}'),
    **dict.fromkeys(("guided_regex", "regex"), 'structured_outputs {"regex": ...}'),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), 'structured_outputs {"grammar": ...}'),
    "guided_choice": 'structured_outputs {"choice": [...]}',
    **dict.fromkeys(("guided_decoding", "guided_decoding_backend"), "structured_outputs"),
    **dict.fromkeys(
        ("enable_thinking", "thinking", "template_kwargs"), 'chat_template_kwargs {"enable_thinking": ...}'
    ),
    **dict.fromkeys(("lora_path", "lora_name", "lora_request"), "model, the name of a loaded adapter"),
    **dict.fromkeys(("inputs", "input_ids", "prompt_token_ids"), "prompt"),
    **dict.fromkeys(("n_predict", "max_output_tokens"), "max_tokens"),
    "do_sample": "temperature (0 for greedy decoding)",
    "eos_token_id": "stop_token_ids",
    "reasoning": "reasoning_effort",
}

logger = logging.getLogger("jspec.server")


@dataclass(frozen=True)
class Field:
    """A field of a request.

    Attributes:
        read: checks the value; see `jspec.server.ask.values`.
        param: the field of `SamplingParams` that the value becomes; None: the value is for the route itself.
        spread: whether ``read`` returns fields of `SamplingParams` by name, instead of one value.
    """

    read: Reader
    param: str | None = None
    spread: bool = False


@dataclass
class Ask:
    """The fields of one request.

    Attributes:
        own: values for the route itself, by field.
        params: fields of `SamplingParams`.
        names: the field of the request that gave each field of `SamplingParams`.
    """

    own: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, values: Mapping[str, Any]) -> None:
        """Set fields of `SamplingParams` from a field of the request.

        Raises:
            ApiError: another field gave another value, or another grammar.
        """
        for param, value in values.items():
            for other in GRAMMARS if param in GRAMMARS else (param,):
                if other in self.params and (other, self.params[other]) != (param, value):
                    raise invalid(name, f"expected nothing beside {self.names[other]}; give one of the two")
            self.params[param] = value
            self.names[param] = name

    def sampling_params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Return the checked parameters, with the server's defaults for fields that the request leaves out.

        Raises:
            ApiError: a field has a wrong value.
        """
        try:
            return SamplingParams(**{**(defaults or {}), **self.params})
        except (TypeError, ValueError) as error:
            raise refused(error, self.names) from error


def read_fields(body: Mapping[str, Any], table: Mapping[str, Field], *, ignore_unknown: bool = False) -> Ask:
    """Read the fields of a request; null counts as absent.

    Args:
        body: the request.
        table: the route's fields.
        ignore_unknown: whether to log unknown fields instead of refusing them.

    Raises:
        ApiError: a field is unknown, not offered, or has a wrong value.
    """
    ask = Ask()
    for name, value in body.items():
        if value is None:
            continue
        if name not in table:
            _unknown(name, table, ignore_unknown=ignore_unknown)
            continue
        entry = table[name]
        read = entry.read(name, value)
        if entry.spread:
            ask.set(name, read)
        elif entry.param is not None:
            ask.set(name, {entry.param: read})
        else:
            ask.own[name] = read
    return ask


def _unknown(name: str, table: Mapping[str, Field], *, ignore_unknown: bool) -> None:
    if ignore_unknown:
        logger.warning("ignored the unknown field %s", short(name, 60))
        return
    raise invalid(name[:60], f"expected a field that this route knows, got an unknown one; {_hint(name, table)}")


def _hint(name: str, table: Mapping[str, Field]) -> str:
    """Return what to send instead of an unknown field."""
    ours = FOREIGN.get(name) or FOREIGN_NAMES.get(name, name)
    if ours.startswith("no such option"):
        return f"leave it out{ours.removeprefix('no such option')}"
    wanted = re.split("[= ]", ours)[0]
    known = wanted if wanted in table else next((key for key, entry in table.items() if entry.param == wanted), None)
    if known is not None:
        return f"give {known}{ours.removeprefix(wanted).removesuffix('=')} instead"
    near = difflib.get_close_matches(name[:60], table, 1)
    return f"perhaps {near[0]}" if near else "leave it out"


# -- readers of fields with limits of their own


def _stop(name: str, value: Any) -> Any:
    stops = value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise invalid(name, f"expected at most {MAX_STOPS} texts, got {len(stops)}")
    if any(isinstance(stop, str) and len(stop) > MAX_STOP for stop in stops):
        raise invalid(name, f"expected texts of at most {MAX_STOP} characters, got a longer one")
    return value


def _logit_bias(name: str, value: Any) -> dict[str, Any]:
    if len(mapping(name, value)) > MAX_BIAS:
        raise invalid(name, f"expected at most {MAX_BIAS} tokens, got {len(value)}")
    return value


def _stream_options(name: str, value: Any) -> dict[str, bool]:
    keys = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    check_keys(name, mapping(name, value), keys)
    return {key: boolean(f"{name}.{key}", option) for key, option in value.items() if option is not None}


def _jspec(name: str, value: Any) -> dict[str, bool]:
    check_keys(name, mapping(name, value), ("rounds", "metrics"))
    return {key: boolean(f"{name}.{key}", option) for key, option in value.items()}


def _modalities(name: str, value: Any) -> Any:
    if value != ["text"]:
        raise invalid(name, f'expected ["text"], because models of texts alone are supported, got {short(value)}')
    return value


def _prediction(name: str, value: Any) -> str:
    check_keys(name, mapping(name, value), ("type", "content"))
    one_of("content")(f"{name}.type", value.get("type"))
    return join_texts(f"{name}.content", value.get("content"), {"text": "text"})


def _tools(name: str, value: Any) -> Any:
    try:
        read_choice(value, None)
    except ValueError as error:
        raise refused(error, {}) from error
    return value


# -- the tables

TEXTS_ALONE = "models of texts alone are supported"
OWN_TEMPLATE = "the server renders the model's own template alone"
SAMPLING = {
    name: Field(given, name)
    for name in (
        *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p"),
        *("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words", "allowed_token_ids"),
        *("priority", "draft", "skip_special_tokens"),
    )
} | {name: Field(given, "thinking_budget") for name in ("thinking_token_budget", "max_thinking_tokens")}
WITHOUT_EFFECT = {
    name: Field(given)
    for name in (
        *("user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "verbosity", "request_id", "spaces_between_special_tokens"),
    )
}
NOT_OFFERED = {
    "best_of": Field(integer(1, MAX_N)),  # more than n is refused
    "use_beam_search": Field(only(False, "there is no beam search")),
    "length_penalty": Field(only(1.0, "there is no beam search")),
    "include_stop_str_in_output": Field(only(False, "stop strings are always cut off")),
    "truncate_prompt_tokens": Field(never("prompts are never cut; shorten the prompt")),
    "prompt_embeds": Field(never("prompts are texts or token ids")),
    "cache_salt": Field(never("the prefix cache is shared by all requests")),
}
BOTH = {
    **SAMPLING,
    **WITHOUT_EFFECT,
    **NOT_OFFERED,
    "model": Field(text),
    "max_tokens": Field(given, "max_tokens"),
    "n": Field(integer(1, MAX_N), "n"),
    "stop": Field(_stop, "stop"),
    "logit_bias": Field(_logit_bias, "logit_bias"),
    "prompt_logprobs": Field(given, "prompt_logprobs"),
    "stream": Field(boolean),
    "stream_options": Field(_stream_options),
    "response_format": Field(response_format, spread=True),
    "structured_outputs": Field(structured_outputs, spread=True),
    "return_token_ids": Field(boolean),
    "jspec": Field(_jspec),
}
COMPLETIONS = {
    **BOTH,
    "prompt": Field(given),
    "echo": Field(boolean),
    "logprobs": Field(given, "logprobs"),
    "add_special_tokens": Field(boolean),
    "suffix": Field(never("text cannot be inserted before a suffix")),
}
TEMPLATE = {
    "messages": Field(messages),
    "tools": Field(_tools),
    "add_generation_prompt": Field(boolean),
    "continue_final_message": Field(boolean),
    "chat_template_kwargs": Field(mapping),
    "chat_template": Field(never(OWN_TEMPLATE)),
}
CHAT = {
    **BOTH,
    **TEMPLATE,
    "max_completion_tokens": Field(given, "max_tokens"),
    "logprobs": Field(boolean),
    "top_logprobs": Field(integer(0, MAX_LOGPROBS)),
    "tool_choice": Field(given),
    "parallel_tool_calls": Field(boolean),
    "reasoning_effort": Field(text),
    "add_special_tokens": Field(only(False, "the chat template writes the special tokens")),
    "functions": Field(never("it was replaced by tools")),
    "function_call": Field(never("it was replaced by tool_choice")),
    "modalities": Field(_modalities),
    "audio": Field(never(TEXTS_ALONE)),
    "image_url": Field(never(TEXTS_ALONE)),
    "prediction": Field(_prediction, "prediction"),
    "web_search_options": Field(never("the server fetches nothing")),
}
TOKENIZE = {
    **TEMPLATE,
    "model": Field(text),
    "prompt": Field(text),
    "add_special_tokens": Field(boolean),
    "return_token_strs": Field(boolean),
}
LOAD_ADAPTER = {
    "lora_name": Field(text),
    "lora_path": Field(text),
    "load_inplace": Field(only(False, "a name that is in use must be unloaded first")),
    "base_model_name": Field(text),
}
UNLOAD_ADAPTER = {"lora_name": Field(text), "lora_int_id": Field(never("adapters have names alone"))}
DETOKENIZE = {"model": Field(text), "tokens": Field(listing(2**20))}
