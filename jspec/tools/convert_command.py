"""Declares the options of `jspec convert`, without importing what converts (`jspec.tools.convert`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from convert.huggingface import FLOATS

STORED = ("int8", "fp8", "int4")  # for all weights; those of "fp8_dynamic" are fp8, and "mxfp4" is of experts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec convert` on a parser."""
    parser.add_argument("src", type=Path, help="folder with config.json and safetensors or torch weights")
    parser.add_argument("dst", type=Path, help="folder to write")
    parser.add_argument("--dtype", choices=FLOATS, help="of the weights; default: as in the file")
    parser.add_argument("--quantize", choices=STORED, help="quantise the linear weights")
    parser.add_argument("--overwrite", action="store_true", help="replace a converted folder at DST")
    parser.add_argument("--verbose", action="store_true", help="list the tensors and the parameters they make")
    overrides = parser.add_argument_group("values that replace those of the source's config.json")
    overrides.add_argument("--rope-theta", type=float, help="rotary base")
    overrides.add_argument("--feature-layers", type=_ids, metavar="2,16,29", help="target state indices, for a head")
    either = argparse.BooleanOptionalAction
    overrides.add_argument("--norm-before-residual", action=either, help="a head's first residual is normed")
    overrides.add_argument("--norm-output", action=either, help="a head's normed output is fed back (EAGLE-3.1)")
    overrides.add_argument("--mask-token-id", type=int, help="id that stands for tokens not drafted yet (P-EAGLE)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run `jspec convert`; return the exit status."""
    from jspec.tools import convert  # here, because it takes time

    return convert.run(arguments)


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ids separated by commas, such as 2,16,29, got {text!r}") from None
