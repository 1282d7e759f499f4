"""Brings the processes of a job together, and starts jax on all of their devices."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

import jax
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.lib import _jax

from jspec.distributed import service
from jspec.distributed.frames import BadFrame, Message
from jspec.distributed.job import Job
from jspec.distributed.link import SOON, read_message, send_message
from jspec.distributed.signals import end_at_sigterm

HELLO_BYTES = 2**16  # largest message of a process that has not proved yet that it belongs to the job
HELLO_SECONDS = 5.0  # time for the first message of a connection
RETRY_SECONDS = 0.2
LOOPBACK = ("localhost", "127.0.0.1", "::1")
TOKEN = "jspec/token"

logger = logging.getLogger("jspec.distributed")


class Meeting:
    """The connections of a process to the others, before jax is started.

    Args:
        coordinator: address of process 0, "host:port".
        num_processes: number of processes.
        process_id: number of this process.
        seconds: time for all processes to come.
    """

    def __init__(self, coordinator: str, num_processes: int, process_id: int, seconds: float) -> None:
        self.address = address_of(coordinator)
        self._count, self._own = num_processes, process_id
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self.connections: dict[int, socket.socket] = {}
        self.names = [name_of(process_id, socket.gethostname())]
        self.jax_address = ""

    @property
    def seconds_left(self) -> float:
        return max(self._until - time.monotonic(), SOON)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()

    # -- process 0

    def gather(self) -> None:
        """Wait for all other processes, and tell them each other's names and where jax's service will be.

        Raises:
            OSError: the address is in use, or none of this host.
            TimeoutError: a process has not come; the message names it.
            ValueError: a process has other settings or versions; the message names them.
        """
        try:
            self._gather()
        except (ValueError, TimeoutError) as error:
            for connection in self.connections.values():
                with suppress(OSError):  # that process has ended
                    send_message(connection, Message("refused", {"error": str(error)}))
            self.close()
            raise

    def _gather(self) -> None:
        host, port = self.address
        names = {0: self.names[0]}
        with socket.create_server(_bind(host, port), family=_family(host)) as listener:
            while len(names) < self._count:
                self._admit(self._accept(listener, names), names)
        self.names = [names[other] for other in range(self._count)]
        self.jax_address = _join(host, free_port(host))
        for connection in self.connections.values():
            send_message(connection, Message("welcome", {"names": self.names, "jax": self.jax_address}))

    def _accept(self, listener: socket.socket, names: dict[int, str]) -> socket.socket:
        """Return the next connection; raise TimeoutError if there is none in time."""
        listener.settimeout(self.seconds_left)
        with suppress(TimeoutError):
            if time.monotonic() < self._until:  # else strangers that still wait in line would be taken
                return listener.accept()[0]
        missing = ", ".join(f"process {i}" for i in range(self._count) if i not in names)
        host, port = self.address
        raise TimeoutError(
            f"num_processes: expected {self._count} processes within {self._seconds:g} s, {missing} did not come to "
            f"{host}:{port}; start it, or look for its error"
        )

    def _admit(self, connection: socket.socket, names: dict[int, str]) -> None:
        """Take a connection if it is of a process of this job; connections that say something else are closed."""
        try:
            hello = read_message(connection, HELLO_BYTES, seconds=min(HELLO_SECONDS, self.seconds_left))
            other, host, about = hello.fields["process"], hello.fields["host"], hello.fields["about"]
            is_right = hello.kind == "hello" and type(other) is int and isinstance(host, str)
        except (OSError, BadFrame, KeyError):
            is_right = False
        if not is_right:
            logger.warning("a connection that is none of a process of this job was closed")
            connection.close()
            return
        try:
            self._check(other, str(host), about, names)
        except ValueError as error:
            with suppress(OSError):  # that process has ended
                send_message(connection, Message("refused", {"error": str(error)}))
            connection.close()
            raise
        names[other], self.connections[other] = name_of(other, host), connection

    def _check(self, other: int, host: str, about: Any, names: dict[int, str]) -> None:
        ours, theirs = self._about(), about if isinstance(about, dict) else {}
        for what, expected in ours.items():
            if theirs.get(what) != expected:
                raise ValueError(
                    f"{what}: expected {expected} as in {names[0]}, got {str(theirs.get(what))[:80]} in "
                    f"{name_of(other, host)}; make them equal"
                )
        if not 0 < other < self._count or other in names:
            raise ValueError(
                f"process_id: expected one from 1 to {self._count - 1} that no other process has, got {other} from "
                f"{host}"
            )

    def _about(self) -> dict[str, Any]:
        versions = {"jspec": sys.modules["jspec"].__version__, "jax": jax.__version__}
        return {"num_processes": self._count, **{f"version of {name}": text for name, text in versions.items()}}

    # -- other processes

    def join(self) -> None:
        """Connect to process 0 and wait until all processes have come.

        Raises:
            TimeoutError: process 0 did not answer in time.
            ConnectionError: process 0 has ended.
            ValueError: this process has other settings or versions than process 0.
        """
        connection = self.connections[0] = self._connect()
        fields = {"process": self._own, "host": socket.gethostname(), "about": self._about()}
        try:
            send_message(connection, Message("hello", fields))
            answer = read_message(connection, HELLO_BYTES, seconds=self.seconds_left)
        except TimeoutError:
            raise TimeoutError(
                f"num_processes: expected {self._count} processes within {self._seconds:g} s, not all came; start them"
            ) from None
        except (OSError, BadFrame) as error:
            raise ConnectionError(
                f"coordinator: expected an answer of process 0 at {_join(*self.address)}, got none ({error}); look for "
                "its error"
            ) from None
        if answer.kind != "welcome":
            raise ValueError(answer.fields.get("error", "refused"))
        self.names, self.jax_address = answer.fields["names"], answer.fields["jax"]

    def _connect(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(self.address, timeout=self.seconds_left)
            except OSError as error:
                if self.seconds_left <= RETRY_SECONDS:
                    raise TimeoutError(
                        f"coordinator: expected process 0 at {_join(*self.address)} within {self._seconds:g} s, got "
                        f"none ({error}); start it, or correct the address"
                    ) from None
                time.sleep(RETRY_SECONDS)

    # -- both

    def prove(self, client: Any) -> None:
        """Check that both ends of each connection know the token that only processes of jax's service can read.

        Args:
            client: jax's client of its service.

        Raises:
            ConnectionError: an end is none of the job.
        """
        if self._own == 0:
            client.key_value_set(TOKEN, secrets.token_hex(32))
        token = client.blocking_key_value_get(TOKEN, int(1000 * self.seconds_left)).encode()
        for other, connection in self.connections.items():
            connection.settimeout(self.seconds_left)
            nonce = secrets.token_hex(32)
            send_message(connection, Message("nonce", {"nonce": nonce}))
            theirs = str(read_message(connection, HELLO_BYTES, seconds=self.seconds_left).fields.get("nonce"))
            send_message(connection, Message("proof", {"proof": _proof(token, self._own, theirs)}))
            proof = str(read_message(connection, HELLO_BYTES, seconds=self.seconds_left).fields.get("proof"))
            if not hmac.compare_digest(proof.encode(), _proof(token, other, nonce).encode()):
                raise ConnectionError(f"{self.names[other]} does not know the job's token; is it another job's?")


def _proof(token: bytes, process_id: int, nonce: str) -> str:
    return hmac.new(token, f"{process_id} {nonce}".encode(), "sha256").hexdigest()


def name_of(process_id: int, host: str) -> str:
    return f"process {process_id} ({host[:80]})"


def address_of(coordinator: str) -> tuple[str, int]:
    """Split "host:port".

    Raises:
        ValueError: the text is something else.
    """
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f'coordinator: expected "host:port" of process 0, got {coordinator!r:.100}')
    return host, int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bind(host: str, port: int) -> tuple[str, int]:
    """Return where process 0 listens: at all of its addresses, unless the coordinator's is one of the host alone."""
    return (host if host in LOOPBACK else "", port)


def free_port(host: str) -> int:
    with socket.create_server(_bind(host, 0), family=_family(host)) as probe:
        return probe.getsockname()[1]


def start_service(meeting: Meeting) -> subprocess.Popen[bytes]:
    """Start jax's coordination service on process 0."""
    host, port = address_of(meeting.jax_address)
    return service.start(meeting.jax_address if host in LOOPBACK else f"[::]:{port}", len(meeting.names))


def connect_jax(meeting: Meeting, process_id: int) -> Any:
    """Connect jax to its service, as `jax.distributed.initialize` does; return the client."""
    seconds = max(int(meeting.seconds_left), 10)
    client = _jax.get_distributed_runtime_client(meeting.jax_address, process_id, init_timeout=seconds)
    client.connect()
    state = jax_distributed.global_state
    state.client, state.process_id, state.num_processes = client, process_id, len(meeting.names)
    state.coordinator_address = meeting.jax_address
    return client


def start(coordinator: str, num_processes: int, process_id: int, seconds: float) -> Job:
    """Bring the processes together; the arguments are those of `Meeting`, and are checked here.

    Raises: the errors of `jspec.distributed.initialize`.
    """
    for name, value, least in (("num_processes", num_processes, 2), ("process_id", process_id, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected an int of at least {least}, got {value!r:.100}")
    if process_id >= num_processes:
        raise ValueError(f"process_id: expected 0 to {num_processes - 1}, got {process_id}; count from 0")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"timeout: expected a number of seconds above 0, got {seconds!r:.100}")
    if jax.distributed.is_initialized():
        raise RuntimeError("initialize: expected one call in a process, before any of jax.distributed's, got another")
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "initialize: expected to be called before any use of a device, got a process that has used one; call it "
            "first, right after the imports"
        )
    meeting = Meeting(coordinator, num_processes, process_id, seconds)
    try:
        (meeting.join if process_id else meeting.gather)()
        served = start_service(meeting) if process_id == 0 else None
        meeting.prove(connect_jax(meeting, process_id))
    except BaseException:
        meeting.close()
        raise
    job = Job(process_id, meeting.names, meeting.connections)
    if served is not None:
        job.at_end.append(partial(service.allow_end, served))
    job.start()
    end_at_sigterm()
    logger.info("%s has joined %d processes", meeting.names[process_id], num_processes)
    return job
