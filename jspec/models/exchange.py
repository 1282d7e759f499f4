"""Makes a model from arrays with the names of a Hugging Face checkpoint, without a file and without the host.

The weight map of the model's family says how, as for files (`convert.huggingface`). One program makes all parameters,
so arrays of a trainer on a GPU stay there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from convert import huggingface, orbax
from convert.detect import LATER_TENSORS
from convert.huggingface import MapRow, renamed
from convert.sources import Shape, Source, Tensor
from jspec.models import families
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.decoder import Layer, Model
from jspec.models.load import OTHER_INPUTS, text_names
from jspec.models.mlps.mlp_config import Experts
from jspec.models.mlps.shared_expert import is_joined, join_layers
from jspec.models.parts.transfer import with_auto_axes


@final
class Arrays(Source):
    """Arrays of jax or numpy by the names of tensors; nothing is read piece by piece."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__(())
        self.arrays = arrays
        self.tensors = {
            name: Tensor(tuple(array.shape), np.dtype(array.dtype).name, Path("weights"))
            for name, array in arrays.items()
        }

    def _headers(self, file: Path) -> dict[str, Tensor]:
        raise NotImplementedError("arrays have no files")

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        raise NotImplementedError("arrays are joined as a whole")

    def joined(self, names: Iterable[str], shape: Shape, dtype: str) -> Any:
        parts = [jnp.asarray(self.arrays[name]).astype(dtype).reshape(-1) for name in names]
        return (parts[0] if len(parts) == 1 else jnp.concatenate(parts)).reshape(shape)

    def check_equal(self, first: str, other: str) -> None:
        """Do nothing: a program cannot compare values, and a trainer with tied weights has one array for both."""


FOR_OTHER_INPUTS = tuple(itertools.chain(*OTHER_INPUTS.values()))  # prefixes of tensors for images and sound
Form = Callable[[str, Any], Any]  # stored name, array -> array in the layout of a checkpoint


def as_is(name: str, array: Any) -> Any:
    """Return an array that has the layout of a checkpoint."""
    return array


def from_names(arrays: Mapping[str, Any], config: ModelConfig, dtype: str, form: Form = as_is) -> Model:
    """Make a model from arrays by the names of a Hugging Face checkpoint of its family.

    Args:
        arrays: arrays of jax or numpy in any floating-point dtype, with or without the prefix of a text model in a
            checkpoint with an image encoder. Those for images, and of layers that predict further tokens, are left out.
        config: config of the model.
        dtype: dtype of the parameters.
        form: function of a stored name and an array that brings the array into the layout of a checkpoint.

    Returns:
        The model, none of whose buffers is one of ``arrays``.

    Raises:
        ValueError: names, shapes or dtypes are not those of the config.
    """
    rows, fill = _reader(config, dtype, tuple(sorted(arrays)), form)
    arrays = {name: with_auto_axes(array) for name, array in arrays.items() if not _is_left_out(name, config)}
    huggingface.check(rows, Arrays(jax.eval_shape(partial(_formed, form), arrays)).tensors)
    return Model.from_weights(config, orbax.unflatten(fill(arrays), {}))


@lru_cache(maxsize=8)
def _reader(
    config: ModelConfig, dtype: str, stored: tuple[str, ...], form: Form
) -> tuple[Sequence[MapRow], Callable[..., Any]]:
    """Return the weight map of stored names, and a program that fills it, compiled once for arrays of equal shapes."""
    names = {name: each for name, each in text_names(stored).items() if not _is_left_out(each, config)}
    rows = renamed(families.family_of(config.family).weights(config, names), names)
    return rows, jax.jit(partial(_filled, rows, dtype, form))


def joined_like(model: Model, other: Model) -> Model:
    """Return a model whose shared experts are joined to its experts, if those of the other model are."""
    pairs = zip(other.config.mlps, other.layers, strict=True)
    if not any(isinstance(mlp, Experts) and is_joined(mlp, layer) for mlp, layer in pairs):
        return model
    layers = [dict(vars(layer)) for layer in model.layers]
    join_layers(model.config.mlps, layers)
    return model.replace(layers=[Layer(**layer) for layer in layers])  # type: ignore[attr-defined]


def _is_left_out(name: str, config: ModelConfig) -> bool:
    """Return whether a stored tensor is for images, or of a layer after the last one, which predicts further tokens."""
    (bare,) = text_names([name])
    layer = re.match(r"model\.layers\.(\d+)\.", bare)
    return (
        name.startswith(FOR_OTHER_INPUTS)
        or bool(LATER_TENSORS.fullmatch(bare))
        or (layer is not None and int(layer[1]) >= config.num_layers)
    )


def _formed(form: Form, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: form(name, array) for name, array in arrays.items()}


def _filled(rows: Iterable[MapRow], dtype: str, form: Form, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a weight map by name."""
    source = Arrays(_formed(form, arrays))
    return {row.parameter: row.fill(source, row, row.dtype or dtype) for row in rows}
