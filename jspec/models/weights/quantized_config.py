"""Reads from a checkpoint's config how its linear weights are quantised.

Three formats of float8 are read: compressed-tensors ("float-quantized"), ModelOpt ("FP8"), and "fp8", the format of
DeepSeek-V3 (arXiv:2412.19437 section 3.3) and of the FP8 models of Qwen3. In all of them a weight is float8_e4m3fn, and
its scales are a tensor beside it, by which its values are multiplied. Three formats of four bits are read: GPTQ
(arXiv:2210.17323), AWQ (arXiv:2306.00978), and compressed-tensors ("pack-quantized"); and mxfp4, that of gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from convert.fields import CheckpointError, Fields, named, read_json, require
from jspec.models.parts.checks import unsupported

CONFIG = "quantization_config"  # key of config.json
MODELOPT = "hf_quant_config.json"  # file in which older versions of ModelOpt describe the quantisation
SUPPORTED = (
    "float8 weights of compressed-tensors, modelopt or fp8, 4-bit weights of compressed-tensors, gptq, awq or mxfp4, "
    "or unquantised float weights (quantize='int8', 'fp8' or 'int4' rounds them at load)"
)
REGEX = "re:"  # prefix of regular expressions among module names


@dataclass(frozen=True)
class Scheme:
    """How the linear weights of a checkpoint are quantised.

    Attributes:
        method: name of the format, the `quant_method` of config.json.
        granularity: values that share a scale, "tensor" (all values of a tensor), "channel" (a row), "block", or
            "group" (a block of one row).
        block: rows and columns of a block; None: no blocks.
        activations: how the format's own kernels round activations to float8, with "dynamic" or "static" scales; None:
            not at all.
        unquantized: names of modules whose weights are not quantised. A name may be the beginning or the end of a
            module's dotted name, may have wildcards, and is a regular expression after the prefix "re:".
        bits: bits of a value, 8 (float8_e4m3fn) or 4 (whole numbers).
        has_zeros: whether groups have zero points.
        zero_offset: number that is added to stored zero points.
    """

    method: str
    granularity: str
    block: tuple[int, int] | None = None
    activations: str | None = None
    unquantized: tuple[str, ...] = ()
    bits: int = 8
    has_zeros: bool = False
    zero_offset: int = 0

    def exclusion(self, module: str) -> str | None:
        """Return the name in `unquantized` that excludes a module, or None."""
        return next((name for name in self.unquantized if _names(name, module)), None)

    def __str__(self) -> str:
        shared = self.granularity if self.block is None else f"block of {self.block[0]} x {self.block[1]}"
        if self.bits == 4:
            zeros = " and a zero point" if self.has_zeros else ""
            return f"{self.method}, 4-bit weights with a scale{zeros} per {shared}"
        used = "" if self.activations is None else f"; its {self.activations} scales of activations are not used"
        return f"{self.method}, float8 weights with a scale per {shared}{used}"


def _names(name: str, module: str) -> bool:
    if name.startswith(REGEX):
        return re.match(name.removeprefix(REGEX), module) is not None
    return any(fnmatchcase(module, pattern) for pattern in (name, f"{name}.*", f"*.{name}"))


def read_scheme(fields: Fields, folder: Path) -> Scheme | None:
    """Read how the weights of a Hugging Face folder are quantised; None: they are not.

    Args:
        fields: parsed config.json.
        folder: folder of the checkpoint.

    Raises:
        CheckpointError: a value is missing, impossible or of another type.
        NotImplementedError: the format or an option of it is not supported; the message names the option.
    """
    config, file = fields.object(CONFIG), folder / "config.json"
    if not config and (folder / MODELOPT).is_file():
        file = folder / MODELOPT
        config = Fields({**read_json(file), "quant_method": "modelopt"}, str(file))
    if not config:
        return None
    with named(file):
        method = config.text("quant_method", "")
        if method not in READERS:
            raise unsupported(CONFIG, dict(config), SUPPORTED)
        return READERS[method](config)


def _compressed_tensors(config: Fields) -> Scheme:
    known = ("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config", "version")
    _refuse_others(config, *known, "quantization_status", "global_compression_ratio")
    require(config, ("format", "config_groups"))
    _expect(config, "format", "float-quantized", "pack-quantized")
    _expect(config.object("sparsity_config"), "format", "dense")
    if config.text("format") == "pack-quantized":
        return _pack_quantized(config)
    granularity, block, activations = _group_of(config)
    return Scheme("compressed-tensors", granularity, block, activations, _modules(config, "ignore"))


def _modelopt(config: Fields) -> Scheme:
    inner = config.object("quantization") or config
    known = ("quant_method", "quant_algo", "producer", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo")
    _refuse_others(inner, *known, "ignore", "exclude_modules")
    require(inner, ("quant_algo",))
    _expect(inner, "quant_algo", "FP8")
    if inner.object("config_groups") and _group_of(inner)[0] != "tensor":
        raise unsupported("config_groups", dict(inner.object("config_groups")), "one scale per tensor")
    return Scheme("modelopt", "tensor", None, "static", _modules(inner, "ignore", "exclude_modules"))


def _fp8(config: Fields) -> Scheme:
    excluded = ("modules_to_not_convert", "ignored_layers")
    known = ("quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "expert_dtype")
    _refuse_others(config, *known, *excluded, "kv_cache_scheme", "dequantize")
    _expect(config, "fmt", "e4m3")
    _expect(config, "activation_scheme", "dynamic", "static")
    _expect(config, "scale_fmt", "float", "ue8m0")
    _expect(config, "expert_dtype", "fp8")
    block = _block(config, "weight_block_size")
    activations, modules = config.text("activation_scheme", "dynamic"), _modules(config, *excluded)
    return Scheme("fp8", "tensor" if block is None else "block", block, activations, modules)


def _gptq(config: Fields) -> Scheme:
    # Keys that tell how the weights were found, or how other engines multiply them.
    made = (
        "damp_percent",
        "damp_auto_increment",
        "desc_act",
        "static_groups",
        "sym",
        "true_sequential",
        "dataset",
        "tokenizer",
        "batch_size",
        "block_name_to_quantize",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "model_name_or_path",
        "model_file_base_name",
        "model_seqlen",
        "max_input_length",
        "pad_token_id",
        "meta",
    )
    run = (
        "use_cuda_fp16",
        "use_exllama",
        "disable_exllama",
        "exllama_config",
        "cache_block_outputs",
        "backend",
        "lm_head",
    )
    known = ("quant_method", "bits", "group_size", "checkpoint_format", "format", "method", "pack_dtype")
    _refuse_others(config, *known, *made, *run)
    _expect(config, "pack_dtype", "int32")
    _expect(config, "method", "gptq")
    name = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    _expect(config, name, "gptq", "gptq_v2")
    offset = 0 if config.text(name, "gptq") == "gptq_v2" else 1
    return _four_bits(config, "gptq", has_zeros=True, zero_offset=offset)


def _awq(config: Fields) -> Scheme:
    known = ("quant_method", "bits", "group_size", "zero_point", "version", "modules_to_not_convert")
    _refuse_others(config, *known, "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config")
    _expect(config, "version", "gemm", "GEMM")
    if not config.flag("zero_point", True):
        raise unsupported(f"{config.place}: zero_point", False, "True")
    return _four_bits(config, "awq", has_zeros=True, unquantized=_modules(config, "modules_to_not_convert"))


def _mxfp4(config: Fields) -> Scheme:
    _refuse_others(config, "quant_method", "modules_to_not_convert", "dequantize")
    return Scheme("mxfp4", "group", (1, 32), unquantized=_modules(config, "modules_to_not_convert"), bits=4)


def _pack_quantized(config: Fields) -> Scheme:
    groups = config.object("config_groups")
    schemes = {_read_int4_group(groups.object(name)) for name in groups}
    if len(schemes) != 1:
        raise unsupported("config_groups", dict(groups), "one group, or several that quantise alike")
    (scheme,) = schemes
    return replace(scheme, unquantized=_modules(config, "ignore"))


def _read_int4_group(group: Fields) -> Scheme:
    _refuse_others(group, "targets", "weights", "format")
    _expect(group, "format", "pack-quantized")
    require(group, ("weights",))
    weights = group.object("weights")
    known = ("num_bits", "type", "strategy", "symmetric", "group_size", "observer", "observer_kwargs", "actorder")
    _refuse_others(weights, *known, "scale_dtype", "zp_dtype")
    _expect(weights, "type", "int")
    _expect(weights, "strategy", "group", "channel")
    if weights.text("strategy", "group") == "group":
        require(weights, ("group_size",))
    return _four_bits(weights, "compressed-tensors", "num_bits", has_zeros=not weights.flag("symmetric", True))


def _four_bits(config: Fields, method: str, bits: str = "bits", **traits: Any) -> Scheme:
    """Return the scheme of weights of four bits, in groups of the config's group_size; -1 or null: whole rows."""
    require(config, (bits,))
    if config.integer(bits) != 4:
        raise unsupported(f"{config.place}: {bits}", config[bits], "4")
    size = config.integer("group_size", least=-1) if config.get("group_size") is not None else -1
    if size == 0:
        raise config.error("group_size", "a number of columns above 0, or -1 for whole rows")
    granularity, block = ("channel", None) if size == -1 else ("group", (1, size))
    return Scheme(method, granularity, block, bits=4, **traits)


READERS: dict[str, Callable[[Fields], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}


def _group_of(config: Fields) -> tuple[str, tuple[int, int] | None, str | None]:
    """Return granularity, block and activations of the config groups, which must be alike."""
    groups = config.object("config_groups")
    formats = {_read_group(groups.object(name)) for name in groups}
    if len(formats) != 1:
        raise unsupported("config_groups", dict(groups), "one group, or several that quantise alike")
    return formats.pop()


def _read_group(group: Fields) -> tuple[str, tuple[int, int] | None, str | None]:
    _refuse_others(group, "targets", "weights", "input_activations", "format")
    _expect(group, "format", "float-quantized")
    require(group, ("weights",))
    weights, inputs = group.object("weights"), group.object("input_activations")
    known = ("num_bits", "type", "strategy", "symmetric", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    for part in (weights, inputs):
        _refuse_others(part, *known, "dynamic", "block_structure", *(["group_size"] if part is inputs else []))
        _expect(part, "type", "float")
        if part is not inputs or inputs:
            require(part, ("num_bits",))
        if part.integer("num_bits", 8) != 8:
            raise unsupported(f"{part.place}: num_bits", part["num_bits"], "8")
        if not part.flag("symmetric", True):
            raise unsupported(f"{part.place}: symmetric", False, "True")
    _expect(weights, "strategy", "tensor", "channel", "block")
    strategy = weights.text("strategy", "tensor")
    block = _block(weights, "block_structure")
    if (strategy == "block") != (block is not None):
        raise weights.error("block_structure", "two sizes for the strategy 'block', and none for others")
    if weights.flag("dynamic"):
        raise unsupported(f"{weights.place}: dynamic", True, "False")
    return strategy, block, ("dynamic" if inputs.flag("dynamic") else "static") if inputs else None


def _refuse_others(fields: Fields, *known: str) -> None:
    """Raise NotImplementedError if a key that is not known has a value that is not null, false or empty."""
    for name in fields:
        if name not in known and fields[name]:
            raise unsupported(f"{fields.place}: {name}", fields[name], "none")


def _expect(fields: Fields, name: str, *values: str) -> None:
    """Raise NotImplementedError if a text is given and is not one of the supported values."""
    if fields.get(name) is not None and fields.text(name) not in values:
        raise unsupported(f"{fields.place}: {name}", fields[name], " or ".join(map(repr, values)))


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Read the rows and columns of a block; return None if there are none."""
    if fields.get(name) is None:
        return None
    match fields.integers(name):
        case [rows, columns] if rows and columns:
            return rows, columns
    raise fields.error(name, "two sizes above 0, of rows and of columns")


def _modules(fields: Fields, *keys: str) -> tuple[str, ...]:
    names = tuple(name for key in keys for name in fields.texts(key))
    _check_patterns(fields, names)
    return names


def _check_patterns(fields: Fields, names: Iterable[str]) -> None:
    for name in names:
        try:
            re.compile(name.removeprefix(REGEX) if name.startswith(REGEX) else "")
        except re.error as error:
            raise CheckpointError(
                fields.place, f"expected a regular expression after {REGEX!r}, got {name!r} ({error}); correct it"
            ) from None
