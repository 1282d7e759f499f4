"""What must be equal in all processes that make an engine together."""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields
from typing import Any

import jax
import numpy as np

from jspec.core.config import EngineConfig
from jspec.step.program import Params, Program

OWN = ("mesh", "compile_cache", "log_interval")  # options that may differ; of a mesh, the devices are compared
ADDRESS = r" at 0x[0-9a-f]+"  # in representations of functions and of drafters of the user's own


def compared(program: Program, params: Params, config: EngineConfig) -> dict[str, str]:
    """Return options, devices in their order, models, drafter and shapes of the weights, as texts by name."""
    assert program.mesh is not None
    about = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in OWN}
    about |= {field.name: getattr(program, field.name) for field in fields(program) if field.name != "mesh"}
    about |= {"mesh": [device.id for device in program.mesh.devices.flat], "model": params.main.config}
    about |= {name: _shape(leaf) for name, leaf in _named(params)}
    return {name: re.sub(ADDRESS, "", repr(value)) for name, value in about.items()}


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _shape(leaf: jax.Array) -> str:
    return f"{leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec}"  # type: ignore[attr-defined]


def sample(params: Params) -> str:
    """Return a digest of the first rows of weights that every device has whole: norms, for instance."""
    digest = hashlib.sha256()
    for _, leaf in _named(params):
        if leaf.sharding.is_fully_replicated:
            data = leaf.addressable_data(0)
            digest.update(np.asarray(data[:1] if data.ndim else data).tobytes())
    return digest.hexdigest()[:16]
