"""Brings the processes of a command together that runs in several of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import jspec

if TYPE_CHECKING:  # the command line parses its options before it imports jax
    from jspec import Engine


def join(arguments: argparse.Namespace) -> None:
    """Bring the processes together that run this command, if the options name any; before any use of a device.

    Raises:
        ValueError: one of the three options is absent, or wrong, or another one needs all its devices in one process.
        OSError, RuntimeError: as for `jspec.distributed.initialize`.
    """
    names = ("coordinator", "num_processes", "process_id")
    options = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    wanted = {"draft_device": None, "replicas": 1}
    for name in [name for name, value in wanted.items() if options and getattr(arguments, name, value) != value]:
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(
            f"{flag}: expected no such option beside --coordinator, got {getattr(arguments, name)}; "
            "leave one of the two out: --tensor-parallel divides one engine and its drafter over several processes"
        )
    if options and len(options) < len(names):
        missing = ", ".join(f"--{name.replace('_', '-')}" for name in names if name not in options)
        raise ValueError(f"{missing}: expected beside the other options of several processes, got none; add it")
    if options:
        jspec.distributed.initialize(**options)


def follows(engine: Engine) -> bool:
    """Follow process 0 until its engine is closed, and return True; False: this is process 0, or alone."""
    if jspec.distributed.process_id() == 0:
        return False
    engine.follow()
    return True
