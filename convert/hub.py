"""Finds a model's folder on disk or downloads it from the hub, and reads its EOS ids."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from convert.fields import MAX_SIZE, Fields, is_int, read_json, short

TOKENIZER_FILES = ["*.json", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja"]
ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
HUB_FILES = [*TOKENIZER_FILES, "model*.safetensors", "medusa_lm_head.safetensors", "adapter_model.safetensors"]
TORCH_FILES = ["pytorch_model*.bin", "medusa_lm_head.pt"]  # downloaded if the repository has no safetensors files
# Not downloaded: subfolders hold the weights in other formats. Chat templates in them are downloaded.
SUBFOLDERS = [f"*/{pattern}" for pattern in [*HUB_FILES, *TORCH_FILES] if pattern != "*.jinja"]


def find(path: str | os.PathLike[str], *, tokenizer: bool = False, adapter: bool = False) -> Path:
    """Return the absolute path of a model's folder, after downloading the model if it is a hub id.

    Args:
        path: existing folder, relative or absolute or from the home folder ("~"), else hub id ("owner/name"); after
            an "@" a hub id may name the commit, tag or branch to take ("owner/name@revision").
        tokenizer: download the files of the tokenizer only.
        adapter: download the files of a LoRA adapter only.

    Raises:
        FileNotFoundError: neither a folder nor a model of the hub has this name.
        TypeError: the path is neither text nor a path.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise TypeError(f"path: expected a folder or a hub id (owner/name), got {short(path)}; pass one of them")
    folder = Path(path).expanduser().absolute()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{folder}: expected a folder, got a file; give the folder that holds it")
    if old := [left for left in leftovers(folder) if left.suffix == ".old"]:
        raise FileNotFoundError(
            f"{folder}: expected a folder, got none: replacing it was interrupted, and its old contents are in "
            f"{old[0]}; rename that folder to {folder.name}"
        )
    if not is_id(path):
        raise FileNotFoundError(
            f"{folder}: expected a folder or a hub id (owner/name), got no such folder; check the path"
        )
    import huggingface_hub

    try:
        name, at, revision = str(path).partition("@")
        pinned = {"revision": revision} if at else {}
        download = partial(huggingface_hub.snapshot_download, name, ignore_patterns=SUBFOLDERS, **pinned)
        wanted = TOKENIZER_FILES if tokenizer else ADAPTER_FILES if adapter else HUB_FILES
        copy = Path(download(allow_patterns=wanted))
        if wanted is HUB_FILES and not any(copy.glob("*.safetensors")):
            download(allow_patterns=TORCH_FILES)
    except (OSError, ValueError) as error:
        reason = short(str(error), 200)
        raise FileNotFoundError(
            f"{path}: no such folder here, and the hub gave no such model ({reason}); check the name, and run "
            "`hf auth login` first if the model is gated or private"
        ) from error
    return copy


def leftovers(folder: Path) -> list[Path]:
    """List the hidden folders that interrupted conversions have left beside their destination ``folder``.

    A folder whose name ends in ".old" has the complete contents that were to be replaced. The other folders are
    incomplete.
    """
    if not folder.parent.is_dir():
        return []
    temporary = re.compile(rf"\.{re.escape(folder.name)}\.[a-z0-9_]{{8}}(\.old)?")
    return sorted(path for path in folder.parent.iterdir() if temporary.fullmatch(path.name) and path.is_dir())


def is_id(path: str | os.PathLike[str]) -> bool:
    """Return whether a path has the form of a hub id, "owner/name" or "name"."""
    return not Path(path).is_absolute() and len(Path(path).parts) <= 2 and not os.fspath(path).startswith((".", "~"))


def eos_ids(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the EOS token ids in a folder's generation_config.json and config.json, by the file that names them.

    The config.json of a model that also reads pictures may name them in its text_config.

    Raises:
        CheckpointError: a file has something other than an id or a list of ids.
    """
    ids: dict[str, tuple[int, ...]] = {}
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        fields = read_json(file)
        if named := (*_ids_of(fields), *_ids_of(fields.object("text_config"))):
            ids[name] = tuple(dict.fromkeys(named))
    return ids


def _ids_of(fields: Fields) -> tuple[int, ...]:
    ids = fields.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(is_int(token) and abs(token) <= MAX_SIZE for token in ids):
        raise fields.error("eos_token_id", "a token id or a list of them (pass eos_ids= to replace it)")
    return tuple(ids)
