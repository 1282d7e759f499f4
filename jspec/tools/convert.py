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
from convert.plan import Plan
from jspec.draft.auto import plan
from jspec.draft.head_config import Overrides
from jspec.models.load import parameters_of
from jspec.models.weights.quantize import check_scope, check_stored, quantize_parameters
from jspec.tools import command_line
from pallas_kernels.layers.weights import Kind


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jspec convert`, which converts a Hugging Face folder to an orbax folder.

    Args:
        argv: command-line arguments; None: the arguments of the process.

    Returns:
        The exit status: 0, or 2 after an error, which is printed.
    """
    return command_line.run(["convert", *(sys.argv[1:] if argv is None else argv)])


def run(options: argparse.Namespace) -> int:
    """Convert with the options of the command line, and print what was written; return the exit status, 0."""
    start = time.perf_counter()
    planned, dtype = _convert(options)
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
