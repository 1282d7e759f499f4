"""Reads the configs of formats of four bits: GPTQ, AWQ, compressed-tensors ("pack-quantized"), mxfp4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.fields import CheckpointError, Fields, read_json, require, short
from jspec.models.parts.checks import unsupported
from jspec.models.weights.scheme import CONFIG, REGEX, Scheme, check_patterns, expect, module_names, refuse_others

GPTQ_FILE = "quantize_config.json"  # file in which exporters of GPTQ describe the quantisation
SKIPPED = "-:"  # prefix of regular expressions of modules that GPTQModel does not quantise
FORMAT = ("checkpoint_format", "format")  # keys that tell how GPTQ's zero points are stored


def with_gptq_file(config: Fields, file: Path) -> Fields:
    """Return a GPTQ config with what quantize_config.json, which its exporters write too, says of zero points.

    Raises:
        CheckpointError: the two files differ.
    """
    other = read_json(file)
    if not config:
        return Fields({"quant_method": "gptq", **other}, str(file))
    for name in ("bits", "group_size", "sym", "checkpoint_format"):
        first, second = ((_format(fields) if name in FORMAT else fields.get(name)) for fields in (config, other))
        if first is not None and second is not None and first != second:
            raise CheckpointError(
                file, f"{name}: expected {short(first)}, as {CONFIG} of config.json says, got {short(second)}; correct "
                "the wrong one",
            )  # fmt: skip
    known = {name: other[name] for name in (*FORMAT, "sym", "meta") if other.get(name) is not None}
    return Fields({**known, **{name: value for name, value in config.items() if value is not None}}, config.place)


def _format(config: Fields) -> Any:
    """Return how GPTQ's zero points are stored, by a config's newer key or its older one; None: it does not say."""
    return next((config[name] for name in FORMAT if config.get(name) is not None), None)


def read_gptq(config: Fields) -> Scheme:
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
    refuse_others(config, *known, *made, *run, "dynamic")
    expect(config, "pack_dtype", "int32")
    expect(config, "method", "gptq")
    for name in FORMAT:
        expect(config, name, "gptq", "gptq_v2")
    return _four_bits(
        config,
        "gptq",
        has_zeros=True,
        zero_offset=0 if _format(config) == "gptq_v2" else 1,
        unquantized=_without_rules(config),
        is_symmetric=None if config.get("sym") is None else config.flag("sym"),
        subtracts_words="gptqmodel" in str(config.object("meta").get("quantizer")).lower(),
    )


def _without_rules(config: Fields) -> tuple[str, ...]:
    """Return the modules that GPTQModel's `dynamic` leaves as they are; a rule that quantises otherwise is refused."""
    rules = config.object("dynamic")
    for pattern in rules:
        if not pattern.startswith(SKIPPED) and rules[pattern]:
            raise unsupported(f"{rules.place}: {short(pattern)}", rules[pattern], f"none, or a name with {SKIPPED!r}")
    names = tuple(REGEX + pattern.removeprefix(SKIPPED) for pattern in rules if pattern.startswith(SKIPPED))
    check_patterns(rules, names)
    return names


def read_awq(config: Fields) -> Scheme:
    known = ("quant_method", "bits", "group_size", "zero_point", "version", "modules_to_not_convert")
    refuse_others(config, *known, "backend", "do_fuse", "modules_to_fuse", "fuse_max_seq_len", "exllama_config")
    expect(config, "version", "gemm", "GEMM")
    if not config.flag("zero_point", True):
        raise unsupported(f"{config.place}: zero_point", False, "True")
    return _four_bits(config, "awq", has_zeros=True, unquantized=module_names(config, "modules_to_not_convert"))


def read_mxfp4(config: Fields) -> Scheme:
    refuse_others(config, "quant_method", "modules_to_not_convert", "dequantize")
    return Scheme("mxfp4", "group", (1, 32), unquantized=module_names(config, "modules_to_not_convert"), bits=4)


def read_pack_quantized(config: Fields) -> Scheme:
    groups = config.object("config_groups")
    schemes = {_read_int4_group(groups.object(name)) for name in groups}
    if len(schemes) != 1:
        raise unsupported("config_groups", dict(groups), "one group, or several that quantise alike")
    (scheme,) = schemes
    return replace(scheme, unquantized=module_names(config, "ignore"))


def _read_int4_group(group: Fields) -> Scheme:
    refuse_others(group, "targets", "weights", "format")
    expect(group, "format", "pack-quantized")
    require(group, ("weights",))
    weights = group.object("weights")
    known = ("num_bits", "type", "strategy", "symmetric", "group_size", "observer", "observer_kwargs", "actorder")
    refuse_others(weights, *known, "scale_dtype", "zp_dtype")
    expect(weights, "type", "int")
    expect(weights, "strategy", "group", "channel")
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
