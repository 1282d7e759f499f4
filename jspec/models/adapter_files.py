"""Reads low-rank adapters (LoRA) from folders in the format of PEFT.

    y = w x + s B A x         s = alpha / r, or alpha / sqrt(r) with use_rslora (arXiv:2312.03732)

The names of the tensors say which modules have an adapter; the config says the scales.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert import hub
from convert.fields import CheckpointError, Fields, listed, read_json, short
from convert.sources import Safetensors, Source

# Values of init_lora_weights with which PEFT leaves the weights of the model as they are.
KEPT_WEIGHTS = (None, True, False, "gaussian", "eva", "orthogonal")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
# Options of the config that change the computation, and what they are in an adapter that is read.
UNUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora", "use_bdlora"), (None, False)),
    **dict.fromkeys(
        (
            *("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"),
            *("alora_invocation_tokens", "arrow_config"),
        ),
        (None, [], {}),
    ),
}


@dataclass(frozen=True, eq=False)
class ModuleAdapter:
    """The adapter of one module, in float32: the module's output has ``b @ a @ x`` more."""

    a: np.ndarray  # [rank, inner]
    b: np.ndarray  # [out, rank], times the adapter's scale


@dataclass(frozen=True, eq=False)
class AdapterFile:
    """An adapter of a folder.

    Attributes:
        modules: the adapter of each module, by its name in the model that was trained.
        rank: largest rank.
        digest: digest of all that the adapter computes with.
    """

    modules: Mapping[str, ModuleAdapter]
    rank: int
    digest: bytes


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an existing folder with an adapter."""
    return (Path(path).expanduser() / CONFIG).is_file()


def read_adapter(path: str | os.PathLike[str]) -> AdapterFile:
    """Read an adapter.

    Args:
        path: folder or hub id ("owner/name") with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        FileNotFoundError: there is no such folder, or a file is missing.
        CheckpointError: the tensors do not match the config, or values are not finite.
        NotImplementedError: the config has an option that is not supported; the message names it.
    """
    folder = hub.find(path, adapter=True)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder}: expected {CONFIG} and {WEIGHTS} of a LoRA adapter, found no {name}; give the folder that "
                "PEFT's save_pretrained has written"
            )
    fields = read_json(folder / CONFIG)
    _check(fields)
    source = Safetensors([folder / WEIGHTS])
    modules = {name: _factors(name, tensors, fields, source) for name, tensors in sorted(_modules(source).items())}
    digest = hashlib.sha256()
    for name, factors in modules.items():
        digest.update(name.encode() + factors.a.tobytes() + factors.b.tobytes())
    rank = max(len(factors.a) for factors in modules.values())
    return AdapterFile(modules, rank, digest.digest())


def _check(fields: Fields) -> None:
    """Raise an error if the config has an option that changes what is computed."""
    if fields.text("peft_type") != "LORA":
        raise NotImplementedError(f'{fields.place}: peft_type: expected "LORA", got "{fields["peft_type"]}"')
    if fields.get("init_lora_weights") not in KEPT_WEIGHTS:
        raise NotImplementedError(
            f"{fields.place}: init_lora_weights: expected an adapter of unchanged weights, got "
            f"{short(fields['init_lora_weights'])}, which changes them; save it with PEFT's "
            "path_initial_model_for_weight_conversion, or merge it into its model"
        )
    for name, values in UNUSED.items():
        if fields.get(name) not in values:
            raise NotImplementedError(
                f"{fields.place}: {name}: expected {values[-1]!r}, got {fields[name]!r}; merge the adapter into its "
                "model with PEFT (merge_and_unload) and load that"
            )


def _modules(source: Source) -> dict[str, dict[str, str]]:
    """Return the names of the tensors "A" and "B" of each module.

    Raises:
        CheckpointError: there are other tensors, or one of the two is missing.
    """
    matches = {name: TENSOR.fullmatch(name) for name in source.tensors}
    others = [name for name, match in matches.items() if match is None]
    if others or not matches:
        raise CheckpointError(
            source.folder,
            f"expected tensors named base_model.model.MODULE.lora_A.weight and lora_B, got {listed(others) or 'none'}; "
            "adapters of embeddings, experts and whole modules are not supported: merge the adapter into its model",
        )
    modules: dict[str, dict[str, str]] = {}
    for name, match in matches.items():
        assert match is not None
        modules.setdefault(match[1], {})[match[2]] = name
    if single := [name for name, tensors in modules.items() if len(tensors) < 2]:
        raise CheckpointError(source.folder, f"expected lora_A and lora_B of each module, got one of {listed(single)}")
    return modules


def _factors(module: str, tensors: Mapping[str, str], fields: Fields, source: Source) -> ModuleAdapter:
    """Read the tensors of a module, and multiply B by the scale."""
    shapes = {part: source.tensors[name].shape for part, name in tensors.items()}
    rank = _of_module(fields, "rank_pattern", Fields.integer, module) or fields.integer("r")
    alpha = _of_module(fields, "alpha_pattern", Fields.number, module) or fields.number("lora_alpha", 8)
    if not len(shapes["A"]) == len(shapes["B"]) == 2 or not shapes["A"][0] == shapes["B"][1] == rank:
        raise CheckpointError(
            source.folder,
            f"{module}: expected lora_A [{rank}, inputs] and lora_B [outputs, {rank}], got {list(shapes['A'])} and "
            f"{list(shapes['B'])}; correct r or rank_pattern in {CONFIG}",
        )
    a, b = (source.joined([tensors[part]], shapes[part], "float32") for part in "AB")
    scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora", False) else rank)
    with np.errstate(over="ignore"):  # `jspec.models.adapters.as_tables` refuses infinity
        return ModuleAdapter(a, b * np.float32(scale))


def _of_module(fields: Fields, option: str, read: Callable[[Fields, str], Any], module: str) -> Any:
    """Return a module's value of a pattern option, whose keys are regular expressions of the ends of names, or None.

    Args:
        read: method of `Fields` that reads and checks a value.
    """
    patterns = fields.object(option)
    for key in patterns:
        value = read(patterns, key)
        try:
            is_of_module = re.fullmatch(rf"(.*\.)?({key})", module)
        except re.error as error:
            raise fields.error(option, f"regular expressions as keys ({short(key)}: {error})") from None
        if is_of_module:
            return value
    return None
