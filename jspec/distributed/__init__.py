"""One engine on the devices of several processes, which may be on several hosts (`initialize`)."""

from __future__ import annotations

from jspec.distributed.job import Job, ProcessLost

__all__ = ["ProcessLost", "current", "fail", "initialize", "num_processes", "process_id"]

_job: Job | None = None


def initialize(coordinator: str, num_processes: int, process_id: int, *, timeout: float = 300.0) -> None:
    """Bring the processes of a job together, so that the engine of each may use the devices of all.

    All processes run the same script, which calls this before any use of a device. Then each makes the same engine with
    ``tensor_parallel`` or ``mesh``; process 0 sends requests to its engine, and the others call `Engine.follow`:

        jspec.distributed.initialize("10.0.0.1:9000", num_processes=2, process_id=0)  # 1 on the other host
        engine = jspec.Engine.from_pretrained(folder, tensor_parallel=16)
        if jspec.distributed.process_id() > 0:
            engine.follow()
        else:
            ...
            engine.close()

    Only processes of a network that you trust may reach these hosts: what they send is not encrypted.

    Args:
        coordinator: address of process 0, "host:port", which all hosts reach; on process 0 the port must be free.
        num_processes: number of processes.
        process_id: number of this process, from 0.
        timeout: seconds to wait for all processes.

    Raises:
        ValueError: an argument is wrong, or differs between processes, or they have other versions of jspec or jax.
        RuntimeError: this process has used a device already, or has called this before.
        TimeoutError: not all processes came in time; the message names those that are missing.
        OSError: the address is in use on process 0, or a process ended meanwhile.
    """
    from jspec.distributed.meeting import start  # here, because it imports jax

    global _job
    _job = start(coordinator, num_processes, process_id, timeout)


def current() -> Job | None:
    """Return the job of this process; None: it is alone."""
    return _job


def process_id() -> int:
    """Return the number of this process; 0 if it is alone."""
    return 0 if _job is None else _job.process_id


def num_processes() -> int:
    """Return the number of processes of the job; 1 if this process is alone."""
    return 1 if _job is None else _job.num_processes


def fail(error: BaseException) -> None:
    """Tell the other processes, if there are any, that this one ends because of an error that it has caught."""
    if _job is not None:
        _job.fail_by(error)
