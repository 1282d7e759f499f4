"""`jspec bench`: the command line of what runs whole engines on prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jspec.core.tree import TREE_FORMS, Tree
from jspec.engine.sampling_params import SamplingParams
from jspec.tools import demo
from jspec.tools.bench import batching, gsm8k, host, offline, prompts, report, serve_sim
from jspec.tools.bench.load import Load
from jspec.tools.bench.pair import Pair

SLOTS = 32
LENGTH = 5  # of the chain that `offline` drafts


def add_arguments(commands: Any) -> None:
    """Declare the subcommands."""
    _serve_arguments(commands.add_parser("serve-sim", help="latencies and throughput of an engine under a load"))
    _offline_arguments(commands.add_parser("offline", help="acceptance by position over a file of prompts"))
    _eval_arguments(commands.add_parser("eval", help="a task's score, with drafting and without"))
    _host_arguments(commands.add_parser("host", help="the host's own time in a round, by context"))
    _batching_arguments(commands.add_parser("batching", help="requests one by one, at once, and without overlap"))


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    own = Load()
    _pair_arguments(parser)
    parser.add_argument("--rate", type=float, default=own.rate, help="requests a second, Poisson; inf: all at once")
    parser.add_argument("--num-prompts", type=int, default=own.num_prompts)
    parser.add_argument("--input-len", type=int, default=own.input_len, help="tokens of a prompt at most")
    parser.add_argument("--output-len", type=int, default=own.output_len, help="tokens of an answer at most")
    parser.add_argument(
        "--range-ratio",
        type=float,
        default=own.range_ratio,
        help="lengths are uniform over the whole numbers from int(ratio * len), at least 1, to len",
    )
    parser.add_argument("--max-concurrency", type=int, help="requests in the engine at most; others wait outside")
    parser.add_argument("--text", type=Path, metavar="FILE", help="prompts are cuts of it; random tokens if left out")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=own.seed, help="of lengths, prompts and arrivals")
    parser.add_argument(
        "--tree",
        type=_tree,
        nargs="+",
        default=serve_sim.TREES,
        metavar="TREE",
        help=f"each in turn: none, {TREE_FORMS}",
    )
    _engine_arguments(parser)
    parser.set_defaults(run=_serve)


def _offline_arguments(parser: argparse.ArgumentParser) -> None:
    _pair_arguments(parser)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help=f"JSON lines with {prompts.FIELDS}")
    parser.add_argument("--num-prompts", type=int, default=80)
    drafted = parser.add_mutually_exclusive_group()
    drafted.add_argument("--draft-tokens", type=int, default=LENGTH, help="of a chain")
    drafted.add_argument("--tree", type=Tree.parse, help=f"instead of a chain: {TREE_FORMS}")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", action="store_true", help="lay prompts out by the tokenizer's chat template")
    _engine_arguments(parser)
    parser.set_defaults(run=_offline)


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["gsm8k"])
    _pair_arguments(parser)
    parser.add_argument("--file", type=Path, required=True, help="JSON lines with question and answer")
    parser.add_argument("--shots", type=int, default=5, help="of the file's first questions, with answers, before each")
    parser.add_argument("--num-questions", type=int, help="behind these; all if left out")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--tree", type=Tree.parse, default=Tree.chain(4), help=TREE_FORMS)
    _engine_arguments(parser)
    parser.set_defaults(run=_eval)


def _host_arguments(parser: argparse.ArgumentParser) -> None:
    own = host.Case()
    parser.add_argument("--rows", type=int, default=own.rows, help="requests that decode at once")
    parser.add_argument("--context", type=int, nargs="+", default=own.contexts, help="tokens before them")
    parser.add_argument("--rounds", type=int, default=own.rounds, help="of a block")
    parser.add_argument("--blocks", type=int, default=own.blocks, help="of each context, in turns")
    _json_argument(parser)
    parser.set_defaults(run=_host)


def _batching_arguments(parser: argparse.ArgumentParser) -> None:
    _pair_arguments(parser)
    parser.add_argument("--requests", type=int, default=64, help="and slots")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tree", type=_tree, default=Tree.chain(3), help=f"none, {TREE_FORMS}")
    _json_argument(parser)
    parser.set_defaults(run=_batching)


def _pair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=demo.TARGET, metavar="PATH", help="folder or hub id; the embedded one")
    parser.add_argument(
        "--draft",
        metavar="PATH",
        help="an EAGLE head, Medusa heads, a draft model, or ngram, or suffix; the embedded target has its own",
    )
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models; else the folder\'s own')
    parser.add_argument("--dtype", help="of the weights; float32 on CPU, bfloat16 elsewhere")


def _engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=SLOTS, help="requests that run at once")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prefill-budget", type=int, help="tokens of prompts between two rounds")
    _json_argument(parser)


def _json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")


def _tree(text: str) -> Tree | None:
    return None if text == "none" else Tree.parse(text)


def _pair(arguments: argparse.Namespace) -> Pair:
    return Pair.load(arguments.target, arguments.draft, tokenizer=arguments.tokenizer, dtype=arguments.dtype)


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the engine."""
    return {name: getattr(arguments, name) for name in ("slots", "page_size", "prefill_budget")}


def _serve(arguments: argparse.Namespace) -> int:
    names = ("num_prompts", "input_len", "output_len", "range_ratio", "rate", "max_concurrency", "seed")
    load = Load(**{name: getattr(arguments, name) for name in names})
    pair = _pair(arguments)
    text = None if arguments.text is None else pair.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
    options = _options(arguments) | {"max_len": load.input_len + load.output_len}
    results = serve_sim.run(pair, load, arguments.tree, text=text, temperature=arguments.temperature, **options)
    print(f"{load}; {report.environment()}")
    print(serve_sim.text(results))
    if arguments.json:
        serve_sim.write_json(arguments.json, load, results)
    return 0


def _offline(arguments: argparse.Namespace) -> int:
    texts = prompts.read(arguments.prompts, arguments.num_prompts)
    tree = Tree.chain(arguments.draft_tokens) if arguments.tree is None else arguments.tree
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed)
    pair = _pair(arguments)
    result = offline.run(pair, offline.tokens_of(pair, texts, chat=arguments.chat), tree, params, **_options(arguments))
    print(report.environment())
    print(offline.text(result))
    if arguments.json:
        offline.write_json(arguments.json, result)
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    """1 where texts differ that must not."""
    if arguments.shots < 0 or (arguments.num_questions is not None and arguments.num_questions < 1):
        raise ValueError("eval: expected --shots of at least 0 and --num-questions of at least 1")
    sums = gsm8k.read(arguments.file)
    if arguments.num_questions is not None:
        wanted = arguments.shots + arguments.num_questions
        if wanted > len(sums):
            raise ValueError(f"{arguments.file}: expected {wanted} questions, examples included, got {len(sums)}")
        sums = sums[:wanted]
    pair = _pair(arguments)
    result = gsm8k.run(
        pair, sums, arguments.tree, shots=arguments.shots, max_tokens=arguments.max_tokens, **_options(arguments)
    )
    print(report.environment())
    print(gsm8k.text(result))
    if arguments.json:
        gsm8k.write_json(arguments.json, result)
    return int(result.differing > 0 and pair.target.embed.dtype == jnp.float32)


def _host(arguments: argparse.Namespace) -> int:
    case = host.Case(
        rows=arguments.rows, contexts=tuple(arguments.context), rounds=arguments.rounds, blocks=arguments.blocks
    )
    results = host.measure(case)
    print(f"milliseconds of the host's thread over programs that answer at once; {report.environment()}")
    print(host.text(case, results))
    if arguments.json:
        host.write_json(arguments.json, case, results)
    return 0


def _batching(arguments: argparse.Namespace) -> int:
    ways, gain = batching.measure(
        _pair(arguments),
        arguments.tree,
        requests=arguments.requests,
        tokens=arguments.tokens,
        repeats=arguments.repeats,
    )
    tree = str(arguments.tree).lower()
    print(f"{arguments.requests} requests of {arguments.tokens} tokens, tree {tree}; {report.environment()}")
    print(batching.text(ways, gain))
    if arguments.json:
        batching.write_json(arguments.json, ways, gain)
    return 0
