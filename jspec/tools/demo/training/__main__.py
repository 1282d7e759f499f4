"""Trains and measures the target of the embedded pair.

The one of this package was made of the archive of CPython 3.11.2's sources and an installed Python 3.12:

    python -m jspec.tools.demo.training --prepare data --text cpython/Lib cpython/Doc cpython/Tools
    python -m jspec.tools.demo.training --data data --out target --minutes 4
    python -m jspec.tools.demo.training --data data --evaluate target
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
        if data is None:
            raise ValueError("--data: expected a folder that --prepare wrote, got none")
        if options.prepare is not None:
            prepare.prepare(options.text, options.prepare, options.vocab, options.prompts)
        if options.out is not None:
            _train(options, data)
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
    weights = fit.fit(data, shape, recipe, minutes=options.minutes, updates=options.updates)
    model.write(weights, shape, options.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
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
