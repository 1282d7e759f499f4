"""Converted checkpoints: folders of `jspec.json` (the manifest), `weights/` (by orbax) and tokenizer files.

Every use of orbax is here. The weight tree is stored flat, under names such as "layers.3.qkv", which conversion prints.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from pallas_kernels.layers.quantized import Quantized

VERSION = 2
MANIFEST = "jspec.json"
WEIGHTS = "weights"
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = {"values", "scale"}  # the names under a quantised weight
READ_AHEAD = 2**30  # bytes that a restore may hold on the host beside its largest array


class WritesJson(Protocol):
    """A config that is stored in the manifest."""

    def to_json(self) -> dict[str, Any]: ...


Placement = Callable[[str], jax.sharding.Sharding]  # parameter name -> sharding


@dataclass(frozen=True)
class Checkpoint:
    """A model in memory.

    Attributes:
        kind: "target", "eagle3", "eagle" or "medusa".
        config: the config record of the kind.
        weights: tree of dicts and lists of arrays.
        folder: the folder that it was read from.
    """

    kind: str
    config: Any
    weights: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class Header:
    """The contents of a folder without the weights.

    Attributes:
        kind: "target", "eagle3", "eagle" or "medusa".
        config: the manifest's fields as `read_header` returns it; the config record as jspec returns it.
        parameters: shape and dtype by name.
        folder: the folder that it was read from.
    """

    kind: str
    config: Any
    parameters: dict[str, jax.ShapeDtypeStruct]
    folder: Path


def flatten(tree: Mapping[str, Any] | list[Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a weight tree by name: {"layers": [{"o": x}]} becomes {"layers.0.o": x}."""
    flat: dict[str, Any] = {}
    for key, node in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        node = {"values": node.values, "scale": node.scale} if isinstance(node, Quantized) else node
        nested = isinstance(node, (Mapping, list))
        flat.update(flatten(node, f"{prefix}{key}.") if nested else {f"{prefix}{key}": node})
    return flat


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`: children 0, 1, ... become a list, `values` and `scale` become a `Quantized`."""
    children: dict[str, dict[str, Any]] = {}
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        head, dot, rest = name.partition(".")
        if dot:
            children.setdefault(head, {})[rest] = leaf
        else:
            tree[head] = leaf
    tree |= {head: unflatten(nested) for head, nested in children.items()}
    if tree and all(key.isdigit() for key in tree):
        return [tree[str(index)] for index in range(len(tree))]  # type: ignore[return-value]
    return Quantized(**tree) if set(tree) == QUANTIZED else tree  # type: ignore[return-value]


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder was written by `save`."""
    return (folder / MANIFEST).is_file()


def companions(folder: Path) -> list[Path]:
    """The files of a model's folder that are copied with its weights: tokenizer and configs."""
    return [folder / name for name in COMPANIONS if (folder / name).is_file()]


def save(
    folder: str | Path,
    kind: str,
    config: WritesJson,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    files: Iterable[Path] = (),
    overwrite: bool = False,
    compress: bool = False,
) -> None:
    """Writes a checkpoint folder, all or nothing: an unfinished folder never has the final name.

    Args:
        folder: the folder to write; its parent is created.
        kind: "target", "eagle3", "eagle" or "medusa".
        config: stored in the manifest.
        batches: flat parameters, a few at a time; one batch is held in memory.
        files: to copy into the folder (tokenizer files).
        overwrite: replace an existing checkpoint.
        compress: worth it only for weights that are mostly zeros; takes time and a second copy of a batch.

    Raises:
        FileExistsError: if the folder exists and may not be replaced.
    """
    folder = Path(folder).absolute()
    check_vacant(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_weights(work / WEIGHTS, batches, compress)
        for file in files:
            shutil.copyfile(file, work / file.name)
        about = {"version": VERSION, "kind": kind, "config": config.to_json()}
        manifest = about | {"file_sizes": _file_sizes(work / WEIGHTS)}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        work.chmod(0o755)  # mkdtemp makes a folder that only its owner can read
        _move(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _move(work: Path, folder: Path) -> None:
    """Renames `work` to `folder`; an existing folder is deleted only after that."""
    if not folder.exists():
        work.rename(folder)
        return
    old = work.with_name(f"{work.name}.old")
    folder.rename(old)
    try:
        work.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)


def check_vacant(folder: Path, overwrite: bool) -> None:
    """Raises FileExistsError if `folder` exists and `save` may not replace it."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{folder}: expected a new folder, got an existing one; pass --overwrite to replace it")
    if not is_checkpoint(folder):
        raise FileExistsError(f"{folder}: expected a converted checkpoint to replace, got something else; delete it")


def _write_weights(folder: Path, batches: Iterable[dict[str, np.ndarray]], compress: bool) -> None:
    context = ocp.Context()
    # Compression and a defensive copy of the host arrays would each hold a second copy of a batch.
    context.array.saving.use_compression = compress
    context.memory.deepcopy_host_arrays = False
    with context:
        for batch in batches:
            ocp.partial.save(folder, batch)
            del batch  # before the next one is read
        ocp.partial.finalize(folder)


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file, to find truncated ones: orbax reports those with long errors of no common class."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def read_header(folder: Path) -> Header:
    """Reads kind, config and the parameters' shapes.

    Raises:
        ValueError: if the folder is damaged or of another format version.
    """
    with named_damage(folder):
        manifest = json.loads((folder / MANIFEST).read_text())
        version = manifest["version"]
    if version != VERSION:
        raise ValueError(f"{folder}: expected format version {VERSION}, got {version}; convert the model again")
    with named_damage(folder):
        sizes = _file_sizes(folder / WEIGHTS)
        broken = [name for name, size in manifest["file_sizes"].items() if sizes.get(name) != size]
        if broken:
            raise ValueError(f"absent or incomplete files in {WEIGHTS}: {', '.join(broken)}")
        stored = ocp.metadata(folder / WEIGHTS).metadata
        parameters = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in stored.items()}
        return Header(manifest["kind"], manifest["config"], parameters, folder)


def read_arrays(
    header: Header,
    *,
    dtype: str | None = None,
    placement: Placement | None = None,
    names: Iterable[str] | None = None,
) -> dict[str, jax.Array]:
    """Restores parameters in the wanted dtype on their devices.

    Args:
        header: of the folder.
        dtype: of the floating-point parameters; quantised ones and None: as stored.
        placement: sharding by parameter name; None: the default device.
        names: which parameters; None: all.

    Returns:
        Flat parameters.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    names = list(header.parameters) if names is None else list(names)
    wanted = {}
    for name in names:
        leaf = header.parameters[name]
        is_kept = dtype is None or leaf.dtype.kind in "biu" or name.rpartition(".")[2] in QUANTIZED
        sharding = placement(name) if placement else device
        wanted[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if is_kept else dtype, sharding=sharding)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    largest = max(4 * leaf.size for leaf in wanted.values())
    context.memory.read_concurrent_bytes = READ_AHEAD + largest  # orbax needs more than the bytes of any single array
    with context:
        arrays = ocp.load(header.folder / WEIGHTS, wanted)
    narrowed = [name for name in names if wanted[name].dtype == "float16" != header.parameters[name].dtype]
    if overflown := [name for name in narrowed if jax.numpy.isinf(arrays[name]).any()]:
        raise ValueError(
            f"{header.folder}: expected values within float16's 65504, got larger ones in "
            f"{', '.join(overflown)}; use bfloat16"
        )
    return arrays


@contextlib.contextmanager
def named_damage(folder: Path) -> Iterator[None]:
    """Turn errors while a manifest is read into a ValueError that names the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: damaged checkpoint ({error}); convert the model again") from error
