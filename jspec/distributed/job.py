"""The processes of a job: who they are, what they tell each other, and how all end when one of them is lost."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

from jspec.distributed.frames import Message
from jspec.distributed.link import Link

END_SECONDS = 10.0  # time for a process to end by itself after another one was lost
POLL_SECONDS = 0.2  # how soon a waiting thread notices a loss

T = TypeVar("T")

logger = logging.getLogger("jspec.distributed")


class ProcessLost(RuntimeError):
    """Another process of the job has ended, fails or is not reachable, so this one cannot go on."""


class Job:
    """The processes that run the same script, of which process 0 has a connection to each of the others.

    When a process is lost, every thread that waits here raises `ProcessLost`. A process that has not ended
    `END_SECONDS` later, because jax waits for the lost one for instance, ends at once with status 1.

    Args:
        process_id: number of this process.
        names: name of each process, with its host.
        connections: connections by number of the other process; only process 0 has several.

    Attributes:
        is_busy: whether an engine runs on all processes, so that none may end.
        at_end: functions that are called when the script of this process ends, unless it ends by an error.
        weights: digest of samples of all weights that this process has divided over the devices.
    """

    def __init__(self, process_id: int, names: Sequence[str], connections: dict[int, socket.socket]) -> None:
        self.process_id, self.names = process_id, names
        self.is_busy = False
        self.at_end: list[Callable[[], None]] = []
        self.weights = hashlib.sha256()
        self._lost: str | None = None
        self._losing = threading.Lock()
        self._is_lost = threading.Event()
        self._ended: dict[int, str] = {}  # processes that have said that they end, with the reason
        self._inbox: dict[tuple[int, str], SimpleQueue[Message]] = defaultdict(SimpleQueue)
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self.links = {
            other: Link(connection, self._receiver(other), self._loser(other))
            for other, connection in sorted(connections.items())  # in the order of `names`
        }

    def start(self) -> None:
        """Start the threads, and tell the others when this process ends."""
        for link in self.links.values():
            link.start()
        for run, name in ((self._do_all, "jspec-devices"), (self._end_late, "jspec-end")):
            threading.Thread(target=run, name=name, daemon=True).start()
        atexit.register(self._end)

    @property
    def num_processes(self) -> int:
        return len(self.names)

    @property
    def is_whole(self) -> bool:
        """Return whether no process is lost."""
        return self._lost is None

    def check_whole(self) -> None:
        """Raise `ProcessLost` if a process is lost."""
        if self._lost is not None:
            raise ProcessLost(self._lost)

    def is_lost_within(self, seconds: float) -> bool:
        """Wait until a process is lost, at most for a time; return whether one is."""
        return self._is_lost.wait(seconds)

    # -- messages

    def send(self, message: Message) -> None:
        """Send a message to all processes that this one is connected to."""
        self.check_whole()
        for other, link in self.links.items():
            if other in self._ended:
                self.lose(other, self._ended[other])
            try:
                link.send(message)
            except OSError as error:
                self.lose(other, f"is lost: nothing could be sent to it ({error})")
            self.check_whole()

    def take(self, kind: str, other: int = 0) -> Message:
        """Wait for the next message of a kind from another process, and return it."""
        inbox = self._inbox[other, kind]
        while True:
            self.check_whole()
            try:
                return inbox.get(timeout=POLL_SECONDS)
            except Empty:
                if other in self._ended and inbox.empty():
                    self.lose(other, self._ended[other])

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Return the values that all processes pass to this call, which all must make in the same order.

        Args:
            what: what the value is, for the error if another process makes another call.
            value: anything that JSON can express.
        """
        if self.process_id:
            self.send(Message("exchange", {"what": what, "value": value}))
            answer = self.take("exchanged").fields
            if "error" in answer:
                raise ValueError(answer["error"])
            return answer["values"]
        answers = [self.take("exchange", other).fields for other in self.links]
        for name, answer in zip(self.names[1:], answers, strict=True):
            if answer["what"] != what:
                text = f"{self.names[0]} is at its {what}, {name} at its {answer['what']}"
                error = f"expected the same script in all processes, got another: {text}"
                self.send(Message("exchanged", {"error": error}))
                raise ValueError(error)
        values = [value, *(each["value"] for each in answers)]
        self.send(Message("exchanged", {"values": values}))
        return values

    def check_same(self, what: str, values: dict[str, Any]) -> None:
        """Raise ValueError, in all processes, if they pass different values; the message names the differences.

        Args:
            what: what the values describe.
            values: named values that JSON can express.
        """
        first, *others = self.exchange(what, values)
        for name, other in zip(self.names[1:], others, strict=True):
            wrong = [key for key in [*first, *(other.keys() - first.keys())] if first.get(key) != other.get(key)]
            if wrong:
                listed = "; ".join(
                    f"{key}: {_cut(first.get(key))} in {self.names[0]}, {_cut(other.get(key))} in {name}"
                    for key in wrong[:5]
                )
                raise ValueError(f"{what}: expected the same in all processes, got {listed}; run the same script")

    # -- calls of the devices

    def do(self, function: Callable[[], T]) -> T:
        """Call a function in the thread that calls the devices, and return its result.

        An interrupt of the caller does not interrupt the function. So what it sends to other processes and what it
        starts on this one's devices stay the same.

        Raises:
            ProcessLost: a process was lost while the function runs, which may then never return.
        """
        self.check_whole()
        future: Future[T] = Future()
        self._work.put((function, future))
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    return future.result()  # it has ended meanwhile, or the error is its own
                self.check_whole()

    def _do_all(self) -> None:
        while True:
            function, future = self._work.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del function, future  # while this thread waits: the function may hold an engine's weights

    # -- the end

    def lose(self, other: int, reason: str) -> None:
        """Note that a process is lost, and tell the others; this process then ends."""
        self.fail(f"{self.names[other]} {reason}")

    def fail(self, text: str) -> None:
        """Note why the job cannot go on, and tell the others; this process then ends."""
        with self._losing:
            if self._lost is not None:
                return
            self._lost = text
        logger.critical("%s; %s ends within %g s", text, self.names[self.process_id], END_SECONDS)
        self._tell(Message("failed", {"text": text}))
        self._is_lost.set()

    def fail_by(self, error: BaseException) -> None:
        """Note that this process cannot go on because of an error, and tell the others."""
        self.fail(f"{self.names[self.process_id]} ended with {type(error).__name__}: {error!s:.500}")

    def _tell(self, message: Message) -> None:
        """Send a message to the processes that can still be reached."""
        for other, link in self.links.items():
            try:
                link.send(message)
            except OSError as error:
                logger.debug("%s was not told: %s", self.names[other], error)

    def _end_late(self) -> None:
        self._is_lost.wait()
        time.sleep(END_SECONDS)
        self._exit("it has not ended by itself")

    def _exit(self, why: str) -> NoReturn:
        print(f"jspec: {self.names[self.process_id]} ends: {self._lost} ({why})", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def _receiver(self, other: int) -> Callable[[Message], None]:
        def receive(message: Message) -> None:
            if message.kind == "failed":
                self.fail(message.fields["text"])
            elif message.kind == "bye":
                self._ended[other] = "has ended"
                if self.is_busy and other:
                    self.lose(other, "has ended")
            self._inbox[other, message.kind].put(message)

        return receive

    def _loser(self, other: int) -> Callable[[str], None]:
        def lose(reason: str) -> None:
            if other not in self._ended:
                self.lose(other, reason)

        return lose

    def _end(self) -> None:
        """End with the other processes when the script ends; if it ends by an error or a loss, do not wait for them.

        jax would wait for lost processes, and would abort this process if process 0 ends before it.
        """
        error = getattr(sys, "last_value", None)  # the error that ends the script
        if isinstance(error, Exception):
            self.fail_by(error)
        if self.is_whole:
            for function in list(self.at_end):  # some remove themselves
                function()
            self._tell(Message("bye"))
        try:
            while self.is_whole and len(self._ended) < len(self.links):
                time.sleep(POLL_SECONDS / 10)
        except (KeyboardInterrupt, SystemExit) as error:
            self.fail_by(error)
        if not self.is_whole:
            self._exit("the script has ended")


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
