"""The compiled ladder: a program for each bucket of rows and depth of drafts, and for each bucket of prompt tokens.

All are compiled before any runs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jspec.core.config import EngineConfig
from jspec.core.records import MAX_STOP_IDS, PrefillInput, SlotState
from jspec.engine.grammar.token_table import Grammar
from jspec.models.kv_cache import update_page_table
from jspec.sampling import grammar_mask, penalties
from jspec.step.decode import spec_step
from jspec.step.prefill import prefill_step, write_pending_rows_step
from jspec.step.program import Params, Program
from jspec.step.split_decode import draft_step, mask_shape, verify_step
from pallas_kernels.dispatch import describe, resolve

logger = logging.getLogger(__name__)

PREFILL_HEAD = (
    PrefillInput._fields.index("seed") + 2 + MAX_STOP_IDS
)  # int32 words of a packed PrefillInput besides pages and tokens

CATCH_UP_HEAD = 3  # slot, root and committed rows

Check = Callable[[Sequence[Any]], None]
Lowered = tuple[str, Callable[[Any], None], Any]  # name, where to keep it, and what is to be compiled


def keep_compiled(folder: str | Path | None) -> None:
    """From now on this process takes compiled programs from a folder, and keeps there what it compiles.

    Beside them XLA keeps what it measured on a GPU to choose its kernels. None leaves everything as it is.

    Raises:
        OSError: no folder can be made there.
    """
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # small programs too
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # else the folder of the first compilation stays in use


class Executables:
    """Holds the executables. Calling one never traces or compiles.

    Args:
        program: what all of them have in common.
        state: of the engine, for its shapes.
        depths: at which rounds cut the drafter's tree.
    """

    def __init__(
        self, program: Program, params: Params, state: SlotState, config: EngineConfig, depths: Sequence[int]
    ) -> None:
        (device, *_) = state.root.devices()
        self._program = replace(program, implementation=resolve(program.implementation, device))
        self._depths = depths
        self._params = params
        self._config = config
        self._pages = state.page_table.shape[1]
        self.prefill: dict[int, Any] = {}
        self.rounds: dict[tuple[int, int, bool], Any] = {}  # by rows, depth and whether it is traced
        self.scored_prefill: dict[tuple[int, bool], Any] = {}  # with log-probabilities, also of prompts or not
        self.scored_rounds: dict[tuple[int, int], Any] = {}  # with log-probabilities, and traced
        self.drafts: dict[tuple[int, int], Any] = {}  # rounds in two launches, by rows and depth
        self.verifies: dict[tuple[int, int, bool], Any] = {}  # likewise, with log-probabilities or not, and traced
        self.masked_prefill: dict[tuple[int, bool, bool], Any] = {}  # with log-probabilities or not, also of prompts
        self._shapes = jax.eval_shape(lambda: state)
        self._later = threading.Lock()  # held while more is compiled
        self.page_updates = config.slots * 2  # that `update_page_table` takes
        self.update_page_table: Any = None
        self.write_pending_rows: Any = None  # where the drafter lags and pages are kept
        self.admit_controls: Any = None  # where the engine serves them
        self.load_grammar: Any = None  # likewise
        self.seconds: dict[str, float] = {}
        self.lower_seconds: dict[str, float] = {}
        logger.info("%s", describe(program.implementation, device))
        self._compile(self._lowered())

    @property
    def executables(self) -> list[Any]:
        """All that is compiled."""
        others = [self.update_page_table, self.admit_controls, self.load_grammar, self.write_pending_rows]
        others = [one for one in others if one is not None]
        scored = [*self.scored_prefill.values(), *self.scored_rounds.values()]
        masked = [*self.drafts.values(), *self.verifies.values(), *self.masked_prefill.values()]
        return [*self.prefill.values(), *self.rounds.values(), *scored, *masked, *others]

    def ensure(
        self,
        check: Check,
        *,
        traced: bool,
        scored: bool,
        scored_prompts: bool,
        first_tokens: Collection[tuple[bool, bool]],
    ) -> None:
        """Compile the ladders that some requests need and nobody did before; other threads step on meanwhile.

        Rounds that score are traced, as those of a batch may have to be; where less is asked for, the rest is left
        unread. Once there are ladders for masks, a batch that scores needs them with that.

        Args:
            check: of all executables with those to be added; where it raises, none is.
            traced: rounds also return their drafts.
            scored: and the log-probabilities of what they emit.
            scored_prompts: chunks return those of their tokens.
            first_tokens: of the requests with masks from the host: whether log-probabilities are asked for, of tokens
                or prompt, and of the prompt.
        """
        with self._later:
            lowered = [self._lowered_traced(traced), self._lowered_scored(scored, scored_prompts)]
            if first_tokens or (scored and self.verifies):
                modes = [False, True] if scored or self.scored_rounds else [False]
                lowered += [self._lowered_masked_rounds(modes), self._lowered_masked_prefill(first_tokens)]
            self._compile(chain.from_iterable(lowered), check)

    def _lowered_traced(self, wanted: bool) -> Iterator[Lowered]:
        if wanted and (self._config.slots, self._depths[-1], True) not in self.rounds:
            yield from self._lowered_rounds(replace(self._program, trace=True))

    def _lowered_scored(self, tokens: bool, prompts: bool) -> Iterator[Lowered]:
        scored = replace(self._program, logprobs=self._config.logprobs_mode)
        assert self._config.prefill_buckets is not None
        for prompt, is_wanted in ((False, tokens), (True, prompts)):
            if is_wanted and (self._config.prefill_buckets[-1], prompt) not in self.scored_prefill:
                yield from self._lowered_prefill(replace(scored, prompt_logprobs=prompt))
        if tokens and not self.scored_rounds:
            yield from self._lowered_rounds(replace(scored, trace=True))

    def _lowered_masked_rounds(self, modes: Sequence[bool]) -> Iterator[Lowered]:
        config, vocab = self._config, self._params.target.config.vocab_size
        assert config.buckets is not None
        for rows, depth in product(config.buckets, reversed(self._depths)):
            missing = [is_scored for is_scored in modes if (rows, depth, is_scored) not in self.verifies]
            if not missing:
                continue
            cut = replace(self._program, drafter=self._program.drafter.cut(depth), trace=True)
            slots = jax.ShapeDtypeStruct((rows,), jnp.int32)
            name, step = f"[{rows}, depth {depth}]", partial(draft_step, cut)
            if (rows, depth) not in self.drafts:
                keep = partial(self.drafts.__setitem__, (rows, depth))
                yield f"draft{name}", keep, self._lower_step(f"draft{name}", step, slots)
            _, draft = jax.eval_shape(step, self._params, self._shapes, slots)
            masks = mask_shape(rows, draft.tokens.shape[1], vocab)
            for is_scored in missing:
                scored = replace(cut, logprobs=config.logprobs_mode if is_scored else None)
                label = f"verify{name}" + " with logprobs" * is_scored
                lowered = self._lower_step(label, partial(verify_step, scored), slots, draft, masks)
                yield label, partial(self.verifies.__setitem__, (rows, depth, is_scored)), lowered

    def _lowered_masked_prefill(self, first_tokens: Collection[tuple[bool, bool]]) -> Iterator[Lowered]:
        config, masks = self._config, mask_shape(1, 1, self._params.target.config.vocab_size)
        assert config.prefill_buckets is not None
        for tokens, (is_scored, is_prompt) in product(config.prefill_buckets, first_tokens):
            if (tokens, is_scored, is_prompt) not in self.masked_prefill:
                mode = config.logprobs_mode if is_scored else None
                prefill = partial(prefill_step, replace(self._program, logprobs=mode, prompt_logprobs=is_prompt))
                packed = jax.ShapeDtypeStruct((PREFILL_HEAD + self._pages + tokens,), jnp.int32)
                name = f"masked prefill[{tokens}]" + " with logprobs" * is_scored + " of prompts" * is_prompt
                lowered = self._lower_step(name, prefill, packed, masks)
                yield name, partial(self.masked_prefill.__setitem__, (tokens, is_scored, is_prompt)), lowered

    def with_pages(self, state: SlotState, new: Sequence[tuple[int, int, int]]) -> SlotState:
        """The state with pages that slots got in its table, a copy of what the scheduler knows.

        Args:
            state: its table is donated.
            new: slot, column, page.
        """
        for start in range(0, len(new), self.page_updates):
            packed = np.full((self.page_updates, 3), self._config.slots, np.int32)  # no slot: dropped
            packed[: len(new) - start] = new[start : start + self.page_updates]
            state = replace(state, page_table=self.update_page_table(state.page_table, jax.device_put(packed)))
        return state

    def with_controls(self, state: SlotState, packed: np.ndarray) -> SlotState:
        """The state with one slot's controls in it.

        Args:
            state: its controls are donated.
            packed: as `jspec.sampling.penalties.pack` gives them.
        """
        return replace(state, controls=self.admit_controls(state.controls, jax.device_put(packed)))

    def with_grammar(self, state: SlotState, table: int, grammar: Grammar) -> SlotState:
        """The state with a grammar in one of its tables.

        Args:
            state: its tables are donated.
        """
        assert state.grammars is not None
        packed = grammar_mask.pack(table, grammar.class_of, grammar.next, state.grammars.next.shape[1])
        return replace(state, grammars=self.load_grammar(state.grammars, jax.device_put(packed)))

    def _compile(self, programs: Iterable[Lowered], check: Check = lambda executables: None) -> None:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # one is lowered while others compile
            compiled = [(keep, pool.submit(self._compile_one, name, lowered)) for name, keep, lowered in programs]
        new = [(keep, one.result()) for keep, one in compiled]  # none is kept if one fails
        if new:
            check([*self.executables, *(executable for _, executable in new)])
        for keep, executable in new:
            keep(executable)

    def _lowered(self) -> Iterator[Lowered]:
        """What every engine has."""
        yield from self._lowered_rounds(self._program)
        yield from self._lowered_prefill(self._program)
        yield from self._lowered_others()

    def _lowered_rounds(self, program: Program) -> Iterator[Lowered]:
        config, trace, is_scored = self._config, program.trace, program.logprobs is not None
        assert config.buckets is not None
        program = replace(program, rounds=config.rounds_per_dispatch)
        for rows, depth in product(config.buckets, reversed(self._depths)):
            keep: Callable[[Any], None] = partial(self.rounds.__setitem__, (rows, depth, trace))
            if is_scored:
                keep = partial(self.scored_rounds.__setitem__, (rows, depth))
            name = f"round[{rows}]" if depth == self._depths[-1] else f"round[{rows}, depth {depth}]"
            name += " with logprobs" if is_scored else " traced" if trace else ""
            cut = replace(program, drafter=program.drafter.cut(depth))
            yield name, keep, self._lower(name, partial(spec_step, cut), rows)

    def _lowered_prefill(self, program: Program) -> Iterator[Lowered]:
        assert self._config.prefill_buckets is not None
        for tokens in self._config.prefill_buckets:
            name, words = f"prefill[{tokens}]", PREFILL_HEAD + self._pages + tokens
            keep: Callable[[Any], None] = partial(self.prefill.__setitem__, tokens)
            if program.logprobs is not None:
                keep = partial(self.scored_prefill.__setitem__, (tokens, program.prompt_logprobs))
                name += " with prompt logprobs" if program.prompt_logprobs else " with logprobs"
            yield name, keep, self._lower(name, partial(prefill_step, program), words)

    def _lowered_others(self) -> Iterator[Lowered]:
        keep, state = partial(partial, setattr, self), self._shapes
        updates = jax.ShapeDtypeStruct((self.page_updates, 3), jnp.int32)
        yield (
            "update_page_table",
            keep("update_page_table"),
            self._lower_entry("update_page_table", update_page_table, state.page_table, updates),
        )
        if state.controls is not None:
            packed = jax.ShapeDtypeStruct((penalties.packed_size(state.controls),), jnp.int32)
            lowered = self._lower_entry("controls", penalties.admit, state.controls, packed)
            yield "controls", keep("admit_controls"), lowered
        if state.grammars is not None:
            packed = jax.ShapeDtypeStruct((grammar_mask.packed_size(state.grammars),), jnp.int16)
            lowered = self._lower_entry("grammar", grammar_mask.load, state.grammars, packed)
            yield "grammar", keep("load_grammar"), lowered
        if self._program.drafter.has_pending_rows and self._config.prefix_cache:
            words = CATCH_UP_HEAD + self._pages
            lowered = self._lower("write_pending_rows", partial(write_pending_rows_step, self._program), words)
            yield "write_pending_rows", keep("write_pending_rows"), lowered

    def _lower(self, name: str, step: Callable[..., Any], words: int) -> Any:
        return self._lower_step(name, step, jax.ShapeDtypeStruct((words,), jnp.int32))

    def _lower_step(self, name: str, step: Callable[..., Any], *inputs: Any) -> Any:
        return self._timed(name, jax.jit(step, donate_argnums=1), self._params, self._shapes, *inputs)

    def _lower_entry(self, name: str, enter: Callable[..., Any], part: Any, packed: Any) -> Any:
        """What writes into a part of the state, which is donated."""
        return self._timed(name, jax.jit(enter, donate_argnums=0), part, packed)

    def _timed(self, name: str, function: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        lowered = function.lower(*arguments)
        self.lower_seconds[name] = time.perf_counter() - start
        return lowered

    def _compile_one(self, name: str, lowered: Any) -> Any:
        start = time.perf_counter()
        executable = lowered.compile(compiler_options=self._program.compiler_options)
        self.seconds[name] = time.perf_counter() - start
        logger.info("compiled %s in %.1f s", name, self.seconds[name])
        return executable
