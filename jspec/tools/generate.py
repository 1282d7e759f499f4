"""Runs `jspec generate`, which completes a prompt.

`jspec chat` has the same options for models, drafters and sampling.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jspec
from convert import hub
from jspec.draft.verifier import named_target
from jspec.engine.reading.answers import ChatSplitter
from jspec.engine.request.model_sampling import model_sampling
from jspec.engine.text.tokenizer import HFTokenizer, Tokenizer, load_tokenizer
from jspec.engine.text.tokenizer_files import TOKENIZER_FILES
from jspec.tools import demo, processes, token_table
from jspec.tools.options import add_model_arguments, add_sampling_arguments, check_join
from jspec.tools.progress import settled
from jspec.tools.speed_meter import SpeedMeter

if TYPE_CHECKING:  # the command line parses its options before it imports jax
    import jax

    from jspec import Drafter, Engine, SamplingParams
    from jspec.engine.request.request import Chunk
    from jspec.engine.request.token_logprobs import TokenLogprob

PRETRAINED = {  # the drafter of each option that names a folder
    "eagle3": "Eagle3",
    "peagle": "PEagle",
    "eagle": "Eagle",
    "medusa": "Medusa",
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "mtp": "MTP",
    "gemma4_assistant": "Gemma4Assistant",
    "uno": "UNO",
    "draft_model": "DraftModel",
}
HEADS = (
    "eagle3",
    "peagle",
    "eagle",
    "dflash",
    "dflash2",
    "dspark",
    "mtp",
)  # drafters that may use the target's output head
QUANTIZABLE = (*HEADS, "gemma4_assistant", "draft_model")


# -- options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec generate` on a parser."""
    parser.add_argument("prompt", nargs="?", help="text to complete")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file; -: from the standard input")
    parser.add_argument("--chat", action="store_true", help="format the prompt by the chat template; reasoning: stderr")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat; implies --chat")
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument("--n", type=int, default=1, help="number of completions")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--json-schema", metavar="SCHEMA", help="JSON schema of the output, as text or @FILE")
    parser.add_argument("--regex", help="regular expression that the whole output matches")
    parser.add_argument("--grammar", help="context-free grammar of the output in Lark's form, as text or @FILE")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end token")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="print each token's log-probability and the N likeliest tokens"
    )
    parser.set_defaults(run=run)


# -- from options to objects


def sampling(arguments: argparse.Namespace, **more: object) -> SamplingParams:
    """Return the sampling parameters of a parsed command line.

    Args:
        arguments: parsed command line with the options of `jspec.tools.options`, after `prepare`.
        more: further fields of `SamplingParams`.

    Raises:
        ValueError: an option has an impossible value.
    """
    names = (
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "thinking_budget"),
    )
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    defaults = {"temperature": 0.0, **model_sampling(arguments.generation_config, arguments.target)}
    return jspec.SamplingParams(**{**defaults, **options, **more})


def prepare(arguments: argparse.Namespace) -> Tokenizer:
    """Check the options of a parsed command line, find its models and load the tokenizer.

    Args:
        arguments: parsed command line with the options of `jspec.tools.options`. Each model's name is replaced by its
            folder: "demo" by an embedded folder, a hub id by the downloaded copy.

    Raises:
        ValueError: options do not fit together, or the target has no tokenizer and --tokenizer is not given.
        OSError: the file of --chat-template cannot be read.
    """
    _take_named_target(arguments)
    draft_options(arguments)
    target = arguments.target
    for name in ("target", *PRETRAINED):
        if path := getattr(arguments, name):
            setattr(arguments, name, hub.find(demo.folder(path, name)))
    source = arguments.tokenizer
    tokenizer = load_tokenizer(arguments.target if source is None else source)
    if tokenizer is None:
        raise ValueError(
            f"{target if source is None else source}: expected a tokenizer for the text "
            f"({', '.join(TOKENIZER_FILES)}), got none; add --tokenizer FOLDER, or --tokenizer bytes if the model's "
            "tokens are bytes"
        )
    if arguments.chat_template is not None:
        if not isinstance(tokenizer, HFTokenizer):
            raise ValueError("--chat-template: expected a tokenizer with special tokens, got bytes; leave it out")
        tokenizer.chat_template = Path(arguments.chat_template).read_text(encoding="utf-8")
    return tokenizer


def _take_named_target(arguments: argparse.Namespace) -> None:
    """Take the drafter of --draft; let a head that --target names be the drafter of the target that it names."""
    if arguments.draft is not None:
        from jspec.draft.choice import choose_drafter, drafter_of  # here, because they import jax
        from jspec.draft.named import AUTO

        if arguments.draft == AUTO:
            choice = choose_drafter(demo.folder(arguments.target, "target"))
        else:
            choice = drafter_of(demo.folder(arguments.draft, "head"))
        setattr(arguments, choice.method, choice.path or True)
        print(f"drafter: {choice}", file=sys.stderr)
    if any(getattr(arguments, name) for name in (*PRETRAINED, "ngram", "suffix")) or arguments.target == demo.NAME:
        return
    if (named := named_target(arguments.target)) is None:
        return
    setattr(arguments, named.kind, arguments.target)
    arguments.target = named.path
    arguments.tree = arguments.tree or f"chain:{named.length}"


def make_engine(arguments: argparse.Namespace, tokenizer: Tokenizer, **options: Any) -> Engine:
    """Load the models of a parsed command line and make an engine.

    Args:
        arguments: parsed command line, after `prepare`.
        tokenizer: tokenizer of the target.
        options: further options of the engine; without ``slots`` it runs one request at a time.
    """
    names = (
        *("dtype", "accept", "quantize", "kv_dtype", "draft_kv_dtype", "draft_window", "tensor_parallel"),
        *("compile_cache", "thinking_end"),
    )
    return jspec.Engine.from_pretrained(
        arguments.target,
        drafter=make_drafter(arguments),
        tokenizer=tokenizer,
        **{"slots": 1, **options},
        **({} if arguments.max_len is None else {"max_len": arguments.max_len}),
        **{name: getattr(arguments, name) for name in names},
    )


def make_drafter(arguments: argparse.Namespace) -> Drafter | None:
    """Load the drafter that a parsed command line names; return None if it names none."""
    from jspec.draft.named import with_lookup  # here, because it imports jax

    options = draft_options(arguments)
    for option, name in PRETRAINED.items():
        if path := getattr(arguments, option):
            dtype = {} if option == "uno" else {"dtype": arguments.dtype}  # an adapter has the target's
            drafter = getattr(jspec, name).from_pretrained(path, **dtype, **options)
            return drafter if arguments.lookup is None else with_lookup(drafter, arguments.lookup, arguments.join)
    if arguments.ngram:
        return jspec.NGram(**options)
    return jspec.Suffix(**options) if arguments.suffix else None


def draft_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the drafter's keyword arguments that a parsed command line gives, except its path and dtype.

    Raises:
        ValueError: the tree is malformed, or an option needs a drafter that is not given.
    """
    options: dict[str, Any] = {} if arguments.tree is None else {"tree": jspec.Tree.parse(arguments.tree)}
    for option, name, drafters in (("draft_quantize", "quantize", QUANTIZABLE), ("draft_vocab", "draft_vocab", HEADS)):
        if (value := getattr(arguments, option)) is None:
            continue
        if not any(getattr(arguments, drafter) for drafter in drafters):
            flags = ", ".join(_flag(drafter) for drafter in drafters)
            raise ValueError(f"{_flag(option)}: expected one of {flags}, got none of them; leave it out")
        options[name] = int(value) if value.isdecimal() else value
    if arguments.tree is not None and not any(getattr(arguments, name) for name in (*PRETRAINED, "ngram", "suffix")):
        raise ValueError("--tree: expected a drafter that drafts it, got none; name one, --ngram for instance")
    heads = (*HEADS, "gemma4_assistant", "medusa")
    if arguments.lookup is not None and not any(getattr(arguments, head) for head in heads):
        flags = ", ".join(map(_flag, heads))
        raise ValueError(
            f"--lookup: expected a head beside which it drafts, one of {flags}, got none of them (a draft model drafts "
            "alone); name one, or leave it out"
        )
    check_join(arguments)
    if arguments.draft_device is not None:
        options["device"] = _draft_device(arguments)
    return options


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _draft_device(arguments: argparse.Namespace) -> jax.Device:
    """Return the device that --draft-device names.

    Raises:
        ValueError: there is no draft model or no such device.
    """
    import jax

    devices, index = jax.devices(), arguments.draft_device
    if not arguments.draft_model:
        raise ValueError("--draft-device: expected --draft-model, whose device it is, got none; leave it out")
    if not 0 <= index < len(devices):
        raise ValueError(
            f"--draft-device: expected a number from 0 to {len(devices) - 1}, as there are {len(devices)} "
            f"{devices[0].platform} devices, got {index}"
        )
    return devices[index]


# -- the command


def run(arguments: argparse.Namespace) -> int:
    """Run `jspec generate`: print the completion, then counters and tokens/s on the standard error.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: an option has an impossible value, or the target has no tokenizer.
        ImportError: --regex needs a library that is not installed.
    """
    text, schema, grammar = _text(arguments), *map(_text_or_file, (arguments.json_schema, arguments.grammar))
    if arguments.regex is not None:
        from jspec.engine.grammar.regex_dfa import library  # here, because numpy takes time

        library()  # raises an error before the models are loaded if it is missing
    tokenizer = prepare(arguments)
    stop = tuple(arguments.stop or ())
    forms = {"json_schema": schema, "regex": arguments.regex, "grammar": grammar}
    more = {"n": arguments.n, "ignore_eos": arguments.ignore_eos, "logprobs": arguments.logprobs}
    params = sampling(arguments, stop=stop, **forms, **more)
    prompt = _formatted(text, arguments, tokenizer)
    with make_engine(arguments, tokenizer) as engine:
        if processes.follows(engine):
            return 0
        meter, texts, thoughts = SpeedMeter(engine, params.max_tokens), [""] * params.n, [""] * params.n
        records: list[list[TokenLogprob]] = [[] for _ in texts]
        for chunk in settled(meter.watch(_chunks(engine, prompt, params))):
            texts[chunk.index] += chunk.text or ""
            thoughts[chunk.index] += chunk.reasoning or ""
            records[chunk.index] += chunk.logprobs or []
            if params.n == 1:
                print(chunk.reasoning or "", end="", flush=True, file=sys.stderr)
                print(chunk.text, end="", flush=True)
        for number, scores in enumerate(records):
            _end_completion(number, texts, thoughts)
            if params.logprobs is not None:
                print(token_table.table(scores, tokenizer))
        print(meter.line(), file=sys.stderr)
    return 0


def _end_completion(number: int, texts: Sequence[str], thoughts: Sequence[str]) -> None:
    """Print a completion and its reasoning if there are several; a single one was printed as it came."""
    if len(texts) == 1:
        print()
        return
    name = f"completion {number + 1} of {len(texts)}"
    if thoughts[number]:
        print(f"--- reasoning of {name}\n{thoughts[number]}", file=sys.stderr)
    print(f"--- {name}\n{texts[number]}")


def _text(arguments: argparse.Namespace) -> str:
    """Return the text of the prompt.

    Raises:
        ValueError: there is no prompt, or there are two.
    """
    text, file = arguments.prompt, arguments.prompt_file
    if (text is None) == (file is None):
        raise ValueError("generate: expected a prompt or --prompt-file FILE, one of the two")
    if file is None:
        return text
    return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")


def _formatted(text: str, arguments: argparse.Namespace, tokenizer: Tokenizer) -> str | list[int]:
    """Return a text unchanged, or with --chat or --system as the token ids of a chat.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not arguments.chat and arguments.system is None:
        return text
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return tokenizer.chat([*system, {"role": "user", "content": text}])


def _chunks(engine: Engine, prompt: str | list[int], params: SamplingParams) -> Iterator[Chunk]:
    """Stream a completion, or the answer to a chat with its reasoning apart from the text."""
    if isinstance(prompt, str):
        return engine.stream(prompt, params)
    splitter = ChatSplitter(engine.tokenizer, prompt, params)
    return splitter.streamed(engine.stream(prompt, splitter.params))


def _text_or_file(value: str | None) -> str | None:
    """Return a text, or for ``@FILE`` the content of the file."""
    if value is None or not value.startswith("@"):
        return value
    return Path(value[1:]).read_text(encoding="utf-8")
