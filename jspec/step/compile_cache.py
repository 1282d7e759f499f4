"""Keeps compiled programs on disk, by default in the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
from pathlib import Path
from typing import Literal

import jax
from jax.experimental.compilation_cache import compilation_cache

from jspec.core.shorten import short

logger = logging.getLogger(__name__)


def keep_compiled(folder: str | Path | Literal[False] | None) -> None:
    """Make this process read compiled programs from a folder and store new ones there from now on.

    XLA stores the results of autotuning kernels for GPUs in this folder too.

    Args:
        folder: the folder; None: the folder in jax's configuration, or `user_folder` if jax has none; False: change
            nothing.

    Raises:
        ValueError: the given folder cannot be created.
    """
    if folder is False or (folder is None and jax.config.values["jax_compilation_cache_dir"]):
        return
    if folder is None:
        try:
            folder = user_folder()
            make_private(folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
            logger.warning("compiled programs are not kept: %s; pass compile_cache=FOLDER, or False", error)
            return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"compile_cache: expected a folder that exists or can be made, got {short(folder)} ({error!s:.150}); "
            "choose another folder, or False to keep no programs"
        ) from error
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # also store programs that compile quickly
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # without this, jax keeps using the folder of the process's first compilation


def user_folder() -> Path:
    """Return the user's default folder for compiled programs.

    Each version of jaxlib and each kind of processor has a separate folder, because a program compiled for one
    processor may crash on another.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return cache_folder() / f"compiled-{jax.lib.__version__}-{_processor()}"


def cache_folder() -> Path:
    """Return the folder for all that jspec keeps for the user; RuntimeError if the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jspec"


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can write to.

    A user who can write to the folder can make this process run other code.

    Raises:
        OSError: the folder cannot be created.
        PermissionError: the folder belongs to another user, or other users can write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "getuid"):
        return
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder}: expected a folder that only you may write to; run chmod 700 on it")


def _processor() -> str:
    """Return a short hash of the processor's name and instruction sets."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join([platform.machine(), platform.processor(), *named]).encode()).hexdigest()[:8]
