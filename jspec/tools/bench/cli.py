"""`jspec bench`: the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from jspec.core.config import ACCEPT_RULES, KV_DTYPES
from jspec.core.tree import TREE_FORMS, Tree
from jspec.tools import check_head, demo
from jspec.tools.bench import (
    acceptance,
    accuracy,
    adaptive,
    cold_start,
    compare,
    context,
    controls,
    inflate,
    kernels,
    launches,
    overlap,
    picture,
    report,
    rounds,
    serving,
    shapes,
    synthetic,
    throughput,
)
from jspec.tools.bench.numbers import floats, ints
from pallas_kernels.layers.quantized import KINDS

SHAPE, DTYPE = "llama3-8b", "bfloat16"


def _tree(text: str) -> Tree | None:
    return None if text == "none" else Tree.parse(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="bench", required=True)
    _step_arguments(
        commands.add_parser("step", help="time of one round over batch, draft length and context, beside its floor")
    )
    _throughput_arguments(
        commands.add_parser("throughput", help="tokens/s of random weights at a stated, synthetic acceptance")
    )
    _compare_arguments(commands.add_parser("compare", help="a rival's rounds beside ours, and the best draft of each"))
    _accuracy_arguments(commands.add_parser("accuracy", help="next-token laws of a quantised target beside its own"))
    _acceptance_arguments(
        commands.add_parser("acceptance", help="acceptance of the embedded pair by accept rule, temperature and tree")
    )
    context.add_arguments(commands.add_parser("context", help="acceptance by context length and draft window"))
    controls.add_arguments(commands.add_parser("controls", help="what sampling and its controls cost a round"))
    _cold_start_arguments(
        commands.add_parser("cold-start", help="seconds from a process to engines that serve, without and with a cache")
    )
    _overlap_arguments(commands.add_parser("overlap", help="share of time for which the device waits for the host"))
    adaptive.add_arguments(commands.add_parser("adaptive", help="tokens/s of plain, fixed and adaptive drafting"))
    kernels.add_attention_arguments(
        commands.add_parser("attention", help="attention by itself, beside what memory and arithmetic allow")
    )
    kernels.add_gemm_arguments(commands.add_parser("gemm", help="a decoder's products by themselves, likewise"))
    inflate.add_arguments(commands.add_parser("inflate", help="a small model in a larger shape that computes the same"))
    serving.add_arguments(commands)


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    parser.add_argument("--context", type=ints, default=[1024], metavar="1024")
    parser.add_argument("--page-size", type=ints, default=[16], metavar="16")
    parser.add_argument("--idle", type=ints, default=[0], metavar="0,7", help="rows of the batch without a request")
    parser.add_argument("--depth", type=int, help="at which rounds cut their trees; 0 drafts nothing")
    parser.add_argument("--deterministic", action="store_true", help="rounds whose tokens are alike in every program")
    parser.add_argument("--sampled", action="store_true", help="temperature 1 instead of greedy")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="trace rounds of each case into DIR/CASE")
    _output_arguments(parser)
    parser.set_defaults(run=_step)


def _throughput_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    parser.add_argument("--context", type=int, default=1024, help="where the rows start")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=throughput.TOKENS, help="that each row emits")
    stated = parser.add_mutually_exclusive_group()
    stated.add_argument("--length", type=float, help="mean acceptance length, for every tree but none")
    _positions_argument(stated)
    parser.add_argument("--seed", type=int, default=0, help="of the lots that accept")
    _output_arguments(parser)
    parser.set_defaults(run=_throughput)


def _overlap_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompts")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--no-overlap", action="store_true", help="read every result before the next dispatch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.set_defaults(run=_overlap)


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rival", type=Path, help=f"lines of JSON with {', '.join(compare.RIVAL_FIELDS)}")
    parser.add_argument("--ours", type=Path, help="of `bench step --json`; left out: the rival's points are measured")
    parser.add_argument("--shape", choices=sorted(shapes.TARGETS), help=f"to measure; {SHAPE} if left out")
    parser.add_argument("--dtype", help=f"to measure; {DTYPE} if left out")
    _positions_argument(parser)
    _output_arguments(parser)
    parser.set_defaults(run=_compare)


def _accuracy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=demo.TARGET, metavar="PATH", help="folder or hub id; the embedded one")
    parser.add_argument("--text", type=Path, metavar="FILE", help="an English and Python text if left out")
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models; else the folder\'s own')
    parser.add_argument("--dtype", help="of the weights that are not quantised; float32 on CPU, bfloat16 elsewhere")
    parser.add_argument("--quantize", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--size", type=int, default=128, help="tokens of a cut of the text")
    parser.set_defaults(run=_accuracy)


def _acceptance_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--accept", nargs="+", choices=ACCEPT_RULES, default=ACCEPT_RULES, metavar="RULE")
    parser.add_argument("--tree", type=Tree.parse, nargs="+", default=acceptance.TREES, metavar="TREE", help=TREE_FORMS)
    parser.add_argument("--temperature", type=float, nargs="+", default=acceptance.TEMPERATURES)
    parser.add_argument("--tokens", type=int, default=acceptance.TOKENS, help="tokens of each completion")
    parser.add_argument("--samples", type=int, default=acceptance.SAMPLES, help="completions a prompt, if sampled")
    parser.add_argument("--draft-quantize", choices=KINDS, help="of the head's weights; float32 if left out")
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.set_defaults(run=_acceptance)


def _cold_start_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
    rows, prefill = (",".join(map(str, sizes)) for sizes in (cold_start.ROWS, cold_start.PREFILL))
    parser.set_defaults(batch=list(cold_start.ROWS))
    parser.add_argument("--prefill", type=ints, default=list(cold_start.PREFILL), metavar=prefill, help="tokens")
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--cache", type=Path, metavar="DIR", help="new or empty; keeps what was compiled")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.epilog = f"--batch, {rows} here, are the rows of the compiled rounds; each tree is an engine of its own"
    parser.set_defaults(run=_cold_start)


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    """What a round of random weights is compiled for."""
    parser.add_argument("--shape", choices=sorted(shapes.TARGETS), default=SHAPE)
    parser.add_argument("--batch", type=ints, default=[1], metavar="1,8,32")
    trees = [None, Tree.chain(4)]
    parser.add_argument("--tree", type=_tree, nargs="+", default=trees, metavar="TREE", help=f"none, {TREE_FORMS}")
    parser.add_argument("--dtype", default=DTYPE)
    parser.add_argument("--quantize", choices=KINDS, help="the weights of target and head")
    parser.add_argument("--draft-quantize", choices=KINDS, help="of the head alone; as --quantize if left out")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="of both caches; the weights' dtype if left out")
    parser.add_argument("--implementation", default="auto")


def _positions_argument(parser: Any) -> None:
    parser.add_argument(
        "--positions",
        type=floats,
        default=synthetic.RATES,
        metavar=",".join(f"{rate:g}" for rate in synthetic.RATES),
        help="stated share of rounds that accept each position; what EAGLE-3 is known for, if left out",
    )


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw them there; needs matplotlib")


def _case(arguments: argparse.Namespace, batch: int, tree: Tree | None, **more: Any) -> rounds.Case:
    names = ("shape", "dtype", "implementation", "quantize", "draft_quantize", "kv_dtype")
    return rounds.Case(batch=batch, tree=tree, **{name: getattr(arguments, name) for name in names}, **more)


def _step(arguments: argparse.Namespace) -> int:
    grid = product(arguments.page_size, arguments.context, arguments.batch, arguments.tree, arguments.idle)
    common = {
        "greedy": not arguments.sampled,
        "depth": arguments.depth,
        "deterministic": arguments.deterministic,
    }
    cases = [
        _case(arguments, batch, tree, context=context, page_size=page, idle=idle, **common)
        for page, context, batch, tree, idle in grid
    ]
    _check_picture(arguments)
    results = _measure(cases, arguments.profile)
    print(f"one round, drafted by an EAGLE-3 head, random weights, acceptance about 0; {report.environment()}")
    print(report.timings(results))
    if arguments.profile:
        for folder in (arguments.profile / case.name for case in cases):
            print(f"trace: {folder}\n{launches.text(launches.by_name(launches.events(folder), rounds.GROUP))}")
    if arguments.json:
        report.write_json(arguments.json, results)
    if arguments.picture:
        picture.save(picture.step(results), arguments.picture)
    return 0


def _measure(cases: list[rounds.Case], profile: Path | None = None) -> list[rounds.Timing]:
    """Cases of one shape, dtype and quantisation, one after the other."""
    target, head = _models(cases)
    return [rounds.measure(case, target, head, profile=profile and profile / case.name) for case in cases]


def _models(cases: Iterable[rounds.Case]) -> Any:
    """Target and, where a case drafts, head of the cases' one shape, dtype and quantisation."""
    models = {(case.shape, case.dtype, case.quantize, case.draft_quantize or case.quantize) for case in cases}
    (shape, dtype, quantize, draft_quantize), *others = models
    assert not others, "one shape, dtype and quantisation a run"
    head = shapes.random_head(shape, dtype, draft_quantize) if any(case.tree for case in cases) else None
    return shapes.random_target(shape, dtype, quantize), head


def _throughput(arguments: argparse.Namespace) -> int:
    cases = [
        throughput.Case(
            _case(arguments, batch, tree, context=arguments.context, page_size=arguments.page_size),
            _rates(arguments, tree),
            arguments.tokens,
            arguments.seed,
        )
        for batch, tree in product(arguments.batch, arguments.tree)
    ]
    _check_picture(arguments)
    target, head = _models([case.point for case in cases])
    results = [throughput.measure(case, target, head) for case in cases]
    print(f"rounds drafted by an EAGLE-3 head, random weights; {report.environment()}")
    print(throughput.text(results))
    if arguments.json:
        throughput.write_json(arguments.json, results)
    if arguments.picture:
        picture.save(picture.tokens(results), arguments.picture)
    return 0


def _overlap(arguments: argparse.Namespace) -> int:
    cases = [
        _case(arguments, batch, tree, context=arguments.context, page_size=arguments.page_size)
        for batch, tree in product(arguments.batch, arguments.tree)
    ]
    target, head = _models(cases)
    results = [overlap.measure(case, target, head, overlap=not arguments.no_overlap) for case in cases]
    print(f"rounds drafted by an EAGLE-3 head, random weights, acceptance about 0; {report.environment()}")
    print(overlap.text(results))
    if arguments.json:
        overlap.write_json(arguments.json, results)
    return 0


def _rates(arguments: argparse.Namespace, tree: Tree | None) -> synthetic.Rates:
    if tree is not None and arguments.length is not None:
        return synthetic.rates_of_length(arguments.length, tree)
    return synthetic.rates_of_tree(synthetic.check_rates(arguments.positions), tree)


def _compare(arguments: argparse.Namespace) -> int:
    rates, rival = synthetic.check_rates(arguments.positions), compare.read_rival(arguments.rival)
    _check_picture(arguments)
    environment, results = _own(arguments, rival)
    ours = compare.own_points(results, str(arguments.ours or "measured"))
    found = compare.rows(rival, ours, rates)
    settings = {name: results[0]["case"].get(name) for name in compare.SETTINGS}
    own = {**environment, **settings}
    print(f"rival: {arguments.rival}; ours: {own}")
    print(compare.text(found, rates))
    if arguments.json:
        compare.write_json(arguments.json, found, rates, {"rival": str(arguments.rival), "ours": own})
    if arguments.picture:
        words = [str(own[name]) for name in ("shape", "dtype", "device") if name in own]
        title = f"rival: {arguments.rival.name}; ours: {', '.join(words)}"
        picture.save(picture.compare(found, title), arguments.picture)
    return 0


def _own(arguments: argparse.Namespace, rival: Iterable[compare.Point]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Environment and results of our side, read or measured."""
    if arguments.ours is not None:
        if arguments.shape or arguments.dtype:
            raise ValueError("compare: expected --shape and --dtype only without --ours, whose file says its own")
        return compare.read_own(arguments.ours)
    shape, dtype = arguments.shape or SHAPE, arguments.dtype or DTYPE
    cases = [rounds.Case(shape, p.batch, p.context, _tree(p.draft), dtype=dtype) for p in rival if p.measurable]
    if not cases:
        raise ValueError(f"{arguments.rival}: expected a point that can be measured: no quantization, none or eagle3")
    return report.environment(), [report.fields(timing) for timing in _measure(cases)]


def _cold_start(arguments: argparse.Namespace) -> int:
    names = ("shape", "dtype", "implementation", "quantize", "draft_quantize", "kv_dtype", "max_len", "page_size")
    case = cold_start.Case(
        trees=tuple(str(tree).lower() for tree in arguments.tree),
        rows=tuple(arguments.batch),
        prefill=tuple(arguments.prefill),
        **{name: getattr(arguments, name) for name in names},
    )
    starts = cold_start.measure(case, arguments.cache)
    # Only now: it takes the device.
    print(f"random weights of {case.shape}, made on the device; {report.environment()}")
    print(cold_start.text(*starts))
    if arguments.json:
        cold_start.write_json(arguments.json, case, starts)
    return 0


def _check_picture(arguments: argparse.Namespace) -> None:
    if arguments.picture is not None:
        picture.check_path(arguments.picture)


def _accuracy(arguments: argparse.Namespace) -> int:
    tokenizer = arguments.tokenizer or ("bytes" if arguments.target == demo.TARGET else None)
    target, words = check_head.load_target(arguments.target, tokenizer, dtype=arguments.dtype)
    source = check_head.TEXT if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    cuts = check_head.windows(source, words, arguments.size)
    print(f"next-token laws over {len(cuts)} cuts of a text; {report.environment()}")
    print(accuracy.text(accuracy.measure(target, cuts, arguments.quantize)))
    return 0


def _acceptance(arguments: argparse.Namespace) -> int:
    results = []
    for case in acceptance.cases(arguments.accept, arguments.tree, arguments.draft_quantize):
        results += acceptance.measure(case, arguments.temperature, tokens=arguments.tokens, samples=arguments.samples)
    print(f"tokens a round ± standard error, share of drafted tokens emitted; {report.environment()}")
    print(acceptance.text(results))
    if arguments.json:
        acceptance.write_json(arguments.json, results)
    return 0
