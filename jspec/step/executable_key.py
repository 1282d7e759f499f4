"""The key by which an engine finds a compiled program."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal[
    "round",
    "draft",
    "verify",
    "commit",
    "prefill",
    "draft_prefill",
    "update_page_table",
    "controls",
    "grammar",
    "prediction",
    "save_state",
    "load_state",
    "write_pending_rows",
]
CUT = ("round", "draft", "verify", "commit")  # kinds of programs whose drafter's tree is cut at a depth
WITHOUT_OUTPUT = ("commit", "draft_prefill", "write_pending_rows")  # kinds of steps that return a state alone


@dataclass(frozen=True)
class ExecutableKey:
    """A key that identifies one executable (compiled program) of an engine.

    Attributes:
        kind: "round" is a decode step in one program, "draft" and "verify" are a decode step in two programs, and
            "prefill" is pieces of prompts. If the draft model is on other devices, "commit" and "draft_prefill" do its
            part of "verify" and "prefill" there. The other kinds are helpers with one executable each.
        size: number of batch rows of a decode step, or number of tokens of a prefill.
        depth: depth to which a decode step drafts; the drafter's tree is cut there.
        nodes: number of draft nodes that a decode step verifies per batch row, on average; None: all.
        logprobs: whether the program returns log-probabilities of the emitted tokens.
        prompt_logprobs: whether a prefill returns log-probabilities of its prompt tokens.
        traced: whether a decode step returns its drafts.
        masked: whether the program takes token masks from the host.
        gathers_logits: whether, on several devices, a round gathers the logits of the whole vocabulary on each device,
            for rows that need more than `Program.divides_logits` allows. Log-probabilities need it too.
        adapted: whether rows of the program may have adapters of the target.
    """

    kind: Kind
    size: int = 0
    depth: int = 0
    logprobs: bool = False
    prompt_logprobs: bool = False
    traced: bool = False
    masked: bool = False
    nodes: int | None = None
    gathers_logits: bool = False
    adapted: bool = False

    @classmethod
    def round(cls, rows: int, depth: int, *, nodes: int | None = None, **outputs: bool) -> ExecutableKey:
        """Make the key of a decode step in one program. A step with log-probabilities also returns its drafts.

        Args:
            outputs: the fields ``logprobs``, ``traced``, ``gathers_logits`` and ``adapted``.
        """
        key = cls("round", rows, depth, nodes=nodes, **outputs)
        return replace(key, traced=key.traced or key.logprobs)

    @classmethod
    def split(
        cls,
        rows: int,
        depth: int,
        *,
        logprobs: bool = False,
        traced: bool = True,
        masked: bool = True,
        nodes: int | None = None,
        adapted: bool = False,
    ) -> tuple[ExecutableKey, ExecutableKey]:
        """Make the keys of a decode step in two programs, draft and verify; with masks it also returns its drafts."""
        outputs = dict(logprobs=logprobs, traced=traced or logprobs or masked, masked=masked)
        verify = cls("verify", rows, depth, nodes=nodes, adapted=adapted, **outputs)
        return cls("draft", rows, depth), verify

    def covers(self, other: ExecutableKey) -> bool:
        """Return whether this program has at least the rows or tokens and the outputs of another program."""
        same = ("kind", "depth", "nodes", "prompt_logprobs", "masked")
        more = ("size", "logprobs", "traced", "gathers_logits", "adapted")
        return all(getattr(self, name) == getattr(other, name) for name in same) and all(
            getattr(self, name) >= getattr(other, name) for name in more
        )

    def name(self, full_depth: int) -> str:
        """Return the executable's name for logs, `Engine.compile_seconds` and `Engine.lower_seconds`.

        Args:
            full_depth: depth of the drafter's whole tree.
        """
        scored, traced = " with logprobs" * self.logprobs, " traced" * (self.traced and not self.masked)
        adapted = " with adapters" * self.adapted
        match self.kind:
            case "round":
                cut = f", depth {self.depth}" * (self.depth != full_depth)
                cut += "" if self.nodes is None else f", {self.nodes} nodes"
                gathers = " of gathered logits" * self.gathers_logits
                return f"round[{self.size}{cut}]" + (scored or traced) + gathers + adapted
            case "draft" | "verify" | "commit":
                masked = "masked " * self.masked
                nodes = "" if self.nodes is None else f", {self.nodes} nodes"
                return f"{masked}{self.kind}[{self.size}, depth {self.depth}{nodes}]" + (scored or traced) + adapted
            case "draft_prefill":
                return f"draft prefill[{self.size}]"
            case "prefill" if self.masked:
                return f"masked prefill[{self.size}]" + scored + " of prompts" * self.prompt_logprobs + adapted
            case "prefill":
                return f"prefill[{self.size}]" + (" with prompt logprobs" if self.prompt_logprobs else scored) + adapted
        return self.kind


def covering(key: ExecutableKey, compiled: Collection[ExecutableKey], full_depth: int) -> ExecutableKey:
    """Find the compiled program that can do the work of a program with the fewest additional outputs and rows.

    Args:
        compiled: keys of the compiled programs.
        full_depth: depth of the drafter's whole tree.

    Raises:
        KeyError: no compiled program can do the work.
    """
    if key in compiled:
        return key
    able = [other for other in list(compiled) if other.covers(key)]  # other threads may add programs meanwhile
    if not able:
        raise KeyError(f"no compiled program can run {key.name(full_depth)}")
    return min(able, key=lambda other: (other.adapted, other.logprobs, other.traced, other.size))


def page_updates(slots: int) -> int:
    """Return the number of page table entries that one call of "update_page_table" writes."""
    return 2 * slots
