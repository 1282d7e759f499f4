"""Converts a Hugging Face folder to an orbax folder: `jspec convert SRC DST` or `python -m convert SRC DST`."""

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from convert import hub, orbax
from convert.huggingface import FLOATS
from convert.plan import Plan
from jspec.draft.auto import plan
from jspec.draft.head_config import Overrides
from jspec.models.load import parameters_of
from jspec.models.weights.quantize import check_scope, check_stored, quantize_parameters
from jspec.tools.parser import Parser
from pallas_kernels.layers.weights import EXPERT_KINDS, KINDS, Kind

STORED = tuple(kind for kind in KINDS if kind in EXPERT_KINDS)  # kinds for all weights; those of "fp8_dynamic" are fp8


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jspec convert`, which converts a Hugging Face folder to an orbax folder.

    Args:
        argv: command-line arguments; None: the arguments of the process.

    Returns:
        The exit status: 0, or 2 after an error, which is printed.
    """
    options = _parser().parse_args(argv)
    start = time.perf_counter()
    try:
        planned, dtype = _convert(options)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        print(f"jspec: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    size = f"{len(planned.rows)} parameters, {dtype}" + (f", {options.quantize}" if options.quantize else "")
    print(f"{options.dst}: {size}, {seconds:.1f} s, peak memory {_peak_memory() / 2**20:.0f} MiB")
    return 0


def _convert(options: argparse.Namespace) -> tuple[Plan, str]:
    """Convert with the options of the command line; return the plan and the dtype of the weights."""
    folder = options.dst.expanduser().absolute()
    orbax.check_vacant(folder, options.overwrite)
    for left in hub.leftovers(folder):
        print(f"note: {left} was left by an interrupted conversion; delete it unless another one is running")
    overrides = Overrides(**{field.name: getattr(options, field.name) for field in fields(Overrides)})
    planned = plan(options.src, overrides)
    dtype = planned.dtype(options.dtype)
    print(f"{planned.folder}: {planned.kind}, {dtype}, {_summary(planned)}")
    if options.verbose:
        _list_tensors(planned)
    with tqdm(total=len(planned.rows), unit=" parameters", disable=None) as bar:
        kinds = _kinds(planned, options.quantize)
        batches = _quantized(planned, dtype, options.quantize, bar)
        save_options = {"files": orbax.companions(planned.folder), "overwrite": options.overwrite}
        orbax.save(folder, planned.kind, planned.config, batches, quantized=kinds, **save_options)
    return planned, dtype


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jspec convert", description=__doc__)
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
    return parser


def _kinds(planned: Plan, kind: str | None) -> dict[str, Kind]:
    """Return the kinds of the weights that a folder stores quantised or that the conversion quantises, by name."""
    check_scope(kind, planned.kind)
    tree = orbax.unflatten(parameters_of(planned), planned.quantized)
    check_stored(tree, kind)
    return orbax.kinds_of(tree if kind is None else jax.eval_shape(partial(quantize_parameters, kind=kind), tree))


def _quantized(planned: Plan, dtype: str, kind: str | None, bar: tqdm) -> Iterator[dict[str, np.ndarray]]:
    """Yield the plan's batches of parameters, quantised, and count the parameters on the bar."""
    for batch in planned.batches(dtype):
        bar.update(len(batch))
        leaves = batch if kind is None else orbax.flatten(quantize_parameters(batch, kind))
        yield {name: np.asarray(leaf) for name, leaf in leaves.items()}
        del batch, leaves


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ids separated by commas, such as 2,16,29, got {text!r}") from None


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # ru_maxrss includes the parent process's memory before the fork
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _summary(planned: Plan) -> str:
    """Return a line with the number of tensors and of values that a plan reads."""
    tensors = [planned.source.tensors[name] for row in planned.rows for name in row.sources]
    values = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    return f"{len(tensors)} tensors with {values:,} values"


def _list_tensors(planned: Plan) -> None:
    """Print shape, dtype and parameter of every tensor."""
    for row in planned.rows:
        for name in row.sources:
            tensor = planned.source.tensors[name]
            print(f"{name} {list(tensor.shape)} {tensor.dtype} -> {row.parameter}")
