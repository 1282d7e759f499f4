"""Reads and writes converted checkpoints: folders of `jspec.json` (the manifest), `weights/` and tokenizer files.

Orbax writes and reads `weights/`; besides this file, only `jspec/train/checkpoints.py` uses it. It is imported where it
is called, because its import takes a quarter of a second. The tree of weights is stored as arrays with names such as
"layers.3.qkv".
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from convert.detect import KINDS
from convert.fields import CheckpointError, Fields, cut, listed, read_json, require
from convert.sources import is_finite
from pallas_kernels.layers.weights import FORMATS, Kind, Quantized

VERSION = 3  # the third has other orders of the bytes of packed weights than the second
OLDEST = 2  # read too, if the folder has no packed weights
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
    "additional_chat_templates/*.jinja",
)
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED = {"values", "scale", "zeros"}  # names of the arrays of a quantised weight; not all have zero points
SAMPLED = 256  # number of values at either end of a weight that are compared instead of all
READ_AHEAD = 2**30  # bytes that orbax may hold on the host in addition to the largest array, while it reads


class WritesJson(Protocol):
    """The interface of config records that can be stored in the manifest."""

    def to_json(self) -> dict[str, Any]: ...


Placement = Callable[[str], jax.sharding.Sharding]  # function (parameter name) -> sharding


@dataclass(frozen=True)
class Checkpoint:
    """A model or a draft head whose weights are in memory.

    Attributes:
        kind: kind of checkpoint, one of `convert.detect.KINDS`.
        config: config record for this kind.
        weights: tree of dicts and lists of arrays.
        folder: folder that the checkpoint was read from.
    """

    kind: str
    config: Any
    weights: dict[str, Any]
    folder: Path


@dataclass(frozen=True)
class Header:
    """A checkpoint's metadata, without the values of the weights.

    Attributes:
        kind: kind of checkpoint, one of `convert.detect.KINDS`.
        config: config of the checkpoint; `convert.orbax.read_header` gives a dict, `jspec.models.load.read_header` a
            config record.
        parameters: shape and dtype of each parameter, by name.
        folder: folder of the checkpoint.
        quantized: kind of each quantised weight, by name; its arrays have names such as "layers.3.qkv.values".
        samples: digest of `sample` of all parameters; "" if the files have none.
    """

    kind: str
    config: Any
    parameters: dict[str, jax.ShapeDtypeStruct]
    folder: Path
    quantized: Mapping[str, Kind] = field(default_factory=dict)
    samples: str = ""


def flatten(tree: Mapping[str, Any] | list[Any], prefix: str = "") -> dict[str, Any]:
    """Return the arrays of a tree of weights by name; for example {"layers.0.o": x} for {"layers": [{"o": x}]}.

    Args:
        tree: tree of dicts, lists, arrays and `Quantized` weights.
        prefix: text before each name.
    """
    flat: dict[str, Any] = {}
    for key, node in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        node = node.arrays if isinstance(node, Quantized) else node
        nested = isinstance(node, (Mapping, list))
        flat.update(flatten(node, f"{prefix}{key}.") if nested else {f"{prefix}{key}": node})
    return flat


def kinds_of(tree: Any) -> dict[str, Kind]:
    """Return the kind of each `Quantized` weight of a tree, by the names of `flatten`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Quantized))
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name: leaf.kind for name, leaf in named.items() if isinstance(leaf, Quantized)}


def unflatten(leaves: Mapping[str, Any], quantized: Mapping[str, Kind] | None = None, prefix: str = "") -> Any:
    """Return the tree of weights for arrays by name; the inverse of `flatten`.

    Children with the names 0, 1, ... become a list.

    Args:
        leaves: arrays by name.
        quantized: kind of each weight whose arrays become a `Quantized`, by name; None: there are none.
        prefix: text before each name in `quantized`.
    """
    if quantized and prefix[:-1] in quantized:
        return Quantized(**leaves, kind=quantized[prefix[:-1]])
    children: dict[str, dict[str, Any]] = {}
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        head, dot, rest = name.partition(".")
        if dot:
            children.setdefault(head, {})[rest] = leaf
        else:
            tree[head] = leaf
    tree |= {head: unflatten(nested, quantized, f"{prefix}{head}.") for head, nested in children.items()}
    if tree and all(key.isdigit() for key in tree):
        return [tree[str(index)] for index in range(len(tree))]
    return tree


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a converted checkpoint, written by `save`."""
    return (folder / MANIFEST).is_file()


def companions(folder: Path) -> dict[str, Path]:
    """List the tokenizer and config files of a model's folder, which the converter copies, by their relative paths."""
    files = (file for name in COMPANIONS for file in sorted(folder.glob(name)))
    return {str(file.relative_to(folder)): file for file in files if file.is_file()}


def save(
    folder: str | Path,
    kind: str,
    config: WritesJson,
    batches: Iterable[dict[str, np.ndarray]],
    *,
    quantized: Mapping[str, str] | None = None,
    files: Mapping[str, Path] | None = None,
    overwrite: bool = False,
    compress: bool = False,
) -> None:
    """Write a converted checkpoint under a temporary name, and renames the folder when it is complete.

    Args:
        folder: folder to write; missing parents are created.
        kind: kind of checkpoint, one of `convert.detect.KINDS`.
        config: config record, which is stored in the manifest.
        batches: batches of parameters by name; one batch is held in memory.
        quantized: kind of each quantised weight, by name; None: no weight is quantised.
        files: files to copy into the folder (tokenizer files), by their paths in it.
        overwrite: whether an existing converted checkpoint may be replaced.
        compress: whether to compress the weights, for weights that are mostly zeros. Compression takes time, and memory
            for a second copy of each batch.

    Raises:
        FileExistsError: the folder exists and may not be replaced.
    """
    folder = Path(folder).absolute()
    check_vacant(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        samples = _write_weights(work / WEIGHTS, batches, compress)
        for name, file in (files or {}).items():
            (work / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, work / name)
        about = {"version": VERSION, "kind": kind, "config": config.to_json(), "quantized": dict(quantized or {})}
        manifest = about | {"samples": samples, "file_sizes": _file_sizes(work / WEIGHTS)}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        work.chmod(0o755)  # mkdtemp has made the folder readable for its owner only
        _move(work, folder)
    except BaseException:
        with contextlib.redirect_stderr(io.StringIO()):
            _remove(work)
        raise


def _remove(work: Path) -> None:
    """Delete a folder repeatedly for up to 3 seconds, because threads of orbax may still write into it."""
    gone = 0
    for _ in range(50):
        shutil.rmtree(work, ignore_errors=True)
        gone = 0 if work.exists() else gone + 1
        if gone == 4:
            return
        time.sleep(0.05)


def _move(work: Path, folder: Path) -> None:
    """Rename the folder `work` to `folder`, and delete the folder that had this name before, if any."""
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
    """Raise FileExistsError if `folder` exists and `save` may not replace it."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{folder}: expected a new folder, got an existing one; pass --overwrite to replace it")
    if not is_checkpoint(folder):
        raise FileExistsError(f"{folder}: expected a converted checkpoint to replace, got something else; delete it")


def sample(array: Any) -> bytes:
    """Return the bytes of the first and the last values of an array."""
    flat = array.reshape(-1)
    return b"".join(np.asarray(part).tobytes() for part in (flat[:SAMPLED], flat[-SAMPLED:]))


def _write_weights(folder: Path, batches: Iterable[dict[str, np.ndarray]], compress: bool) -> str:
    """Write parameters, and return a digest of samples of their values, which does not depend on the batches."""
    from orbax.checkpoint import v1 as ocp

    digests: dict[str, str] = {}
    context = ocp.Context()
    # Compression and a defensive copy of the host arrays would each hold a second copy of a batch.
    context.array.saving.use_compression = compress
    context.memory.deepcopy_host_arrays = False
    with context:
        for batch in batches:
            digests |= {name: hashlib.sha256(sample(array)).hexdigest() for name, array in batch.items()}
            with _named_failure(folder):
                ocp.partial.save(folder, batch)
            del batch  # free this batch before the next one is read
        with _named_failure(folder):
            ocp.partial.finalize(folder)
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the error logs of orbax and its tasks while the context is open; the caller raises an error instead."""
    orbax_log, asyncio_log = logging.getLogger("absl"), logging.getLogger("asyncio")
    level = orbax_log.level
    orbax_log.setLevel(logging.CRITICAL)
    asyncio_log.addFilter(_is_of_others)
    try:
        yield
    finally:
        orbax_log.setLevel(level)
        asyncio_log.removeFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    """Return whether a log record is not from tensorstore, which names itself in its messages."""
    return "tensorstore" not in record.getMessage()


@contextlib.contextmanager
def _named_failure(folder: Path) -> Iterator[None]:
    """Turn any error of writing weights in the context into an OSError that names the cause and the folder."""
    try:
        with _quiet(), contextlib.redirect_stderr(io.StringIO()):  # threads of tensorstore print tracebacks to stderr
            yield
    except MemoryError:
        raise
    except Exception as error:  # any class: orbax and tensorstore raise many
        free = shutil.disk_usage(folder.parent).free
        reason = next((text for text in map(os.strerror, WRITE_ERRORS) if text in str(error)), cut(str(error), 200))
        raise OSError(
            f"{folder.parent.parent}: expected to write the weights there, got an error ({reason}; {free:,} bytes are "
            "free); nothing was kept, make room and convert again"
        ) from error


def _file_sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file in bytes, by path relative to the folder."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def read_header(folder: Path) -> Header:
    """Read the kind, the config and the parameter shapes of a converted folder, but no weights.

    Raises:
        CheckpointError: the folder is damaged or has another format version.
    """
    from orbax.checkpoint import v1 as ocp

    with _named_damage(folder):
        manifest = read_json(folder / MANIFEST)
        version = manifest.integer("version")
    other = CheckpointError(folder, f"expected format version {VERSION}, got {version}; convert the model again")
    if not OLDEST <= version <= VERSION:
        raise other
    with _named_damage(folder):
        kind, config, wanted = manifest.text("kind"), manifest.object("config"), manifest.object("file_sizes")
        require(manifest, ("config", "file_sizes"))
        if kind not in KINDS:
            raise manifest.error("kind", f"one of {', '.join(KINDS)}")
        sizes = _file_sizes(folder / WEIGHTS)
        if broken := [name for name, size in wanted.items() if sizes.get(name) != size]:
            raise ValueError(f"absent or incomplete files in {WEIGHTS}: {listed(broken)}")
        stored = ocp.metadata((folder / WEIGHTS).absolute()).metadata
        parameters = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in stored.items()}
        samples = manifest.text("samples", "")
    if version < VERSION and any(leaf.dtype == np.uint8 for leaf in parameters.values()):
        raise other
    with _named_damage(folder):
        return Header(kind, config, parameters, folder, _kinds_in(manifest, parameters), samples)


def _kinds_in(manifest: Fields, parameters: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Kind]:
    """Return the kind of each quantised weight of a folder, by name; folders without kinds tell them by their dtypes.

    Raises:
        ValueError: a kind is unknown, or an array does not have its dtype.
    """
    found = dict(manifest.object("quantized"))
    dtypes = {name: leaf.dtype.name for name, leaf in parameters.items()}
    for name in {name.removesuffix(".values") for name in dtypes if name.endswith(".values")} | found.keys():
        stored = dtypes.get(f"{name}.values"), dtypes.get(f"{name}.scale")
        fitting = [kind for kind, form in FORMATS.items() if stored == (form.dtype, form.scale_dtype)]
        if not fitting or found.setdefault(name, fitting[0]) not in fitting:
            kinds = ", ".join(fitting) or "a kind of quantisation"
            raise ValueError(f"{name}: expected {kinds} for arrays of {stored}, got {found.get(name)}")
    return found


def read_arrays(
    header: Header,
    *,
    dtype: str | None = None,
    placement: Placement | None = None,
    names: Iterable[str] | None = None,
    kept: Collection[str] = (),
) -> dict[str, jax.Array]:
    """Reads parameters of a converted folder onto the devices; returns them by name.

    Args:
        header: header of the folder.
        dtype: dtype of floating-point parameters that are not quantised; None: as stored.
        placement: sharding of each parameter, by name; None: the default device.
        names: names of the parameters to read; None: all.
        kept: names of floating-point parameters that keep the stored dtype.

    Raises:
        CheckpointError: the arrays are damaged, or a value is too large for float16.
        ValueError: the placement gives a wrong sharding.
    """
    from orbax.checkpoint import v1 as ocp

    names = list(header.parameters) if names is None else list(names)
    wanted = {}
    for name in names:
        leaf = header.parameters[name]
        is_kept = dtype is None or leaf.dtype.kind in "biu" or name.rpartition(".")[2] in QUANTIZED or name in kept
        sharding = sharding_of(name, leaf.shape, placement)
        wanted[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if is_kept else dtype, sharding=sharding)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    largest = max((4 * leaf.size for leaf in wanted.values()), default=0)  # bytes; a value has at most 4
    context.memory.read_concurrent_bytes = READ_AHEAD + largest  # the limit must exceed the largest array
    with context, _named_damage(header.folder):
        arrays = ocp.load((header.folder / WEIGHTS).absolute(), wanted)
    converted = [name for name in names if wanted[name].dtype != header.parameters[name].dtype]
    narrowed = [name for name in converted if wanted[name].dtype == "float16"]
    if overflown := [name for name in narrowed if jnp.isinf(arrays[name]).any()]:
        raise CheckpointError(
            header.folder, f"expected values within float16's 65504, got larger ones in {listed(overflown)}; use "
            "bfloat16",
        )  # fmt: skip
    return arrays


def sharding_of(name: str, shape: tuple[int, ...], placement: Placement | None) -> jax.sharding.Sharding:
    """Returns the sharding of a parameter; without a placement the first device.

    Raises:
        ValueError: the placement gives no sharding, or one that cannot hold an array of this shape.
    """
    if placement is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharding = placement(name)
    if not isinstance(sharding, jax.sharding.Sharding):
        raise ValueError(f"placement: expected a jax.sharding.Sharding for {name}, got {cut(repr(sharding), 100)}")
    axes = len(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else 0
    try:
        sharding.shard_shape(shape)
        fits = axes <= len(shape)
    except ValueError:  # an axis is not divisible
        fits = False
    if not fits:
        what = f"a sharding for {name} that divides its shape {shape}"
        raise ValueError(f"placement: expected {what}, got {cut(repr(sharding), 150)}")
    return sharding


@jax.jit
def _count_not_finite(array: jax.Array) -> jax.Array:
    return array.size - jnp.isfinite(array.astype(jnp.float32)).sum()


def not_finite(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Return the number of NaN and infinite values of each array that has any, by name of the array."""
    floats = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    if jax.default_backend() == "cpu":  # on the CPU XLA takes ten times as long as numpy
        addressable = {name for name, array in floats.items() if array.is_fully_addressable}
        floats = {
            name: array for name, array in floats.items() if name not in addressable or not is_finite(np.asarray(array))
        }
    counts = jax.device_get({name: _count_not_finite(array) for name, array in floats.items()})
    return {name: int(count) for name, count in counts.items() if count}


@contextlib.contextmanager
def _named_damage(folder: Path) -> Iterator[None]:
    """Turn any error of reading a converted folder in the context into a CheckpointError that names the folder."""
    with _quiet():
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:  # any class: orbax and tensorstore raise many
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reason = cut(f"{kind}{error}", 250)
            # Orbax's tasks log errors when collected; without the traceback that happens here, while logs are off.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            gc.collect()
            raise CheckpointError(folder, f"damaged checkpoint ({reason}); convert the model again") from error
