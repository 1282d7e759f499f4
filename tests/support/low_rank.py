"""Low-rank adapters written to folders, and merged into the weights of targets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from safetensors.numpy import save_file

from jspec import Model
from jspec.models import adapters
from jspec.models.adapter_files import AdapterFile


def write(folder: Path, adapter: AdapterFile) -> Path:
    """Write an adapter in PEFT's format, with a scale of 1, and return its folder."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.rank}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    factors = {f"lora_{part.upper()}": part for part in "ab"}
    arrays = {
        f"base_model.model.{name}.{tensor}.weight": getattr(module, part)
        for name, module in adapter.modules.items()
        for tensor, part in factors.items()
    }
    save_file(arrays, folder / "adapter_model.safetensors")
    return folder


def merged(target: Model, adapter: AdapterFile) -> Model:
    """Return a target of float32 whose weights contain an adapter."""

    def merge(layer: Any, table: Any) -> Any:
        sums = {name: getattr(layer, name) + jnp.asarray(pair.b @ pair.a) for name, pair in table.items()}
        return replace(layer, **sums)

    tables = adapters.as_tables(adapter, target, adapter.rank)
    return replace(target, layers=[merge(*pair) for pair in zip(target.layers, tables, strict=True)])
