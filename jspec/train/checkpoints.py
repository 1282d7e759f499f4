"""Checkpoints of a training run: weights, state of the optimiser and step, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jspec.train.measured import Measured
from jspec.train.program import TrainState

KEPT = 2  # newest checkpoints that are kept
CAUSES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)


class Checkpoints:
    """The checkpoints in a folder; each is a folder named by its step.

    Args:
        folder: folder of the checkpoints, made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending; an interrupted write leaves none."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def save(self, state: TrainState, measured: Measured | None = None) -> None:
        """Write a checkpoint, unless its step has one; older ones but the newest `KEPT` are deleted.

        Args:
            state: the state.
            measured: what was measured since the last record of the journal; None: nothing.

        Raises:
            OSError: the folder cannot be written, or the disk is full; earlier checkpoints are unchanged.
        """
        step = int(state.step)
        if step not in self.steps:
            with write_errors(self.folder, self.steps[-1:]):
                work = self.folder / f"{step}.new"
                shutil.rmtree(work, ignore_errors=True)
                ocp.save(work, _named(state) | _named(measured))
                work.rename(self.folder / str(step))
        for old in self.steps[:-KEPT]:
            shutil.rmtree(self.folder / str(old))

    def restore(self, like: TrainState) -> tuple[TrainState, Measured | None]:
        """Read the newest checkpoint, the arguments of `save`.

        Args:
            like: a state of the same shapes and dtypes.

        Raises:
            FileNotFoundError: there is no checkpoint.
        """
        if not self.steps:
            raise FileNotFoundError(
                f"{self.folder}: expected a checkpoint to resume from, got none; leave out --resume"
            )
        shapes = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in _named(like).items()
        }
        folder = self.folder / str(self.steps[-1])
        stored = ocp.metadata(folder).metadata
        sums = {name: np.zeros(stored[name].shape, stored[name].dtype) for name in stored.keys() - shapes.keys()}
        arrays = ocp.load(folder, shapes | sums)
        state = jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in shapes])
        return state, Measured(**{name[1:]: arrays[name] for name in sums}) if sums else None


@contextlib.contextmanager
def write_errors(folder: Path, newest: list[int]) -> Iterator[None]:
    """Turn an error of writing in the context into an OSError that names the cause, the folder and what is left.

    Errors of the device, such as a memory that is full, are raised as they are.

    Args:
        folder: folder that is written.
        newest: the newest step that has a checkpoint, alone in a list; empty: none has one.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # orbax logs an error that is raised here
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # threads of tensorstore print tracebacks
            yield
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        raise
    except (OSError, ValueError, RuntimeError) as error:  # orbax and tensorstore raise all of these
        texts = [os.strerror(cause) for cause in CAUSES]
        reason = next((text for text in texts if text in str(error)), str(error)[:200])
        free = shutil.disk_usage(folder).free
        left = f"the checkpoint of step {newest[0]} is whole" if newest else "there is no checkpoint yet"
        raise OSError(
            f"{folder}: expected to write there, got an error ({reason}; {free:,} bytes are free); {left}: make room "
            "and go on with --resume"
        ) from error
    finally:
        logger.setLevel(level)


def _named(record: TrainState | Measured | None) -> dict[str, Any]:
    """Return the arrays of a record by name, such as ".step"."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(record)}
