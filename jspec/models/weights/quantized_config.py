"""Reads from a checkpoint's config how its linear weights are quantised.

Three formats of float8 are read: compressed-tensors ("float-quantized"), ModelOpt ("FP8"), and "fp8", the format of
DeepSeek-V3 (arXiv:2412.19437 section 3.3) and of the FP8 models of Qwen3. In all of them a weight is float8_e4m3fn, and
its scales are a tensor beside it, by which its values are multiplied. Three formats of four bits are read: GPTQ
(arXiv:2210.17323), AWQ (arXiv:2306.00978), and compressed-tensors ("pack-quantized"); and mxfp4, that of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from convert.fields import Fields, named, read_json, require
from jspec.models.parts.checks import unsupported
from jspec.models.weights.int4_config import (
    GPTQ_FILE,
    read_awq,
    read_gptq,
    read_mxfp4,
    read_pack_quantized,
    with_gptq_file,
)
from jspec.models.weights.scheme import CONFIG, Scheme, block_sizes, expect, module_names, refuse_others

MODELOPT = "hf_quant_config.json"  # file in which older versions of ModelOpt describe the quantisation
SUPPORTED = (
    "float8 weights of compressed-tensors, modelopt or fp8, 4-bit weights of compressed-tensors, gptq, awq or mxfp4, "
    "or unquantised float weights (quantize='int8', 'fp8' or 'int4' rounds them at load)"
)


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
    if (folder / GPTQ_FILE).is_file() and config.get("quant_method") in (None, "gptq"):
        config = with_gptq_file(config, folder / GPTQ_FILE)
    if not config:
        return None
    with named(file):
        method = config.text("quant_method", "")
        if method not in READERS:
            raise unsupported(CONFIG, dict(config), SUPPORTED)
        return READERS[method](config)


def _compressed_tensors(config: Fields) -> Scheme:
    known = ("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "sparsity_config", "version")
    refuse_others(config, *known, "quantization_status", "global_compression_ratio")
    require(config, ("format", "config_groups"))
    expect(config, "format", "float-quantized", "pack-quantized")
    expect(config.object("sparsity_config"), "format", "dense")
    if config.text("format") == "pack-quantized":
        return read_pack_quantized(config)
    granularity, block, activations = _group_of(config)
    return Scheme("compressed-tensors", granularity, block, activations, module_names(config, "ignore"))


def _modelopt(config: Fields) -> Scheme:
    inner = config.object("quantization") or config
    known = ("quant_method", "quant_algo", "producer", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo")
    refuse_others(inner, *known, "ignore", "exclude_modules")
    require(inner, ("quant_algo",))
    expect(inner, "quant_algo", "FP8")
    if inner.object("config_groups") and _group_of(inner)[0] != "tensor":
        raise unsupported("config_groups", dict(inner.object("config_groups")), "one scale per tensor")
    return Scheme("modelopt", "tensor", None, "static", module_names(inner, "ignore", "exclude_modules"))


def _fp8(config: Fields) -> Scheme:
    excluded = ("modules_to_not_convert", "ignored_layers")
    known = ("quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "expert_dtype")
    refuse_others(config, *known, *excluded, "kv_cache_scheme", "dequantize")
    expect(config, "fmt", "e4m3", "float8_e4m3fn")  # the latter in MiniMax M2
    expect(config, "activation_scheme", "dynamic", "static")
    expect(config, "scale_fmt", "float", "ue8m0")
    expect(config, "expert_dtype", "fp8")
    block = block_sizes(config, "weight_block_size")
    activations, modules = config.text("activation_scheme", "dynamic"), module_names(config, *excluded)
    return Scheme("fp8", "tensor" if block is None else "block", block, activations, modules)


READERS: dict[str, Callable[[Fields], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fp8": _fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "mxfp4": read_mxfp4,
}


def _group_of(config: Fields) -> tuple[str, tuple[int, int] | None, str | None]:
    """Return granularity, block and activations of the config groups, which must be alike."""
    groups = config.object("config_groups")
    formats = {_read_group(groups.object(name)) for name in groups}
    if len(formats) != 1:
        raise unsupported("config_groups", dict(groups), "one group, or several that quantise alike")
    return formats.pop()


def _read_group(group: Fields) -> tuple[str, tuple[int, int] | None, str | None]:
    refuse_others(group, "targets", "weights", "input_activations", "format")
    expect(group, "format", "float-quantized")
    require(group, ("weights",))
    weights, inputs = group.object("weights"), group.object("input_activations")
    known = ("num_bits", "type", "strategy", "symmetric", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    for part in (weights, inputs):
        refuse_others(part, *known, "dynamic", "block_structure", *(["group_size"] if part is inputs else []))
        expect(part, "type", "float")
        if part is not inputs or inputs:
            require(part, ("num_bits",))
        if part.integer("num_bits", 8) != 8:
            raise unsupported(f"{part.place}: num_bits", part["num_bits"], "8")
        if not part.flag("symmetric", True):
            raise unsupported(f"{part.place}: symmetric", False, "True")
    expect(weights, "strategy", "tensor", "channel", "block")
    strategy = weights.text("strategy", "tensor")
    block = block_sizes(weights, "block_structure")
    if (strategy == "block") != (block is not None):
        raise weights.error("block_structure", "two sizes for the strategy 'block', and none for others")
    if weights.flag("dynamic"):
        raise unsupported(f"{weights.place}: dynamic", True, "False")
    return strategy, block, ("dynamic" if inputs.flag("dynamic") else "static") if inputs else None
