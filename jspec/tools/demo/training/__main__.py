"""Trains and measures the target of the embedded pair.

The pair of this package was made of the sources of CPython 3.11.2 and of the libraries of four other versions:

    python -m jspec.tools.demo.training --prepare data --prompts 80000 \\
        --text cpython/Lib cpython/Doc cpython/Tools python3.12.1 python3.8.18 python3.13.0 python3.6.15
    python -m jspec.tools.demo.training --data data --out base --minutes 2.5 --attention cudnn
    python -m jspec.tools.demo.training --data data --cut cut.jsonl
    tune="--rows 24 --rate 3e-3 --warmup 20 --attention cudnn"
    python -m jspec.tools.demo.training --data data --out tuned0 --init base --own cut.jsonl --updates 250 $tune
    own=
    for round in 1 2 3 4; do  # with the functions that the target wrote in this round and in the one before
        before=tuned$((round - 1)) last=$own own=own$round.jsonl
        python -m jspec.tools.demo.training --data data --seed $round --functions $before $own
        python -m jspec.tools.demo.training --data data --seed $round --out tuned$round --init $before \\
            --own cut.jsonl $last $own --updates 200 $tune
    done
    python -m jspec.tools.demo.training --sharpen tuned4 target 1.5
    python -m jspec.tools.demo.training --data data --evaluate target
    python -m jspec.tools.demo.training --data data --answers target answers.jsonl
    jspec train --target target --data answers.jsonl --out head --length 512 --batch 32 --ttt 5 --steps 4500 \\
        --layers 2 --intermediate-size 832 --eagle31 --copy-layers --feature-layers 3 5 7 --loss lk \\
        --optimizer muon --learning-rate 8e-3 --warmup 0.04 --eval-every 250
    jspec train --target target --data answers.jsonl --out dflash_head --length 512 --batch 32 --ttt 7 --steps 3000 \\
        --method dflash --layers 2 --feature-layers 3 5 6 --learning-rate 1.5e-3 --warmup 0.04 --eval-every 250

How much of that a head from scratch reaches in a quarter of an hour of CPU time: 2.57 tokens a round where the embedded
head has 3.34 (chain of 4, temperature 0). With its texts and the comparison this takes 20 minutes on two cores:

    python -m jspec.tools.demo.training --scratch scratch

A target that only read text repeats itself without end when it is decoded greedily: of 100 functions and classes that
the base writes behind held-out first lines 33 end and parse, and of the tuned target 95.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from jspec.tools.demo.training import fit, model, prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps that the command line names; return 0, or 2 after a wrong option, which is printed."""
    options = _parser().parse_args(argv)
    data = options.prepare or options.data
    try:
        if options.sharpen is not None:
            folder, out, factor = options.sharpen
            model.sharpen(Path(folder), Path(out), float(factor))
            return 0
        if options.scratch is not None:
            from jspec.tools.demo.training.scratch import train_from_scratch

            train_from_scratch(options.scratch)
            return 0
        if data is None:
            raise ValueError("--data: expected a folder that --prepare wrote, got none")
        if options.prepare is not None:
            prepare.prepare(options.text, options.prepare, options.vocab, options.prompts)
        if options.cut is not None:
            from jspec.tools.demo.training.functions import cut_functions

            cut_functions(data, options.cut)
        if options.out is not None:
            _train(options, data)
        if options.functions is not None:
            from jspec.tools.demo.training.functions import write_functions

            target, file = options.functions
            write_functions(data, target, file, seed=options.seed)
        if options.answers is not None:
            from jspec.tools.demo.training.answers import answer

            target, file = options.answers
            answer(data / prepare.PROMPTS, target, file, seed=options.seed)
        if options.evaluate is not None:
            from jspec.tools.demo.training.evaluate import evaluate

            evaluate(options.evaluate, data)
    except (ValueError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    return 0


def _train(options: argparse.Namespace, data: Path) -> None:
    """Train a target and write its folder."""
    shape = model.Shape(**{field.name: getattr(options, field.name) for field in fields(model.Shape)})
    recipe = fit.Recipe(**{field.name: getattr(options, field.name) for field in fields(fit.Recipe)})
    init = None if options.init is None else model.read(options.init, shape)
    if options.own is None:
        own = None
    else:
        from jspec.tools.demo.training.functions import read_functions

        own = read_functions(options.own, data)
    weights = fit.fit(data, shape, recipe, minutes=options.minutes, updates=options.updates, init=init, own=own)
    model.write(weights, shape, options.out)
    for name in (prepare.TOKENIZER, "tokenizer_config.json"):
        shutil.copy(data / name, options.out / name)
    print(f"{options.out}: {sum(path.stat().st_size for path in options.out.iterdir())} bytes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m jspec.tools.demo.training", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[Path(sysconfig.get_paths()["stdlib"])],
        help="folders of Python sources and documentation; default: the standard library of this interpreter",
    )
    parser.add_argument("--prepare", type=Path, help="folder to write the tokenizer and the tokens of --text to")
    parser.add_argument("--prompts", type=int, default=0, help="lines of prompts.jsonl to write, to train a head with")
    parser.add_argument("--data", type=Path, help="folder that --prepare wrote")
    parser.add_argument("--out", type=Path, help="folder to write a trained target to")
    parser.add_argument(
        "--answers", type=Path, nargs=2, metavar=("TARGET", "FILE"), help="let a target complete prompts.jsonl"
    )
    parser.add_argument(
        "--functions",
        type=Path,
        nargs=2,
        metavar=("TARGET", "FILE"),
        help="let a target write functions behind first lines of the text",
    )
    parser.add_argument("--cut", type=Path, help="file to write the short functions and classes of the text to")
    parser.add_argument("--init", type=Path, help="folder of a target to begin with")
    parser.add_argument("--own", type=Path, nargs="+", help="files of --cut and --functions to train on too")
    parser.add_argument(
        "--sharpen",
        nargs=3,
        metavar=("TARGET", "OUT", "FACTOR"),
        help="write a target whose logits are larger by a factor",
    )
    parser.add_argument("--scratch", type=Path, help="folder for a head to train on a CPU and to compare")
    parser.add_argument("--evaluate", type=Path, help="folder of a target to measure")
    parser.add_argument("--minutes", type=float, help="time to train for")
    parser.add_argument("--updates", type=int, default=1000, help="updates to train for, without --minutes")
    for kind in (model.Shape, fit.Recipe):
        for field in fields(kind):
            name, value = field.name.replace("_", "-"), field.default
            parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default: {value}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
