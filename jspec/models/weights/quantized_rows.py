"""Reads quantised weights as they are stored: rows of a weight map for their values, and for their scales.

A parameter `X` whose tensors are quantised becomes two, `X.values` and `X.scale`, or three with `X.zeros`, which
together are a `Quantized` (`pallas_kernels.layers.weights`). `jspec.models.weights.int4_rows` reads weights of four
bits. Families need to know nothing of this: they map tensors to parameters as if the checkpoint were not quantised.

The files' other scales are not used, and do not change what the weights are. `input_scale` is for activations, which
stay unrounded with kind "fp8", and get a scale for each row with "fp8_dynamic": weights with a scale for each row or
tensor are of this kind in a file whose config asks for dynamic activations. The scales of keys and values are for a
float8 cache; the cache has the model's dtype unless `kv_dtype` says otherwise, and a float8 cache has no scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from convert.fields import CheckpointError, listed, short
from convert.huggingface import MapRow, is_stacked, selected, unselected
from convert.sources import FLOAT8, Shape, Source, Tensor, cast
from jspec.models.parts.checks import unsupported
from jspec.models.weights.int4_rows import check_scales, packed_name, split_int4
from jspec.models.weights.mxfp4_rows import mxfp4_rows
from jspec.models.weights.quantize import EXPERTS, NAMES, WIDENED
from jspec.models.weights.scheme import CONFIG, Scheme
from pallas_kernels.layers.experts import expert_bytes
from pallas_kernels.layers.packed.int4 import ZERO, unpack
from pallas_kernels.layers.weights import Kind

WEIGHT = ".weight"
TOGETHER = "fp8", "tensor"  # method and granularity of a format without blocks that has all experts in one tensor
# Last part of the name of a weight's scales, by which its values are multiplied; only "fp8" has the first one. Of the
# experts of a layer in one tensor X, which has no module of its own, they are X_scale_inv (transformers).
SCALES = ("weight_scale_inv", "weight_scale")
# Ends of the names of scales of activations, keys and values.
UNUSED = (".input_scale", "activation_scale", ".k_scale", ".v_scale", ".kv_scale", ".output_scale")


def quantized_rows(
    rows: Iterable[MapRow],
    scheme: Scheme,
    tensors: Mapping[str, Tensor],
    *,
    dequantize: bool = False,
    is_part: bool = False,
) -> list[MapRow]:
    """Replace each row of a weight map whose tensors are quantised by rows of values, of scales and of zero points.

    Whether a weight is quantised is seen from its tensors: it is float8 or packed, or there are scales for it.

    Args:
        rows: rows of the weight map, as for an unquantised checkpoint.
        scheme: how the checkpoint is quantised.
        tensors: headers of the tensors, by name.
        dequantize: read the values that quantised tensors stand for instead, in the dtype of other weights.
        is_part: whether the rows are those of a part of the checkpoint, of which nothing may be quantised.

    Raises:
        CheckpointError: no weight is quantised, or one that the config excludes is.
        NotImplementedError: a parameter cannot be quantised, or has quantised and unquantised parts.
    """
    if scheme.method == "mxfp4":
        return mxfp4_rows(rows, tensors, dequantize=dequantize)
    rows = list(rows)
    new_rows: list[MapRow] = []
    known = {name for row in rows for name in row.sources}
    unused = {name: tensor.shape for name, tensor in tensors.items() if name.endswith(UNUSED)}
    count = 0
    for row in rows:
        quantized = [name for name in row.sources if _is_quantized(name, tensors)]
        if not quantized:
            new_rows.append(row)
            continue
        whole, index = unselected(row)
        widens = dequantize or row.parameter.rpartition(".")[2] in WIDENED
        _check(whole, quantized, scheme, tensors)
        if scheme.bits == 4:
            parts = split_int4(whole, scheme, tensors, known, by_column=widens)
        else:
            parts = _split(whole, scheme, tensors, {} if count else unused)  # one row names them all, so each is known
        parts = [_dequantized(whole, parts)] if widens else parts
        new_rows += parts if index is None else [selected(part, index) for part in parts]
        count += 1
    if not count and not is_part:
        expected = f"{'float8' if scheme.bits == 8 else '4-bit'} weights ({scheme.method})"
        raise CheckpointError(CONFIG, f"expected {expected}, got none; delete {CONFIG}")
    return new_rows


def _dequantized(row: MapRow, parts: list[MapRow]) -> MapRow:
    """Return a row that reads values, scales and zero points, and fills the parameter with what they stand for."""
    kinds = {name: part.dtype for part in parts for name in part.sources}
    sources = {name: shape for part in parts for name, shape in part.sources.items()}
    is_int4 = parts[0].quantized == "int4"

    def fill(source: Source, map_row: MapRow, dtype: str) -> np.ndarray:
        values, *per_group = (part.fill(source, part, str(part.dtype)) for part in parts)
        if is_int4:
            values = expert_bytes.unpack(values) if len(row.shape) == 3 else unpack(values)
        wide = values.astype(np.float32)
        groups = (array if array.ndim == wide.ndim else array[..., None] for array in per_group)
        scale, *zeros = (np.repeat(array, wide.shape[-1] // array.shape[-1], axis=-1) for array in groups)
        if is_int4:
            wide -= zeros[0] if zeros else np.float32(ZERO)
        return cast(wide * scale, dtype, row.parameter)

    return replace(row, sources=sources, fill=fill, kinds=kinds)


def _is_quantized(name: str, tensors: Mapping[str, Tensor]) -> bool:
    if name in tensors and tensors[name].dtype.startswith("float8"):
        return True
    return packed_name(name, tensors) is not None or any(scale in tensors for scale in _scale_names(name))


def _scale_names(weight: str, suffixes: Iterable[str] = SCALES) -> list[str]:
    if not weight.endswith(WEIGHT):
        return [f"{weight}{suffix.removeprefix('weight')}" for suffix in suffixes]
    return [f"{weight.removesuffix(WEIGHT)}.{suffix}" for suffix in suffixes]


def _check(row: MapRow, quantized: list[str], scheme: Scheme, tensors: Mapping[str, Tensor]) -> None:
    """Raise an error unless a row with quantised tensors can be read as a quantised parameter."""
    name = row.parameter.rpartition(".")[2]
    is_together = (scheme.bits == 8 and scheme.block is not None) or (scheme.method, scheme.granularity) == TOGETHER
    axes = (2, 3) if name in EXPERTS and is_together else (2,)
    are_linear = all(len(shape) in axes for shape in row.sources.values())
    if name not in (*NAMES, *WIDENED) or not is_stacked(row) or not are_linear:
        raise unsupported(row.parameter, listed(quantized), "an unquantised parameter, as only linear weights may be")
    if others := [name for name in row.sources if name not in quantized]:
        raise unsupported(row.parameter, f"{listed(others)} unquantised", "all of its parts quantised, or none")
    for name in quantized:
        if (key := scheme.exclusion(name.removesuffix(WEIGHT))) is not None:
            stored = packed_name(name, tensors) or name
            place = tensors[stored].file if stored in tensors else CONFIG
            raise CheckpointError(
                place, f"{short(name)}: expected an unquantised weight, as {short(key)} excludes it in the config, got "
                f"a quantised one; correct {CONFIG}",
            )  # fmt: skip


def _kind(row: MapRow, scheme: Scheme) -> Kind:
    """Return the kind of a float8 weight: that of the file, but activations are not rounded for blocks and experts."""
    rounds = scheme.activations == "dynamic" and scheme.block is None
    return "fp8_dynamic" if rounds and row.parameter.rpartition(".")[2] not in EXPERTS else "fp8"


def _split(row: MapRow, scheme: Scheme, tensors: Mapping[str, Tensor], unused: Mapping[str, Shape]) -> list[MapRow]:
    """Return the row of a parameter's values and the row of its scales."""
    *out, inner = row.shape
    groups = () if scheme.block is None else (inner // math.gcd(inner, scheme.block[1]),)
    parts: dict[str, Shape] = {}  # shape of the weight, by name of its scales
    sources: dict[str, Shape] = {}  # shape of the scales, by their name
    for weight, shape in row.sources.items():
        names = _scale_names(weight, SCALES if scheme.method == "fp8" else SCALES[1:])
        scale = next((name for name in names if name in tensors), names[-1 if scheme.block is None else 0])
        parts[scale] = shape
        sources[scale] = _scale_shape(scheme, shape, tensors.get(scale))
    fill = partial(_fill_scales, parts, scheme.block)
    kind = _kind(row, scheme)
    return [
        replace(row, parameter=f"{row.parameter}.values", dtype=FLOAT8, quantized=kind),
        MapRow(f"{row.parameter}.scale", {**sources, **unused}, (*out, *groups), fill, "float32", quantized=kind),
    ]


def _scale_shape(scheme: Scheme, weight: Shape, stored: Tensor | None) -> Shape:
    """Return the shape that the scales of a weight must have; of several spellings, the one that is found."""
    *experts, out, inner = weight
    if scheme.block is not None:
        rows, columns = scheme.block
        return *experts, -(-out // rows), -(-inner // columns)
    if experts:  # of all experts together: a scale for each, or one for its gate and one for its up
        spellings: list[Shape] = [(*experts, 1, 1), (*experts, 2, 1)]
    else:
        spellings = [(out, 1), (out,)] if scheme.granularity == "channel" else [(1,), ()]
    return stored.shape if stored is not None and stored.shape in spellings else spellings[0]


def _fill_scales(
    parts: Mapping[str, Shape], block: tuple[int, int] | None, source: Source, row: MapRow, dtype: str
) -> np.ndarray:
    """Read the scales of a parameter, and repeat each for all rows, and all groups of columns, that it belongs to.

    Args:
        parts: shapes of the weights that are concatenated along axis 0, by name of their scales; [experts, out, inner]
            of all experts together.
        block: rows and columns that share a scale; None: a scale per row or per tensor.
        source, row, dtype: as in `MapRow.fill`.

    Raises:
        CheckpointError: a scale is negative, infinite or NaN.
    """
    filled, first = np.empty(row.shape, np.dtype(dtype)), 0
    # Scales of experts are stored one expert after another.
    flat = filled.reshape(-1) if block is None else filled.reshape(-1, row.shape[-1])
    for name, (*experts, out, inner) in parts.items():
        scale = np.concatenate(list(source.pieces(name))).astype(np.float32)
        check_scales(source, name, scale)
        part = flat[first : first + math.prod(experts) * out]
        if block is None:
            part[:] = np.repeat(scale.reshape(-1), len(part) // scale.size)
        else:
            groups = part.shape[1]
            rows, columns = min(block[0], out), min(block[1] * groups // inner, groups)
            repeated = np.repeat(np.repeat(scale, rows, -2)[..., :out, :], columns, -1)[..., :groups]
            part[:] = repeated.reshape(part.shape)
        first += len(part)
    return filled
