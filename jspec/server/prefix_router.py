"""Sends requests with equal beginnings to the same replica of Ray Serve, whose prefix cache then has them."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from jspec.engine.callers.replica_threads import BUSIER

BLOCK = 512  # characters between two marks of a prompt
MOST_HOMES = 100_000  # marks of which the home replica is remembered


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has answered the longest beginning of its prompt: its home.

    The least busy replica takes a prompt without home, and any request whose home has `BUSIER` more requests than it.
    """

    def initialize_state(self, **_: Any) -> None:
        self._homes: OrderedDict[bytes, Any] = OrderedDict()  # replica id by mark

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which to try them; one that is full passes the request on."""
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        load = {replica.replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in shuffled}
        ranked = sorted(shuffled, key=lambda replica: load[replica.replica_id])
        if pending_request is None or not ranked:
            return [[replica] for replica in ranked]
        pending_request.routing_context.should_backoff = True  # all replicas are tried in each round
        marks = marks_of(pending_request.args[0].text)
        least = ranked[0].replica_id
        home = next((h for mark in reversed(marks) if (h := self._homes.get(mark)) in load), least)
        chosen = least if load[home] >= load[least] + BUSIER else home
        for mark in marks:
            if self._homes.get(mark) not in load:
                self._homes[mark] = chosen
            self._homes.move_to_end(mark)
        while len(self._homes) > MOST_HOMES:
            self._homes.popitem(last=False)
        return [[replica] for replica in sorted(ranked, key=lambda replica: replica.replica_id != chosen)]


def marks_of(text: str) -> list[bytes]:
    """Return digests of a prompt's beginnings: of each multiple of `BLOCK` characters, and of the whole prompt."""
    digest, marks = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(text), BLOCK):
        digest.update(text[start : start + BLOCK].encode())
        marks.append(digest.digest())
    return marks
