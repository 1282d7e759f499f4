"""Runs `jspec generate`, which completes a prompt.

`jspec chat` has the same options for models, drafters and sampling.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jspec
from convert import hub
from jspec.core.config import ACCEPT_RULES, KV_DTYPES, QUANTIZE
from jspec.core.tree import DEFAULT_TREE, TREE_FORMS
from jspec.engine.text.tokenizer import TOKENIZER_FILES, HFTokenizer, Tokenizer, load_tokenizer
from jspec.tools import demo
from jspec.tools.progress import settled

if TYPE_CHECKING:  # the command line parses its options before it imports jax
    import jax

    from jspec import Chunk, Drafter, Engine, SamplingParams

PRETRAINED = {  # the drafter of each option that names a folder
    "eagle3": "Eagle3",
    "peagle": "PEagle",
    "eagle": "Eagle",
    "medusa": "Medusa",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "mtp": "MTP",
    "draft_model": "DraftModel",
}
HEADS = ("eagle3", "peagle", "eagle", "dflash", "dspark", "mtp")  # drafters that may use the target's output head
QUANTIZABLE = (*HEADS, "draft_model")


# -- options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec generate` on a parser."""
    parser.add_argument("prompt", nargs="?", help="text to complete")
    parser.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a file; -: from the standard input")
    parser.add_argument("--chat", action="store_true", help="format the prompt by the tokenizer's chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat; implies --chat")
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    parser.add_argument("--n", type=int, default=1, help="number of completions")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    parser.add_argument("--json-schema", metavar="SCHEMA", help="JSON schema of the output, as text or @FILE")
    parser.add_argument("--regex", help="regular expression that the whole output matches")
    parser.set_defaults(run=run)


def add_model_arguments(parser: argparse.ArgumentParser, *, needs_target: bool = True) -> None:
    """Declare the options for target, drafter and engine on a parser.

    Args:
        needs_target: whether the target must be given; else it is the embedded one, with its head.
    """
    about = 'folder, hub id, or "demo": the embedded one' + ("" if needs_target else ", the default, with its head")
    parser.add_argument("--target", required=needs_target, metavar="PATH", help=about)
    drafters = parser.add_mutually_exclusive_group()
    drafters.add_argument("--eagle3", metavar="PATH", help='draft with an EAGLE-3 head; "demo": the embedded one')
    drafters.add_argument("--peagle", metavar="PATH", help="draft with a P-EAGLE head")
    drafters.add_argument("--eagle", metavar="PATH", help="draft with an EAGLE-1 or EAGLE-2 head")
    drafters.add_argument("--medusa", metavar="PATH", help="draft with Medusa heads")
    drafters.add_argument("--dflash", metavar="PATH", help="draft with a DFlash head")
    drafters.add_argument("--dspark", metavar="PATH", help="draft with a DSpark head")
    drafters.add_argument("--mtp", metavar="PATH", help="draft with the target's own layer for this, of its folder")
    drafters.add_argument("--draft-model", metavar="PATH", help="draft with a smaller model")
    parser.add_argument(
        "--draft-device",
        type=int,
        metavar="N",
        help="device of the draft model, counted from 0; default: the target's devices",
    )
    drafters.add_argument("--ngram", action="store_true", help="draft what followed the newest tokens earlier")
    drafters.add_argument("--suffix", action="store_true", help="draft what most often followed the newest tokens")
    parser.add_argument(
        "--tree", help=f"draft tree: {TREE_FORMS}; default: {DEFAULT_TREE}, or a shorter chain if the head ends there"
    )
    parser.add_argument(
        "--accept", default=ACCEPT_RULES[0], metavar="RULE", help=f"accept rule: {', '.join(ACCEPT_RULES)}"
    )
    parser.add_argument("--dtype", help="dtype of the weights; default: float32 on CPU, bfloat16 elsewhere")
    kinds, dtypes = ", ".join(QUANTIZE), ", ".join(KV_DTYPES)
    parser.add_argument("--quantize", metavar="KIND", help=f"quantise the target's weights: {kinds}")
    parser.add_argument("--draft-quantize", metavar="KIND", help="quantise a head, an MTP layer or a draft model")
    parser.add_argument("--draft-vocab", metavar="N|FILE", help="tokens that a head with the target's head drafts")
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", help=f"dtype of the target's cache: {dtypes}; default: the weights'"
    )
    parser.add_argument("--draft-kv-dtype", metavar="DTYPE", help="dtype of the drafter's cache")
    parser.add_argument("--draft-window", type=int, metavar="W", help="newest tokens that the drafter attends to")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="devices over which weights are divided"
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address of process 0, if several processes run this command"
    )
    parser.add_argument("--num-processes", type=int, metavar="N", help="number of these processes")
    parser.add_argument("--process-id", type=int, metavar="I", help="number of this process, from 0")
    parser.add_argument("--max-len", type=int, help="largest number of tokens, prompt included; default: the engine's")
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models, or a folder; default: the target folder\'s')
    parser.add_argument(
        "--chat-template", metavar="FILE", help="jinja template of conversations; default: the tokenizer's"
    )
    parser.add_argument(
        "--compile-cache", metavar="DIR", help="where compiled programs are kept; default: the user's cache folder"
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for sampling on a parser."""
    parser.add_argument("--max-tokens", type=int, default=128, help="largest number of tokens to emit")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep tokens this many times as likely as the first")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="factor for tokens seen before; 1 is off")
    parser.add_argument("--seed", type=int, help="seed of the request; with it the output can be repeated")


# -- from options to objects


def sampling(arguments: argparse.Namespace, **more: object) -> SamplingParams:
    """Return the sampling parameters of a parsed command line.

    Args:
        arguments: parsed command line with the options of `add_sampling_arguments`.
        more: further fields of `SamplingParams`.

    Raises:
        ValueError: an option has an impossible value.
    """
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return jspec.SamplingParams(**{name: getattr(arguments, name) for name in names}, **more)  # type: ignore[arg-type]


def join(arguments: argparse.Namespace) -> None:
    """Bring the processes together that run this command, if the options name any; before any use of a device.

    Raises:
        ValueError: one of the three options is absent, or wrong, or another one needs all its devices in one process.
        OSError, RuntimeError: as for `jspec.distributed.initialize`.
    """
    names = ("coordinator", "num_processes", "process_id")
    options = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    wanted = {"draft_device": None, "replicas": 1}
    for name in [name for name, value in wanted.items() if options and getattr(arguments, name, value) != value]:
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(
            f"{flag}: expected no such option beside --coordinator, got {getattr(arguments, name)}; "
            "leave one of the two out: --tensor-parallel divides one engine and its drafter over several processes"
        )
    if options and len(options) < len(names):
        missing = ", ".join(f"--{name.replace('_', '-')}" for name in names if name not in options)
        raise ValueError(f"{missing}: expected beside the other options of several processes, got none; add it")
    if options:
        jspec.distributed.initialize(**options)


def follows(engine: Engine) -> bool:
    """Follow process 0 until its engine is closed, and return True; False: this is process 0, or alone."""
    if jspec.distributed.process_id() == 0:
        return False
    engine.follow()
    return True


def prepare(arguments: argparse.Namespace) -> Tokenizer:
    """Check the options of a parsed command line, find its models and load the tokenizer.

    Args:
        arguments: parsed command line with the options of `add_model_arguments`. Each model's name is replaced by its
            folder: "demo" by an embedded folder, a hub id by the downloaded copy.

    Raises:
        ValueError: options do not fit together, or the target has no tokenizer and --tokenizer is not given.
        OSError: the file of --chat-template cannot be read.
    """
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


def make_engine(arguments: argparse.Namespace, tokenizer: Tokenizer, **options: Any) -> Engine:
    """Load the models of a parsed command line and make an engine.

    Args:
        arguments: parsed command line, after `prepare`.
        tokenizer: tokenizer of the target.
        options: further options of the engine; without ``slots`` it runs one request at a time.
    """
    names = (
        *("dtype", "accept", "quantize", "kv_dtype", "draft_kv_dtype", "draft_window", "tensor_parallel"),
        "compile_cache",
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
    options = draft_options(arguments)
    for option, name in PRETRAINED.items():
        if path := getattr(arguments, option):
            return getattr(jspec, name).from_pretrained(path, dtype=arguments.dtype, **options)
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


class SpeedMeter:
    """Measures the speed of an answer after its first round, so that loading and compiling do not count."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._before = engine, engine.metrics
        self._tokens = 0  # number of tokens that came
        self._first: tuple[int, float] | None = None  # number of tokens and time in seconds after the first round

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks of an answer, and record the time of the first one that a round produced."""
        begun: set[int] = set()  # completions whose first token came
        for chunk in chunks:
            self._tokens += len(chunk.token_ids)
            if self._first is None and chunk.index in begun:
                self._first = self._tokens, time.perf_counter()
            begun.add(chunk.index)
            yield chunk

    def line(self) -> str:
        """Return a line with tokens, rounds, mean acceptance length and, after two rounds, the speed in tokens/s."""
        now, before = self._engine.metrics, self._before
        rounds = now.num_drafts - before.num_drafts
        length = 1 + (now.num_accepted_tokens - before.num_accepted_tokens) / max(rounds, 1)
        text = f"{now.num_tokens - before.num_tokens} tokens, {rounds} rounds, mean acceptance length {length:.2f}"
        tokens, began = self._first or (self._tokens, 0.0)
        if self._tokens == tokens:
            return text
        return f"{text}, {(self._tokens - tokens) / (time.perf_counter() - began):.1f} tokens/s"


def run(arguments: argparse.Namespace) -> int:
    """Run `jspec generate`: print the completion, then counters and tokens/s on the standard error.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: an option has an impossible value, or the target has no tokenizer.
    """
    params = sampling(
        arguments,
        n=arguments.n,
        stop=tuple(arguments.stop or ()),
        json_schema=_text_or_file(arguments.json_schema),
        regex=arguments.regex,
    )
    text = _text(arguments)
    tokenizer = prepare(arguments)
    prompt = _formatted(text, arguments, tokenizer)
    with make_engine(arguments, tokenizer) as engine:
        if follows(engine):
            return 0
        meter, texts = SpeedMeter(engine), [""] * params.n
        for chunk in settled(meter.watch(engine.stream(prompt, params))):
            texts[chunk.index] += chunk.text or ""
            if params.n == 1:
                print(chunk.text, end="", flush=True)
        if params.n == 1:
            print()
        else:
            print("\n".join(f"--- completion {number} of {params.n}\n{text}" for number, text in enumerate(texts, 1)))
        print(meter.line(), file=sys.stderr)
    return 0


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


def _text_or_file(value: str | None) -> str | None:
    """Return a text, or for ``@FILE`` the content of the file."""
    if value is None or not value.startswith("@"):
        return value
    return Path(value[1:]).read_text(encoding="utf-8")
