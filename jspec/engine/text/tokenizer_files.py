"""Reads what a folder says of its tokenizer: the files, with repairs of known faults, and the EOS ids."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert import hub
from convert.fields import CheckpointError, cut, read_json

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
MISTRAL = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")  # model types that `_repair` looks at
MAX_VOCAB = 2**20  # more than any vocabulary in use
MAX_BYTES = 256 * 2**20  # of a tokenizer file; the largest in use have 35 MB
REMEDY = (
    "mend the folder, pass another one as tokenizer=, or load the model alone for token ids in and out: "
    "Engine.from_pretrained(Model.from_pretrained(folder))"
)


def auto_tokenizer() -> Any:
    """Import transformers' AutoTokenizer, without warnings about what tokenizers do not need: torch, ipywidgets."""
    theirs, message = logging.getLogger("transformers"), "PyTorch was not found"

    def is_shown(record: logging.LogRecord) -> bool:
        return message not in record.getMessage()

    theirs.addFilter(is_shown)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")
            from transformers import AutoTokenizer
    finally:
        theirs.removeFilter(is_shown)
    return AutoTokenizer


@contextlib.contextmanager
def named_faults(folder: Path) -> Iterator[None]:
    """Turn any error of reading a tokenizer in the context into a CheckpointError that names the folder."""
    try:
        yield
    except BaseException as error:  # transformers raises many kinds, some of them bare; tokenizers also panics
        if isinstance(error, (CheckpointError, MemoryError, KeyboardInterrupt, SystemExit)):
            raise
        raise CheckpointError(
            folder, f"expected tokenizer files that transformers can read, got {type(error).__name__}: "
            f"{cut(str(error), 120)}; {REMEDY}",
        ) from error  # fmt: skip


def read_folder(folder: Path) -> Any:
    """Read the tokenizer of a folder with transformers."""
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if large := [file for file in files if file.stat().st_size > MAX_BYTES]:
        raise CheckpointError(large[0], f"expected at most {MAX_BYTES:,} bytes, got more; download it again")
    alone = {file.name for file in files} <= {"tokenizer.model", "tokenizer_config.json"}
    absent = [name for name in ("sentencepiece", "google.protobuf") if not _is_installed(name)]
    if (folder / "tokenizer.model").is_file() and alone and absent:
        raise CheckpointError(
            folder / "tokenizer.model", f"expected {' and '.join(absent)} to read it, not installed; "
            "pip install -e '.[sentencepiece]' in jspec's folder, or save a tokenizer.json beside it",
        )  # fmt: skip
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, **_repair(folder)}
    try:
        return auto_tokenizer().from_pretrained(str(folder), **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(
            folder, f"expected a tokenizer of transformers, got one with code of its own (auto_map), which is never "
            f"run; {REMEDY}",
        ) from None  # fmt: skip


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that holds the module
        return False


def _repair(folder: Path) -> dict[str, bool]:
    """Return the option by which transformers repairs the tokenizer of a folder; {}: it has no known fault.

    Mistral's byte-level tokenizers of before transformers 5 were published with another model's regular expression,
    which splits words otherwise than the model has learnt. With the option, transformers replaces it if the folder's
    version and the vocabulary's size say that it is such a file. "[INST]" is in all of Mistral's vocabularies; a model
    of a Mistral type with another vocabulary keeps that one's expression.
    """
    config, file = folder / "config.json", folder / "tokenizer.json"
    if not config.is_file() or not file.is_file() or read_json(config).get("model_type") not in MISTRAL:
        return {}
    text = file.read_bytes()
    return {"fix_mistral_regex": True} if b'"ByteLevel"' in text and b'"[INST]"' in text else {}


def eos_sources(folder: Path | None, token: int | None) -> dict[str, tuple[int, ...]]:
    """Return the EOS ids of a model by their source: generation_config.json, config.json, the tokenizer.

    Args:
        folder: folder of the model; None: it was not loaded from one.
        token: the tokenizer's EOS id; None: it has none.
    """
    return {**({} if folder is None else hub.eos_ids(folder)), **({} if token is None else {"tokenizer": (token,)})}


def eos_ids(folder: Path | None, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a request: all of `eos_sources`, as files may name another one each.

    An id that the vocabulary lacks is left out, because the model cannot emit it; a warning tells of one in a file.

    Args:
        folder: folder of the model; None: it was not loaded from one.
        vocab_size: number of tokens of the model's vocabulary.

    Raises:
        CheckpointError: a file gives something other than ids, or only ids that the vocabulary lacks, and no other
            source has one.
    """
    sources = eos_sources(folder, getattr(tokenizer, "eos_id", None))
    known = tuple(dict.fromkeys(token for ids in sources.values() for token in ids if 0 <= token < vocab_size))
    for name, ids in sources.items():
        if name != "tokenizer" and (wrong := [token for token in ids if token not in known]):
            fault = f"eos_token_id: expected ids in [0, {vocab_size}), got {wrong[0]}"
            if not known:
                raise CheckpointError(f"{folder}/{name}", f"{fault}; pass eos_ids= to replace it")
            logger.warning("%s/%s: %s; it is left out", folder, name, fault)
    return known
