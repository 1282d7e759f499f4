"""Loads models from a Hugging Face folder, from a folder written by `python -m convert`, or from the hub.

`load` reads targets and draft models. To read heads, `jspec.draft` passes the heads' formats to `read_checkpoint`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from convert import orbax
from convert.detect import LATER_COUNTS, LATER_TENSORS, check_kind, later_layers
from convert.fields import CheckpointError, Fields, listed, named, short
from convert.hub import find
from convert.huggingface import MapRow, renamed, warn_not_finite
from convert.orbax import Checkpoint, Header, Placement
from convert.plan import Plan, plan_folder
from convert.sources import Shape, Source
from jspec.core.config import DEQUANTIZE, SPELLINGS
from jspec.core.progress import progress_bar
from jspec.models import families
from jspec.models.config.decoder_config import DecoderConfig, ModelConfig
from jspec.models.parts.param_spec import Params
from jspec.models.weights import tensor_parallel
from jspec.models.weights.int4_rows import PACKED
from jspec.models.weights.params import model_params
from jspec.models.weights.quantize import check_scope, check_stored, quantize_parameters, quantized_shapes
from jspec.models.weights.quantized_config import read_scheme
from jspec.models.weights.quantized_rows import quantized_rows
from jspec.models.weights.scheme import CONFIG
from jspec.models.weights.tensor_parallel import put_named

logger = logging.getLogger(__name__)

# Prefixes of tensor names in folders with an image encoder: those of the language model, and those of other parts.
PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
PARTS = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "embed_vision.", "vision_embedder."),
    *("vision_adapter.", "vision_projection."),
)
SOUND = ("audio_tower.", "embed_audio.")
OTHER_INPUTS = {  # prefixes of the tensors for other inputs than text, by what these are
    kind: (*parts, *(f"model.{part}" for part in parts)) for kind, parts in {"images": PARTS, "sound": SOUND}.items()
}


FromHF = Callable[[Fields, Source], tuple[Any, list[MapRow]]]


@dataclass(frozen=True)
class Format:
    """The functions that read one kind of checkpoint.

    Attributes:
        from_hf: function of a Hugging Face folder's parsed config.json and tensors that returns the config record and
            the rows of the weight map.
        from_json: function of a converted folder's parsed config that returns the config record.
        params: function of the config record and the names of a converted folder's parameters that returns the
            declarations of the parameters; a quantised parameter has its own name.
        override: function that applies the caller's overrides to the config record of a converted folder.
    """

    from_hf: FromHF
    from_json: Callable[[Fields], Any]
    params: Callable[[Any, Collection[str]], Params]
    override: Callable[[Any], Any] = lambda config: config


FormatOf = Callable[[str], Format]  # kind of checkpoint -> format of that kind
Check = Callable[[Any, Path], None]  # config of a checkpoint, its folder -> nothing; raises an error


def load(
    path: str | Path,
    *,
    dtype: str | None = None,
    rope_theta: float | None = None,
    quantize: str | None = None,
    placement: Placement | None = None,
    mesh: Mesh | None = None,
    check: Check | None = None,
) -> Checkpoint:
    """Load a target or a draft model.

    Float8 checkpoints of compressed-tensors, of ModelOpt and in the format of DeepSeek-V3 and Qwen3 keep their bytes
    and their scales (`jspec.models.weights.quantized_rows`). The config decides the kind: with a scale for each row or
    tensor and dynamic activations it is "fp8_dynamic", which also rounds activations, with a scale for each row. With
    unrounded or static activations, with scales for blocks, and for experts it is "fp8": weights are float8, and
    activations are not rounded. ``quantize="fp8"`` leaves activations unrounded, whatever the config says.

    4-bit checkpoints of GPTQ, AWQ and compressed-tensors stay packed, two values in a byte, as kind "int4"
    (`jspec.models.weights.int4_rows`), and so do experts in mxfp4, as kind "mxfp4" (`jspec.models.weights.mxfp4_rows`).
    Products of up to 64 rows, and those of experts, widen parts of a weight in registers, others in memory.

    Args:
        path: existing folder, else hub id ("owner/name", or "owner/name@revision" for a certain commit or tag).
        dtype: dtype of the weights, "float32", "bfloat16" or "float16", or the dtype of jax or numpy of that name;
            None: float32 on CPU, bfloat16 elsewhere.
        rope_theta: rotary base; None: as in config.json.
        quantize: how the weight matrices are quantised, "int8", "fp8", "fp8_dynamic", "int4" or, of experts alone,
            "mxfp4" (`jspec.models.weights.quantize`); None: as stored. Stored float8 weights may be loaded as "fp8" or
            "fp8_dynamic" only, and stored 4-bit weights as what they are. "none" widens the quantised weights of a
            Hugging Face folder to ``dtype``, which takes the memory of unquantised weights.
        placement: sharding of each parameter, by name; None: the default device.
        mesh: mesh over whose devices the weights are divided (`jspec.models.weights.tensor_parallel`), instead of a
            placement; each device gets its own part only. None: as ``placement`` says.
        check: function of the config and the folder that is called before weights are read, and may raise an error.

    Returns:
        The checkpoint, with its weights on the devices.

    Raises:
        FileNotFoundError: the folder or a file in it is missing, and the hub has no such model.
        ValueError: an argument is wrong, or the files are damaged or contradict each other.
        NotImplementedError: the model's family, or an option of the model, is not supported.
    """
    format_of = partial(target_format, rope_theta=rope_theta, dequantize=quantize == DEQUANTIZE)
    options: dict[str, Any] = {"dtype": dtype, "quantize": quantize, "check": check}
    return read_checkpoint(path, format_of, kind="target", placement=placement, mesh=mesh, **options)


def target_format(kind: str, *, rope_theta: float | None = None, dequantize: bool = False) -> Format:
    """Return the format of targets and draft models.

    Args:
        kind: "target", which is the kind of targets and of draft models.
        rope_theta: rotary base; None: as in the checkpoint.
        dequantize: whether quantised weights are widened.
    """
    assert kind == "target", kind

    def from_hf(fields: Fields, source: Source) -> tuple[ModelConfig, list[MapRow]]:
        fields, names = text_model(fields, source)
        names = without_later_layers(fields, source, names)
        config = families.read_config(fields, rope_theta=rope_theta)
        check_count("num_hidden_layers", config.num_layers, names)
        return config, renamed(families.family_of(config.family).weights(config, names), names)

    def override(config: ModelConfig) -> ModelConfig:
        return config if rope_theta is None else config.with_theta(rope_theta)

    def from_json(fields: Fields) -> ModelConfig:
        families.family_of(fields.text("family"))  # an unknown family is refused by name
        return ModelConfig.from_json(fields)

    def params(config: ModelConfig, names: Collection[str]) -> Params:
        check_count("num_layers", config.num_layers, names)
        return model_params(config)

    return Format(with_scheme(from_hf, dequantize=dequantize), from_json, params, override)


def with_scheme(from_hf: FromHF, *, dequantize: bool = False, is_part: bool = False) -> FromHF:
    """Return a function as in `Format` that also reads quantised weights; ``from_hf`` is called as if there were none.

    Args:
        from_hf: function that reads unquantised weights.
        dequantize: whether quantised weights are widened.
        is_part: whether ``from_hf`` reads a part of the checkpoint, of which nothing may be quantised.
    """

    def read(fields: Fields, source: Source) -> tuple[Any, list[MapRow]]:
        scheme = read_scheme(fields, source.folder)
        plain = Fields({name: fields[name] for name in fields if name != CONFIG}, fields.place)
        config, rows = from_hf(plain, source)
        if scheme is None:
            return config, rows
        logger.info("%s: %s", source.folder, scheme)
        return config, quantized_rows(rows, scheme, source.tensors, dequantize=dequantize, is_part=is_part)

    return read


def text_model(fields: Fields, source: Source) -> tuple[Fields, dict[str, str]]:
    """Find the language model of a folder that also holds an image encoder; other folders are returned unchanged.

    Such a folder describes its language model in `text_config` and puts a prefix before the names of its tensors. The
    tensors of encoders of images and sound are removed from ``source``.

    Returns:
        The config of the language model, and the stored name of each tensor by its name without prefix. A packed tensor
        has the name of its weight, too.
    """
    if "text_config" not in fields:
        return fields, _with_unpacked({name: name for name in source.tensors})
    text, tie = fields.object("text_config"), "tie_word_embeddings"
    tied = [part.flag(tie) for part in (fields, text) if part.get(tie) is not None]  # false may be a default
    text = Fields({**text, **({tie: any(tied)} if tied else {})}, f"{fields.place}: text_config")
    for kind, prefixes in OTHER_INPUTS.items():
        if count := sum(name.startswith(prefixes) for name in source.tensors):
            logger.warning("the model's %d tensors for %s are left out: jspec reads text alone", count, kind)
        source.tensors = {name: tensor for name, tensor in source.tensors.items() if not name.startswith(prefixes)}
    return text, text_names(source.tensors)


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each tensor of a language model by its name without prefix."""
    return _with_unpacked({_without_prefix(name): name for name in names})


def _with_unpacked(names: dict[str, str]) -> dict[str, str]:
    return names | {_unpacked(name): _unpacked(stored) for name, stored in names.items() if name.endswith(PACKED)}


def _unpacked(name: str) -> str:
    """Return the name that a packed tensor's weight has in an unquantised checkpoint."""
    return f"{name.rpartition('.')[0]}.weight"


def without_later_layers(fields: Fields, source: Source, names: Mapping[str, str]) -> dict[str, str]:
    """Leave out the layers behind a model's last one, which predict further tokens (arXiv:2404.19737).

    Their tensors are removed from ``source``.

    Args:
        fields: config of the language model.
        source: tensors of the folder.
        names: stored name of each tensor by its name without prefix.

    Returns:
        The names of the other tensors.
    """
    layers = tuple(f"model.layers.{index}." for index in later_layers(fields, names))
    left_out = {name: at for name, at in names.items() if name.startswith(layers) or LATER_TENSORS.fullmatch(name)}
    if left_out:
        level = logging.INFO if any(fields.get(name) for name in LATER_COUNTS) else logging.WARNING
        logger.log(level, "the model's %d tensors that predict further tokens are left out", len(left_out))
    without = set(left_out.values())
    source.tensors = {name: tensor for name, tensor in source.tensors.items() if name not in without}
    return {name: stored for name, stored in names.items() if name not in left_out}


def _without_prefix(name: str) -> str:
    """Return the name that a tensor of a language model has in a folder without an image encoder."""
    for prefix, bare in PREFIXES.items():
        if name.startswith(prefix):
            return bare + name.removeprefix(prefix)
    return name


def check_count(name: str, count: int, tensors: Collection[str]) -> None:
    """Raise CheckpointError if a config has more layers or heads than the files have tensors.

    Args:
        name: name of the count in the config.
        count: number of layers or heads.
        tensors: names of the tensors.
    """
    if count > len(tensors):
        raise CheckpointError(
            name,
            f"expected at most {len(tensors)}, the number of tensors in the files, got {count}; correct the config",
        )


def read_checkpoint(
    path: str | Path,
    format_of: FormatOf,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    placement: Placement | None = None,
    mesh: Mesh | None = None,
    check: Check | None = None,
) -> Checkpoint:
    """Load a checkpoint of any kind from a Hugging Face folder, a converted folder or the hub.

    Args:
        path, dtype, quantize, placement, mesh, check: arguments of `load`.
        format_of: function that returns the format of the checkpoint's kind.
        kind: required kind of checkpoint; None: any.

    Returns:
        The checkpoint, with its weights on the devices.

    Raises:
        ValueError: the checkpoint is not of the required kind. `load` lists the other errors.
    """
    dtype = dtype_name(dtype)
    folder = find(path)
    logger.info("loading %s", folder)
    if orbax.is_checkpoint(folder) and quantize == DEQUANTIZE:
        raise ValueError(
            f"quantize: expected a Hugging Face folder for 'none', got the converted {folder}; leave it out"
        )
    if orbax.is_checkpoint(folder):
        header = _read_manifest(folder, format_of, kind)
        check_scope(quantize, header.kind)
        check_stored(orbax.unflatten(header.parameters, header.quantized), quantize)
        if check is not None:
            check(header.config, folder)
        params = _params_on(mesh, format_of(header.kind), header.config, header.parameters)
        if mesh is not None:
            tensor_parallel.compare_folder(header, mesh)
            placement = tensor_parallel.placement(params, header.parameters, mesh)
        kept = [name for name, spec in params.items() if spec.dtype is not None]
        stored = orbax.read_arrays(header, dtype=dtype, placement=placement, kept=kept)
        warn_not_finite(folder, orbax.not_finite(stored))
        if mesh is not None:
            stored = {name: put_named(name, stored.pop(name), params, mesh, header.quantized) for name in list(stored)}
        weights = orbax.unflatten(stored, header.quantized)
        weights = weights if quantize is None else quantize_parameters(weights, quantize)
        return Checkpoint(header.kind, header.config, weights, folder)
    plan = read_plan(folder, format_of, kind=kind)
    check_scope(quantize, plan.kind)
    quantize = None if quantize == DEQUANTIZE else quantize  # the weight map has no quantised parameters then
    check_stored(orbax.unflatten(parameters_of(plan), plan.quantized), quantize)
    if check is not None:
        check(plan.config, folder)
    params = {} if mesh is None else _params_on(mesh, format_of(plan.kind), plan.config, parameters_of(plan))

    def put(name: str, array: np.ndarray) -> jax.Array:
        if mesh is not None:
            return put_named(name, array, params, mesh, plan.quantized)
        return jax.device_put(array, orbax.sharding_of(name, array.shape, placement))

    arrays: dict[str, Any] = {}
    with progress_bar(len(plan.rows), f"loading {folder.name}", "tensors") as progress:
        for batch in plan.batches(dtype):
            placed = {name: put(name, array) for name, array in batch.items()}
            placed = placed if quantize is None else quantize_parameters(placed, quantize)
            arrays |= jax.block_until_ready(placed)  # otherwise the host holds copies of several batches at once
            progress.update(len(batch))
            del batch, placed
    weights = orbax.unflatten(arrays, plan.quantized)
    weights = weights if quantize is None else quantize_parameters(weights, quantize)  # those that the files quantise
    return Checkpoint(plan.kind, plan.config, weights, folder)


def _params_on(mesh: Mesh | None, form: Format, config: Any, names: Collection[str]) -> Params:
    """Return the declarations of a checkpoint's parameters, which a mesh must be able to divide if there is one."""
    if mesh is not None and isinstance(config, DecoderConfig):
        tensor_parallel.local_config(config, mesh.size)
    bare = {base if part in orbax.QUANTIZED else name for name in names for base, _, part in [name.rpartition(".")]}
    return form.params(config, bare)


def read_header(path: str | Path, format_of: FormatOf) -> Header:
    """Read the kind, config and parameter shapes of a checkpoint, but no weights.

    Args:
        path: folder, or if no such folder exists, hub id ("owner/name").
        format_of: function that returns the format of the checkpoint's kind.

    Raises: the errors that `load` raises.
    """
    folder = find(path)
    if orbax.is_checkpoint(folder):
        return _read_manifest(folder, format_of, None)
    plan = read_plan(folder, format_of)
    return Header(plan.kind, plan.config, parameters_of(plan), folder, plan.quantized)


def parameters_of(plan: Plan) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each parameter of a plan, by name."""
    return {row.parameter: jax.ShapeDtypeStruct(row.shape, plan.row_dtype(row)) for row in plan.rows}


def read_plan(folder: str | Path, format_of: FormatOf, *, kind: str | None = None) -> Plan:
    """Plan how a Hugging Face folder is read: find its kind, its config and its weight map.

    Raises the errors of `convert.plan.plan_folder`.

    Args:
        folder: folder with config.json and weights.
        format_of: function that returns the format of the checkpoint's kind.
        kind: required kind of checkpoint; None: any.
    """

    def read_format(stored_kind: str, fields: Fields, source: Source) -> tuple[Any, list[MapRow]]:
        return format_of(stored_kind).from_hf(fields, source)

    return plan_folder(folder, read_format, kind=kind, families=families.model_types())


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype that is given by name or as an object of jax or numpy.

    None and "auto" are the device's default.

    Raises:
        ValueError: the dtype is not supported.
    """
    dtype = SPELLINGS.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if dtype is None:
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in orbax.DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(orbax.DTYPES)}, got {short(dtype)}; pass one of them")
    return name


def _read_manifest(folder: Path, format_of: FormatOf, kind: str | None) -> Header:
    """Read the header of a converted folder, with its config as a record that has the caller's overrides."""
    header = orbax.read_header(folder)
    check_kind(folder, header.kind, kind)
    form = format_of(header.kind)
    with named(folder / orbax.MANIFEST):
        config = form.from_json(header.config)
        _check_parameters(form, config, header)
    return replace(header, config=form.override(config))


def _check_parameters(form: Format, config: Any, header: Header) -> None:
    """Raise CheckpointError unless the arrays of a converted folder are those of its config."""
    stored = header.parameters
    arrays = {name: {part: f"{name}.{part}" for part in orbax.QUANTIZED} for name in header.quantized}
    names = stored.keys() - {array for named in arrays.values() for array in named.values()} | arrays.keys()
    params = form.params(config, names)
    wanted: dict[str, Shape] = {}
    for name, spec in params.items():
        if name in arrays:
            parts = {part: stored[array] for part, array in arrays[name].items() if array in stored}
            parts_shapes = quantized_shapes(spec.shape, parts, header.quantized[name])
            wanted |= {arrays[name][part]: shape for part, shape in parts_shapes.items()}
        else:
            wanted[name] = spec.shape
    shapes = {name: leaf.shape for name, leaf in stored.items()}
    floats = [name for name in stored if name in params and params[name].dtype is None]
    faults = {
        "missing": sorted(wanted.keys() - shapes.keys()),
        "unknown": sorted(shapes.keys() - wanted.keys()),
        "wrong shape": sorted(name for name in wanted.keys() & shapes.keys() if wanted[name] != shapes[name]),
        "not floating point": [name for name in floats if not jnp.issubdtype(stored[name].dtype, jnp.floating)],
    }
    if any(faults.values()):
        summary = "; ".join(f"{fault}: {listed(wrong)}" for fault, wrong in faults.items() if wrong)
        raise CheckpointError("", f"the weights are not those of the config ({summary}); convert the model again")
