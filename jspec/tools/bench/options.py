"""The options of the bench commands, which the command line declares before it imports what measures."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jspec.core.config import ACCEPT_RULES, IMPLEMENTATIONS, KV_DTYPES, QUANTIZE
from jspec.core.tree import DEFAULT_TREE, TREE_FORMS, Tree
from jspec.tools.options import LOOKUP

T = TypeVar("T")
Option = tuple[tuple[str, ...], dict[str, Any]]  # arguments of `argparse.ArgumentParser.add_argument`
SHAPES = (  # names of `random_models.TARGETS`
    *("deepseek-v2-lite", "gemma3-12b", "gemma4-26b-a4b", "glm4.7-flash", "gpt-oss-20b", "least", "llama3-70b"),
    *("llama3-8b", "nemotron3-nano", "qwen3-30b-a3b", "qwen3-8b", "qwen3.5-35b-a3b", "qwen3.8-27b"),
    *("tiny", "tiny-gemma3", "tiny-hybrid", "tiny-mla", "tiny-moe"),
)
EXPERTS = (
    *("deepseek-v2-lite", "gemma4-26b-a4b", "glm4.7-flash", "gpt-oss-20b", "nemotron3-nano", "qwen3-30b-a3b"),
    *("qwen3.5-35b-a3b", "tiny-mla", "tiny-moe"),
)
DENSE = tuple(name for name in SHAPES if name not in EXPERTS)
DEFAULT_SHAPE = "default: tiny on a CPU, llama3-8b elsewhere"  # words of the help
DRAFTERS = ("dflash", "dflash2", "dspark", "eagle3", "gemma4_assistant", "peagle")
GROWN_DTYPES = ("float32", "bfloat16")  # float16 has too few exponents for the padded vocabulary's mask
SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
KINDS = tuple(kind for kind in QUANTIZE if kind != "mxfp4")  # for heads and products, which have no experts


def option(*flags: str, help: str, **settings: Any) -> Option:
    """Return a command-line option; its help states a default of None, and the parser adds any other."""
    return flags, settings | {"help": help}


def file_option(flag: str, text: str) -> Option:
    return option(flag, type=Path, metavar="FILE", help=text)


def with_message(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser of an option's value that keeps error messages; argparse hides those of ValueErrors."""

    def parse_value(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_value


def ints(text: str, least: int = 0) -> list[int]:
    """Parse whole numbers of at least ``least`` that commas join."""
    numbers = [int(part) for part in text.split(",")]
    if min(numbers) < least:
        raise argparse.ArgumentTypeError(f"expected at least {least}, got {min(numbers)}")
    return numbers


def counts(text: str) -> list[int]:
    """Parse whole numbers of at least 1 that commas join."""
    return ints(text, least=1)


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    (number,) = counts(text)
    return number


def or_none(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """Return a parser that reads "none" as None, and keeps error messages."""
    return with_message(lambda text: None if text == "none" else parse(text))


def tree_name(tree: Tree | None) -> str:
    """Return a draft tree as the text that `Tree.parse` reads, or "none"."""
    return str(tree).lower()


_tree = with_message(Tree.parse)
TREES = partial(option, "--tree", type=or_none(Tree.parse), nargs="+", metavar="TREE", help=f"none, {TREE_FORMS}")
PUBLIC_SETS, SAMPLE = ("mt-bench", "gsm8k", "humaneval"), "sample"
PROMPT_FIELDS = "turns (a list of texts, of which the first is taken), prompt (a text) or question (a text)"
PROMPTS = f"{', '.join(PUBLIC_SETS)}, {SAMPLE}: of this package, or a file of JSON lines with {PROMPT_FIELDS}"
DRAFT = "head, draft model, ngram or suffix; dflash: the embedded DFlash head; default: the embedded EAGLE-3 head"
PAIR = (
    option("--target", metavar="PATH", help='folder, hub id or "demo"; default: the embedded one'),
    option("--tokenizer", help='"bytes" for byte-level models; default: the folder\'s own'),
    option("--dtype", help="dtype of the weights; default: float32 on CPU, bfloat16 elsewhere"),
    option("--draft", "--head", metavar="PATH", help=DRAFT),
)
STATIC = "static:0,1,2,0.0,0.1,1.0,0.0.0,0.0.1,0.1.0,0.0.0.0,0.0.0.1"
MEASURED = tuple(Tree.parse(text) for text in ("chain:4", STATIC, "topk:16,4,4"))
TEMPERATURES = (0.0, 0.5, 1.0)
TOKENS = 64  # tokens of each completion
SAMPLES = 4  # completions a prompt at temperatures above 0

ACCEPTANCE = (
    option("--accept", nargs="+", choices=ACCEPT_RULES, default=ACCEPT_RULES, metavar="RULE", help="accept rules"),
    option("--tree", type=_tree, nargs="+", default=MEASURED, metavar="TREE", help=TREE_FORMS),
    option("--temperature", type=float, nargs="+", default=TEMPERATURES, help="temperatures, 0: greedy"),
    option("--tokens", type=count, default=TOKENS, help="tokens of each completion"),
    option("--samples", type=count, default=SAMPLES, help="completions a prompt at temperatures above 0"),
    option("--draft-quantize", choices=KINDS, help="quantise the head's weights; default: no"),
    option("--context", type=count, nargs="+", metavar="256", help="tokens of the prompts; default: about 30"),
    option(
        "--draft-window", type=or_none(count), nargs="+", default=(None,), metavar="W", help="tokens; default: none"
    ),
    file_option("--text", "with --context: text that is continued; default: Python source"),
    *LOOKUP,
)


def _shape(text: str) -> str:
    name, _, layers = text.partition(":")
    if name not in SHAPES or (layers and not layers.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(SHAPES)}, or NAME:LAYERS, got {text}")
    return text


SHAPE_FORM: dict[str, Any] = dict(type=_shape, metavar="NAME")
SHAPE_HELP = f"model sizes: {', '.join(SHAPES)}; NAME:16 has 16 layers alone"
IMPLEMENTATION = option("--implementation", choices=IMPLEMENTATIONS, default="auto", help="of the kernels")
POINT_OPTIONS = (
    option("--context", type=counts, default=[1024], metavar="1024", help="committed tokens of a row or sequence"),
    option("--page-size", type=counts, default=[16], metavar="16", help="tokens of a cache page"),
)
STEP = (
    option("--shape", **SHAPE_FORM, nargs="+", help=f"{SHAPE_HELP}; {DEFAULT_SHAPE}"),
    option("--batch", type=counts, default=[1], metavar="1,8,32", help="rows of the batch"),
    TREES(default=[None, Tree.chain(4)]),
    option("--dtype", default="bfloat16", help="dtype of the weights"),
    option("--quantize", choices=QUANTIZE, help="quantise target and head, or by mxfp4 experts alone; default: no"),
    option("--draft-quantize", choices=KINDS, help="quantise the head alone; default: as --quantize"),
    option("--kv-dtype", choices=KV_DTYPES, help="dtype of both caches; default: the weights' dtype"),
    IMPLEMENTATION,
    *POINT_OPTIONS,
    option("--idle", type=ints, default=[0], metavar="0,7", help="rows of the batch without a request"),
    option("--depth", type=int, help="depth at which steps cut their trees, 0: draft nothing; default: the tree's"),
    option("--nodes", type=int, help="draft nodes that steps verify per row, on average; default: all"),
    option("--drafter", choices=DRAFTERS, default="eagle3", help="kind of the head"),
    option("--deterministic", action="store_true", help="steps whose tokens are the same in every program"),
    option("--tensor-parallel", type=int, default=1, metavar="N", help="devices over which weights are divided"),
    option("--adapters", type=ints, default=[0], metavar="0,8", help="LoRA adapters of rank 16, for rows in turn"),
    option("--sampled", action="store_true", help="temperature 1 instead of greedy"),
    option("--profile", type=Path, metavar="DIR", help="trace steps of each table row into DIR/ROW; default: no trace"),
)

AUTO = "auto"
NUM_PROMPTS = 500
_floats = with_message(lambda text: [float(part) for part in text.split(",")])
_texts = with_message(lambda text: text.split(","))
_depth = or_none(lambda word: word if word == AUTO else int(word))
SERVE = (
    option("--prompts", metavar="SET", help=f"{PROMPTS}; their answers end as usual; default: random tokens"),
    option("--num-prompts", type=count, help=f"number of requests; default: all of --prompts, {NUM_PROMPTS} otherwise"),
    option("--chat", action="store_true", help="lay --prompts out by the tokenizer's chat template"),
    file_option("--text", "prompts are parts of it; default: random tokens"),
    option("--rate", type=float, default=math.inf, help="requests a second, Poisson, inf: all at once"),
    option("--input-len", type=count, default=1024, help="tokens of a prompt at most"),
    option("--output-len", type=count, default=1024, help="tokens of an answer at most"),
    option("--range-ratio", type=float, default=0.7, help="lengths are uniform from int(ratio * len) to len"),
    option("--max-concurrency", type=count, nargs="+", default=(None,), help="most in the engine; default: all"),
    option("--depth", type=_depth, nargs="+", default=(None,), help=f"drafted depth or {AUTO}; default: the tree's"),
    option("--overlap", nargs="+", choices=("yes", "no"), default=("yes",), help="dispatch before reading results"),
    option("--repeats", type=count, default=1, help="times that the load is served, all configurations in turns"),
    option("--temperature", type=float, default=0.0, help="temperature of sampling, 0: greedy"),
    option("--seed", type=int, default=0, help="seed of lengths, prompts and arrivals"),
    TREES(default=(None, Tree.chain(1), Tree.topk(16, 4, 4))),
    option("--shape", **SHAPE_FORM, help=f"random weights of this shape; {SHAPE_HELP}; default: none"),
    option("--slots", type=count, default=32, help="requests that run at once"),
    option("--page-size", type=count, default=16, help="tokens of a cache page"),
    option("--prefill-budget", type=count, help="prompt tokens between two steps; default: the engine's"),
)

DEMO_REPORT = dict(prompts=[SAMPLE], batch=[1, 8], tokens=64, tree=Tree.chain(3))  # a minute or two on a CPU
REPORT_DEFAULTS = dict(prompts=[*PUBLIC_SETS], batch=[1, 8, 32, 64], tokens=256, tree=DEFAULT_TREE)
REPORT = (
    option("--out", type=Path, default="report", metavar="DIR", help="folder for figures, table and picture"),
    option("--against", type=Path, metavar="DIR", help="folder of an earlier report to compare with; default: none"),
    option("--prompts", type=_texts, metavar="SET,...", help=f"{PROMPTS}; default: the first three, demo: {SAMPLE}"),
    option("--num-prompts", type=count, help="number of prompts of each set; default: all"),
    option("--chat", choices=("yes", "no"), help="use the chat template; default: yes if the tokenizer has one"),
    option("--batch", type=counts, metavar="1,8", help="requests that run at once; default: 1,8,32,64, demo: 1,8"),
    option("--temperature", type=_floats, default="0,1", metavar="0,1", help="temperatures, 0: greedy"),
    option("--tokens", type=count, help="tokens of an answer at most; default: 256, demo: 64"),
    option("--repeats", type=count, default=1, help="times that each load is served, both engines in turns"),
    option("--seed", type=int, default=0, help="seed of the first request of each set"),
    option("--tree", type=_tree, metavar="TREE", help=f"{TREE_FORMS}; default: {DEFAULT_TREE}, demo: chain:3"),
    option("--accept", choices=ACCEPT_RULES, default=ACCEPT_RULES[0], help="accept rule"),
    option("--deterministic", action="store_true", help="engines whose tokens are the same in every program"),
    option("--draft-quantize", choices=KINDS, help="quantise the head's weights; default: no"),
    option("--draft-window", type=count, metavar="W", help="newest tokens that the drafter sees; default: all"),
    *LOOKUP,
)
INFLATE = (
    option("target", help='folder or hub id of a small model; "demo": the embedded pair\'s target'),
    option("out", type=Path, help="folder to write"),
    option("--head", help='folder or hub id of its EAGLE-3 head; "demo": the embedded one; default: none'),
    option("--head-out", type=Path, metavar="DIR", help="folder to write the head to; default: none"),
    option("--shape", choices=DENSE, help="names all sizes; default: the small model's"),
    *(
        option(
            f"--{name.replace('_', '-')}", type=count, metavar="N", help="size to write; default: --shape's or its own"
        )
        for name in (*SIZES, "draft_vocab_size")
    ),
    option("--dtype", choices=GROWN_DTYPES, default="bfloat16", help="dtype of the written weights"),
    option("--overwrite", action="store_true", help="replace existing converted folders"),
)

JSON = file_option("--json", "JSON file for the results; default: none")
OPTIONS = {  # by command
    "step": (*STEP, JSON),
    "acceptance": (*ACCEPTANCE, *PAIR, JSON),
    "report": (*REPORT, *PAIR),
    "serve": (*SERVE, *PAIR, JSON),
    "inflate": (*INFLATE, JSON),
}
