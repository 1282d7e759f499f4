"""Reads the files of EAGLE heads (config.json, tensor names, vocabulary maps) in the formats of all known exporters.

The config.json of the EAGLE authors is a Llama config. SpecForge and ModelOpt add the key `eagle_config` to it, and
AutoModel further keys. The exporter speculators puts the layer's config under `transformer_layer_config`. vLLM's
EAGLE-1 files put the authors' config under `model`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convert.fields import CheckpointError, Fields, require, short
from convert.huggingface import MapRow, renamed
from convert.sources import Source
from jspec.draft.eagle_head import head_params
from jspec.draft.formats.head_layers import check_tensors, common_name, read_layers, with_count
from jspec.draft.formats.head_weights import head_weights
from jspec.draft.head_config import METHODS, HeadConfig, Overrides
from jspec.models.load import Format, check_count, with_scheme
from jspec.models.parts.checks import unsupported
from jspec.models.parts.param_spec import Params

MASK_TOKEN = ("mask_token_id", "ptd_token_id", "pard_token")  # names of the mask token's id
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET_LAYERS = ("num_target_layers", "target_num_hidden_layers")

# Options that change a head's forward pass, each with its only supported value.
MODELOPT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "eh_proj_before_attn": False,
}
OPTIONS: dict[str, Any] = {
    "parallel_draft_step": 1,
    "parallel_drafting": False,
    **dict.fromkeys(MASK_TOKEN),  # P-EAGLE heads only
    "dflash_config": None,
}
EAGLE3 = {**OPTIONS, **MODELOPT}
PEAGLE = {name: value for name, value in EAGLE3.items() if name not in (*MASK_TOKEN, "parallel_drafting")}
EAGLE = {
    **OPTIONS,
    **MODELOPT,
    "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
    "use_aux_hidden_state": False,
    "add_para_norm": False,
    "skip_prenorm": True,
    "skip_output_norm": True,
    "logit_scale": 1.0,
}
SUPPORTED: dict[str, Mapping[str, Any]] = {"eagle3": EAGLE3, "peagle": PEAGLE, "eagle": EAGLE}


@dataclass(frozen=True)
class Parts:
    """The parts of one EAGLE head's config.json.

    Attributes:
        source_format: name of the exporter.
        layer: the part that describes the decoder layer.
        outer: the top level of the file.
        nested: the value of `eagle_config` at the top level; {} if there is none.
    """

    source_format: str
    layer: Fields
    outer: Fields
    nested: Fields

    @classmethod
    def of(cls, config: Fields) -> Parts:
        nested = config.object("eagle_config")
        if "speculators_model_type" in config:
            require(config, ("transformer_layer_config",))
            return cls("speculators", config.object("transformer_layer_config"), config, nested)
        if config.text("model_type", "") == "eagle":
            require(config, ("model",))
            return cls("vllm", config.object("model"), config, nested)
        if "LlamaEagle3DraftModel" in (architectures := config.texts("architectures")):
            return cls("automodel", config, config, nested)
        if nested.keys() & (MODELOPT.keys() | {"parallel_draft_step", "return_hidden_post_norm"}):
            return cls("modelopt", config, config, nested)
        specforge = nested or config.keys() & {"fc_norm", "norm_output"} or "PEagleDraftModel" in architectures
        return cls("specforge" if specforge else "official", config, config, nested)

    def values(self, *names: str) -> list[Any]:
        """Return the distinct values under any of the names, in any part of the file."""
        parts = (self.outer, self.nested, self.layer)
        values = [part[name] for part in parts for name in names if part.get(name) is not None]
        return [value for index, value in enumerate(values) if value not in values[:index]]

    def one(self, *names: str, default: Any = None, remedy: str = "correct config.json") -> Any:
        """Read the value that the file has under any of the names.

        Args:
            names: alternative names of one option.
            default: value if the file has none.
            remedy: what the user shall do, for the error message.

        Raises:
            CheckpointError: the file has several different values.
        """
        values = self.values(*names)
        if len(values) > 1:
            raise CheckpointError(", ".join(names), f"expected one value, got {short(values)} in config.json; {remedy}")
        return values[0] if values else default

    def flag(self, *names: str, default: bool = False, remedy: str = "correct config.json") -> bool:
        """Read true or false under any of the names; arguments and errors as `one`."""
        return self._single(names, remedy).flag(names[0], default)

    def integer(self, *names: str, default: int) -> int:
        """Read the integer above 0 under any of the names; arguments and errors as `one`."""
        return self._single(names).integer(names[0], default)

    def _single(self, names: Sequence[str], remedy: str = "correct config.json") -> Fields:
        """Make an object with the one value of an option under the option's first name."""
        return Fields({names[0]: self.one(*names, remedy=remedy)}, self.outer.place)


def head_format(method: str, overrides: Overrides | None = None) -> Format:
    """Return the format of EAGLE heads, for files of any exporter.

    Args:
        method: "eagle3", "peagle", or "eagle" for EAGLE-1 and 2.
        overrides: config values that replace those of the file.
    """
    replacements = overrides or Overrides()

    def from_hf(fields: Fields, source: Source) -> tuple[HeadConfig, list[MapRow]]:
        names = {common_name(name): name for name in source.tensors}
        check_tensors(names)
        config = read_head(fields, method, replacements, names)
        check_count("num_hidden_layers", config.num_layers, source.tensors)
        shapes = {bare: source.tensors[name].shape for bare, name in names.items()}
        return config, renamed(head_weights(config, shapes), names)

    def from_json(fields: Fields) -> HeadConfig:
        if fields.text("method") != method:
            raise fields.error("method", f"{method!r}, the kind of the checkpoint")
        return HeadConfig.from_json(fields)

    def params(config: HeadConfig, names: Collection[str]) -> Params:
        check_count("num_layers", config.num_layers, names)
        return head_params(config, has_embed="embed" in names, has_head="head" in names)

    return Format(with_scheme(from_hf), from_json, params, replacements.apply)


def read_head(
    config: Mapping[str, Any], method: str, overrides: Overrides | None = None, names: Collection[str] = ()
) -> HeadConfig:
    """Read the config.json of an EAGLE head.

    Args:
        config: parsed config.json.
        method: "eagle3", "peagle", or "eagle" for EAGLE-1 and 2.
        overrides: config values that replace those of the file.
        names: names of the tensors in the file, without the prefix `model.`, for what the config leaves open: biases
            and norms of the layers, and the number of layers.

    Returns:
        The config. If the file gives no rotary base, the base is 10000, even if the target's base is another.

    Raises:
        CheckpointError: keys are missing, a value has another type, or values contradict each other; the message names
            the argument that decides.
        NotImplementedError: an option is not supported.
    """
    overrides = overrides or Overrides()
    parts = Parts.of(Fields.of(config))
    _check_options(parts, SUPPORTED[method])
    layer = Fields({**parts.layer, "qkv_bias": parts.flag("qkv_bias")}, parts.layer.place)
    if method != "eagle" and parts.source_format != "speculators":
        layer = with_count(layer, names)
    is_exact = parts.source_format == "speculators"
    fields = read_layers(layer, names, theta=overrides.rope_theta, is_exact=is_exact)
    fuses = method != "eagle" and parts.flag("use_aux_hidden_state", default=True)
    if method == "peagle":
        fields["mask_token_id"] = _mask_token(parts, overrides.mask_token_id)
    return METHODS[method].of_method(
        **fields,
        draft_vocab_size=parts.integer("draft_vocab_size", "truncated_vocab_size", default=fields["vocab_size"]),
        target_hidden_size=parts.integer("target_hidden_size", default=fields["hidden_size"]),
        feature_layers=_feature_layers(parts, fuses) if overrides.feature_layers is None else overrides.feature_layers,
        source_format=parts.source_format,
        norm_before_residual=_norm_before_residual(parts, overrides.norm_before_residual),
        norm_before_fc=parts.flag("norm_before_fc"),
        fc_norm=parts.flag("fc_norm"),
        norm_output=method != "peagle" and _norm_output(parts, overrides.norm_output),
        fc_bias=_fc_bias(parts, method),
        fuse=fuses,
    )


def _check_options(parts: Parts, supported: Mapping[str, Any]) -> None:
    for name, value in supported.items():
        for got in parts.values(name):
            if got != value or isinstance(got, bool) != isinstance(value, bool):
                raise unsupported(name, got, "none" if value is None else str(value))


def _norm_before_residual(parts: Parts, override: bool | None) -> bool:
    if override is not None:
        return override
    remedy = "pass norm_before_residual=True if the first residual is the normed hidden state, else False"
    if parts.source_format == "speculators" and not parts.values("norm_before_residual"):
        # Its tools and vLLM take different defaults.
        raise CheckpointError("norm_before_residual", f"expected in a speculators config.json, got none; {remedy}")
    return parts.flag("norm_before_residual", remedy=remedy)


def _norm_output(parts: Parts, override: bool | None) -> bool:
    if override is not None:
        return override
    remedy = "pass norm_output=True if the normed output is fed back (EAGLE-3.1), else False (plain EAGLE-3)"
    value = parts.flag("norm_output", "return_hidden_post_norm", remedy=remedy)
    if value and parts.source_format == "specforge":
        raise CheckpointError(
            "norm_output", "expected to know what is fed back, got true in a SpecForge config.json, which older and "
            f"newer versions of SpecForge understand differently; {remedy}",
        )  # fmt: skip
    return value


def _mask_token(parts: Parts, override: int | None) -> int:
    """Read the id of the token that stands for tokens that are not drafted yet."""
    if override is not None:
        return override
    remedy = "pass mask_token_id= with the id that the head was trained with"
    token = parts.one(*MASK_TOKEN, remedy=remedy)
    if token is None:
        raise CheckpointError(
            "mask_token_id", f"expected {' or '.join(MASK_TOKEN)} in a P-EAGLE config.json, got none; {remedy}"
        )
    return Fields({"mask_token_id": token}, parts.outer.place).integer("mask_token_id", least=0)


def _fc_bias(parts: Parts, method: str) -> bool:
    """Read whether `fc` has a bias.

    In the EAGLE-1 authors' code `fc` has a bias unless `bias` is false. In vLLM it has one if `eagle_fc_bias` is true.
    """
    if parts.source_format == "vllm":
        return parts.flag("eagle_fc_bias")
    return parts.flag("bias", default=method == "eagle")


def _feature_layers(parts: Parts, fuses: bool) -> tuple[int, ...] | None:
    """Read the indices of the target states that the head reads, ascending, as all exporters concatenate them.

    The ids in the file are indices of states, with one exception. Ids in `eagle_config` whose lowest is 1 are indices
    of layers, unless one id is the target's number of layers. The output of layer j is state j + 1.
    """
    lists = set()
    for part in (parts.nested, parts.outer):
        ids = sorted(part.integers(IDS))
        if ids:
            are_layers = part is parts.nested and ids[0] == 1 and ids[-1] not in parts.values(*TARGET_LAYERS)
            lists.add(tuple(i + are_layers for i in ids))
    if len(lists) > 1 or (lists and not fuses):
        raise CheckpointError(
            IDS, f"expected {'one list' if fuses else 'none, as use_aux_hidden_state is false'}, got the states "
            f"{short(sorted(lists))}; pass feature_layers= with the target state indices",
        )  # fmt: skip
    return next(iter(lists), None)
