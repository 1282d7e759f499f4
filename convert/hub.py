"""Finds a model's folder on disk or downloads it from the hub, and reads its EOS ids."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from convert.huggingface import read_json

HUB_FILES = ["*.json", "model*.safetensors", "medusa_lm_head.safetensors", "tokenizer.model", "merges.txt", "*.jinja"]
TORCH_FILES = ["pytorch_model*.bin", "medusa_lm_head.pt"]  # where there are no safetensors
SUBFOLDERS = ["*/*"]  # files in subfolders of a repository, which are other formats of the same weights


def find(path: str | Path) -> Path:
    """The folder of a model; downloads the model from the hub if there is no such folder.

    Args:
        path: existing folder, else hub id ("owner/name").

    Raises:
        FileNotFoundError: there is no such folder, and the hub has no such model.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise FileNotFoundError(f"{folder}: expected a folder, got a file; give the folder that holds it")
    if folder.is_absolute() or len(folder.parts) > 2 or str(path).startswith("."):
        raise FileNotFoundError(
            f"{folder}: expected a folder or a hub id (owner/name), got no such folder; check the path"
        )
    import huggingface_hub

    try:
        download = partial(huggingface_hub.snapshot_download, str(path), ignore_patterns=SUBFOLDERS)
        copy = Path(download(allow_patterns=HUB_FILES))
        if not any(copy.glob("*.safetensors")):
            download(allow_patterns=TORCH_FILES)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{path}: no such folder here, and the hub gave no such model ({error})") from error
    return copy


def eos_ids(folder: str | Path) -> tuple[int, ...]:
    """The EOS token ids in a folder's generation_config.json, else in its config.json, else ()."""
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        ids = read_json(file).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()
