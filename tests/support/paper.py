"""A device of paper, for tests of the host: it compiles nothing, and the model of its target is `paper_model`.

Its cache rows are tokens. A token depends on the text that the request's pages hold, so a page that is lost, shared too
early or overwritten changes tokens; a row that was never written makes logits NaN. It depends on the sampling
parameters and controls that arrived, too, but not on other rows, pages, slots or drafts. A draft is right by chance.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec import Engine, Model, NGram, Tree
from jspec.core.bitmask import WORD
from jspec.core.config import EngineConfig
from jspec.core.prompt_blocks import NO_TOKEN, padded
from jspec.core.records import Draft, LogProbs, StepOutput, Trace
from jspec.draft.named import DrafterSource
from jspec.engine.run import build
from jspec.models.parts.kv_pool import PoolShape
from jspec.step.executable_key import ExecutableKey, Kind
from jspec.step.memory import MemoryPlan
from jspec.step.program import Params, Program
from tests.support import engines, paper_model, tiny
from tests.support.paper_state import PaperSlot, PaperState, PaperTable, Row, controls_type, piece_type

LUCK = 0.6  # probability that a draft token is right

_making = threading.Lock()


def make(model: Model, drafter: DrafterSource = None, **options: Any) -> Engine:
    """Make an engine on a device of paper; of the model and the drafter only sizes count."""
    with _making, pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "sides_of", devices_of)
        return Engine(model, drafter=drafter, **options)


def byte_engine(mesh: Mesh | None = None, **options: Any) -> Engine:
    """Make an engine of four slots that reads and writes bytes, and drafts chains."""
    options = {**engines.BYTE_OPTIONS, **options}
    return make(tiny.model(256, layers=1), NGram(Tree.chain(engines.LENGTH)), mesh=mesh, **options)


def devices_of(program: Program, params: Params, config: EngineConfig, calls: object) -> tuple[Any, Any]:
    """Return what takes the place of `jspec.step.side.sides_of`."""
    device = PaperDevice(program, params.main.config.vocab_size, config)
    return device, device


@dataclass
class PaperPrograms:
    """The methods that stand for compiled programs, by key."""

    helpers: list[Kind]
    compiled: dict[ExecutableKey, Callable[..., Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    lower_seconds: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class PaperDevice:
    """A `jspec.step.device.Device` for target and drafter, whose tree must be a chain."""

    draft: Draft | None = None
    state: Any = None

    def __init__(self, program: Program, vocab_size: int, config: EngineConfig) -> None:
        tree = program.drafter.tree
        assert tree.is_chain, f"expected a chain, got {tree}"
        self.program, self.vocab, self.config, self.columns = program, vocab_size, config, 0
        helpers: list[Kind] = ["update_page_table"]
        helpers += ["controls"] if program.controls else []
        helpers += ["grammar"] if program.grammar_cells else []
        helpers += ["prediction"] if config.predicted_tokens else []
        helpers += ["write_pending_rows"] if program.drafter.has_pending_rows and config.prefix_cache else []
        self.programs = PaperPrograms(helpers)
        self.adapters: dict[int, Any] = {}  # by table

    # -- a device's life

    @property
    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan(0, 0, 0, 0, 0, 0, 0, 0, pages=self._pool.pages, limit=0, device=0)

    def fit(self, pool: PoolShape) -> PoolShape:
        return pool

    def explain_oom(self, pool: PoolShape) -> AbstractContextManager[None]:
        return nullcontext()

    def start(self, pool: PoolShape, drafting: object) -> None:
        self._pool, self.columns = pool, pool.width(self.program.drafter.tree)
        self.make_state()

    def make_state(self) -> None:
        self.state = PaperState(self._pool, self.columns)

    def reset(self, error: BaseException) -> None:
        self.state = self.draft = None
        self.make_state()

    def close(self) -> None:
        self.state = self.draft = None

    def missing(self, keys: Sequence[ExecutableKey]) -> list[ExecutableKey]:
        return [key for key in keys if key not in self.programs.compiled]

    def compile(self, keys: Sequence[ExecutableKey]) -> None:
        for key in self.missing(keys):
            self.programs.compiled[key] = partial(getattr(self, f"_{key.kind}"), key)
            self.programs.seconds[key.name(self.program.drafter.tree.depth)] = 0.0

    def run(self, key: ExecutableKey, *inputs: Any) -> Any:
        return self.programs.compiled[key](*inputs)

    def receive(self, arrays: Any) -> Any:
        return arrays

    def load_adapter(self, index: int, adapter: Any) -> None:
        self.adapters[index] = adapter

    def wait(self, call: Callable[[], Any]) -> Any:
        return call()

    # -- programs that edit the state

    def _update_page_table(self, key: ExecutableKey, new: np.ndarray) -> None:
        for slot, column, page in new.tolist():
            if slot < self._pool.slots:
                self.state.slots[slot].pages[column] = page

    def _controls(self, key: ExecutableKey, packed: np.ndarray) -> None:
        (controls,) = packed.view(controls_type(self.vocab, self.config.processor_args))
        self.state.slots[controls["slot"]].controls = controls

    def _grammar(self, key: ExecutableKey, packed: np.ndarray) -> None:
        table, classes = packed[:2].tolist()
        class_of, cells = np.split(packed[2:], [self.vocab])
        self.state.tables[table] = PaperTable(class_of, cells[: len(cells) // classes * classes].reshape(-1, classes))

    def _prediction(self, key: ExecutableKey, packed: np.ndarray) -> None:
        assert len(packed) == 2 + self.config.predicted_tokens
        self.state.slots[packed[0]].prediction = packed

    def _write_pending_rows(self, key: ExecutableKey, packed: np.ndarray) -> None:
        assert len(packed) == 3 + self.columns

    # -- prefill

    def _prefill(
        self, key: ExecutableKey, pieces: np.ndarray, tokens: np.ndarray, masks: np.ndarray | None = None
    ) -> StepOutput:
        rows, first, emitted, scores, prompt = tokens.shape[1], 0, [], [], []
        for index, piece in enumerate(pieces.view(piece_type(self.columns))[:, 0]):
            token, logits, own = NO_TOKEN, np.zeros(self.vocab), []
            if piece["slot"] < self._pool.slots:
                own = tokens.reshape(-1)[first : first + piece["count"]].tolist()
                first += padded(len(own), rows)
                token, logits = self._admit(piece, own, None if masks is None else masks[index, 0])
            ended = token in piece["stop_ids"] or piece["remaining"] <= 1
            emitted.append([token, 1, 0, 0, ended])
            scores.append(paper_model.score(logits, token))
            if key.prompt_logprobs:
                prompt += self._prompt_scores(piece, own, token, padded(len(own), rows))
        return StepOutput(
            report=np.array([emitted], np.int32),  # type: ignore[arg-type]
            trace=None,
            logprobs=_stack([_stack([own]) for own in scores], 1) if key.logprobs else None,
            prompt=_stack([*prompt, *scores[:1] * (tokens.size - len(prompt))]) if key.prompt_logprobs else None,
        )

    def _admit(self, piece: Row, tokens: list[int], mask: np.ndarray | None) -> tuple[int, np.ndarray]:
        """Enter a piece of a prompt into its slot; return the token after the piece, and its logits."""
        slot, end = self.state.slots[piece["slot"]], int(piece["start"] + piece["count"])
        slot.piece, slot.pages[:] = piece.copy(), piece["page_row"]
        slot.controls = slot.controls if piece["controlled"] else None
        if piece["write"]:
            self.state.write(slot, piece["start"], tokens)
        slot.length = end
        token, logits = self._next(slot, self.state.text(slot), mask)
        token = int(piece["root"]) if piece["root"] >= 0 else token
        slot.root, slot.remaining = token, int(piece["remaining"] - piece["last"])
        slot.is_active = bool(piece["last"]) and token not in piece["stop_ids"] and piece["remaining"] > 1
        return token, logits

    def _prompt_scores(self, piece: Row, tokens: list[int], token: int, rows: int) -> list[Any]:
        """Return the log-probabilities of the token after each token of a piece, padded to a number of rows."""
        if not tokens:
            return []
        text = self.state.text(self.state.slots[piece["slot"]])
        after, start = [*tokens[1:], token], int(piece["start"])
        logits = [paper_model.logits_after(text[: start + at + 1], self.vocab) for at in range(len(tokens))]
        scores = [paper_model.score(*one) for one in zip(logits, after, strict=True)]
        return [*scores, *scores[-1:] * (rows - len(tokens))]

    def _next(self, slot: PaperSlot, text: list[int], mask: np.ndarray | None = None) -> tuple[int, np.ndarray]:
        """Return the token that follows a text in a slot, and the logits that nothing has edited."""
        logits = paper_model.logits_after(text, self.vocab)
        edited = logits
        if slot.controls is not None:
            table = self.state.tables.get(int(slot.controls["table"]))
            edited = paper_model.edit(logits, text, slot.controls, table, slot.piece["stop_ids"])
        if mask is not None:
            tokens = np.arange(self.vocab)
            edited = np.where(mask[tokens // WORD] >> (tokens % WORD).astype(np.uint32) & 1, edited, -np.inf)
        return paper_model.sample(edited, len(text), slot.piece), logits

    # -- rounds

    def _round(self, key: ExecutableKey, rows: np.ndarray) -> StepOutput:
        rounds = [self._verified(key, rows, self._proposed(key, rows)) for _ in range(self.config.rounds_per_dispatch)]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *rounds)

    def _draft(self, key: ExecutableKey, rows: np.ndarray) -> Draft:
        self.draft = self._proposed(key, rows)
        return self.draft

    def _verify(self, key: ExecutableKey, rows: np.ndarray, masks: np.ndarray | None = None) -> StepOutput:
        draft, self.draft = self.draft, None
        assert draft is not None
        return self._verified(key, rows, draft, masks)

    def _active(self, rows: np.ndarray) -> Iterator[tuple[int, PaperSlot]]:
        """Yield the batch rows with requests that have not ended, and their slots."""
        for row, index in enumerate(rows.tolist()):
            if index < self._pool.slots and self.state.slots[index].is_active:
                yield row, self.state.slots[index]

    def _proposed(self, key: ExecutableKey, rows: np.ndarray) -> Draft:
        """Draft chains of the predicted tokens; without, of the target's own or, by chance, others."""
        tokens = np.zeros((len(rows), key.depth + 1), np.int32)
        nodes, caps = np.arange(key.depth + 1, dtype=np.int32), np.zeros(len(rows), np.int32)
        for row, slot in self._active(rows):
            text, caps[row] = [*self.state.text(slot), slot.root], slot.piece["draft_cap"]
            for _ in range(key.depth):
                token, _ = self._next(slot, text)
                is_right = zlib.crc32(np.asarray(text, np.int32).tobytes(), 1) % 100 < 100 * LUCK
                text.append(self._predicted(slot, len(text), token if is_right else (token + 1) % self.vocab))
            tokens[row] = text[-key.depth - 1 :]
        return Draft(
            tokens=tokens,  # type: ignore[arg-type]
            parents=np.broadcast_to(nodes - 1, tokens.shape),
            scores=np.zeros(tokens.shape, np.float32),  # type: ignore[arg-type]
            valid=nodes <= caps[:, None],  # type: ignore[arg-type]
            probs=None,
            vocab_map=None,
        )

    def _predicted(self, slot: PaperSlot, position: int, default: int) -> int:
        """Return the token that a slot's prediction has for a position of the text."""
        if slot.prediction is None:
            return default
        start, tokens = slot.prediction[1], slot.prediction[2:][: self.config.predicted_tokens]
        place = position - start
        return int(tokens[place]) if 0 <= place < len(tokens) and tokens[place] >= 0 else default

    def _verified(
        self, key: ExecutableKey, rows: np.ndarray, draft: Any, masks: np.ndarray | None = None
    ) -> StepOutput:
        """Accept the first draft tokens that are the target's, and add one token of the target."""
        nodes = np.arange(key.depth + 1, dtype=np.int32)
        report = np.full((1, len(rows), key.depth + 5), NO_TOKEN, np.int32)
        report[..., -4:] = 0
        scores = [[paper_model.score(np.zeros(self.vocab), 0)] * (key.depth + 1) for _ in rows]
        for row, slot in self._active(rows):
            tokens, own = self._walk(slot, draft.tokens[row], draft.valid[row], None if masks is None else masks[row])
            scores[row][: len(own)] = own if key.logprobs else []
            count, ended = self._commit(slot, tokens, draft.tokens[row])
            report[0, row, :count] = tokens[:count]
            report[0, row, -4:] = count, len(tokens) - 1, draft.valid[row, 1:].sum(), ended
        path = np.where(nodes <= report[..., -3:-2], nodes, NO_TOKEN)
        parents = np.where(draft.valid, draft.parents, -1)
        trace = Trace(draft.tokens[None], parents[None], draft.scores[None], path) if key.traced else None  # type: ignore[arg-type]
        return StepOutput(
            report=report,  # type: ignore[arg-type]
            trace=trace,
            logprobs=_stack([_stack(own) for own in scores], 1) if key.logprobs else None,
            path=path if key.kind == "verify" else None,  # type: ignore[arg-type]
        )

    def _walk(
        self, slot: PaperSlot, drafted: np.ndarray, valid: np.ndarray, masks: np.ndarray | None
    ) -> tuple[list[int], list[LogProbs]]:
        """Return the target's tokens after a slot's text, up to the first that the draft lacks, and their scores."""
        text, tokens, scores = self.state.text(slot), [], []
        for node, is_valid in enumerate(valid):
            if node and not (is_valid and tokens[-1] == drafted[node]):
                break
            text.append(drafted[node])
            token, logits = self._next(slot, text, None if masks is None else masks[node])
            tokens.append(token)
            scores.append(paper_model.score(logits, token))
        return tokens, scores

    def _commit(self, slot: PaperSlot, tokens: list[int], drafted: np.ndarray) -> tuple[int, bool]:
        """Write a round's cache rows and cut its tokens; return how many are left and whether the request has ended."""
        self.state.write(slot, slot.length, drafted)
        stops = [at for at, token in enumerate(tokens, 1) if token in slot.piece["stop_ids"]]
        count = min(len(tokens), slot.remaining, *stops[:1])
        slot.length, slot.root, slot.remaining = slot.length + count, tokens[count - 1], slot.remaining - count
        slot.is_active = slot.remaining > 0 and count not in stops
        return count, not slot.is_active


def _stack(parts: Sequence[Any], axes: int = 0) -> Any:
    """Stack records of arrays, and put axes of size 1 before the result."""
    return jax.tree.map(lambda *fields: np.stack(fields)[(None,) * axes], *parts)
