"""Builds the loop of an engine (`EngineCore`) from models and options."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jspec import verify
from jspec.core.config import EngineConfig
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, NoDraft, check_layer_windows
from jspec.draft.dflash_head import BoundDFlash
from jspec.draft.draft_model import BoundModel
from jspec.engine.run.core import EngineCore
from jspec.engine.run.model_runner import ModelRunner
from jspec.engine.schedule.draft_length import Adaptive, Fixed, Policy
from jspec.engine.schedule.page_pool import PagePool
from jspec.engine.schedule.scheduler import Scheduler, SchedulerLimits
from jspec.engine.schedule.sizes import halvings, portions, round_sizes
from jspec.engine.schedule.state_pool import StatePool
from jspec.engine.text.tokenizer import check_size, load_tokenizer, warn_if_replaced
from jspec.engine.text.tokenizer_files import eos_ids
from jspec.models.config.decoder_config import DecoderConfig, ModelConfig
from jspec.models.decoder import Model
from jspec.models.deterministic import check_deterministic
from jspec.sampling import logits_processor as processors
from jspec.sampling.logits_processor import LogitsProcessor
from jspec.step.across_processes import calls_on
from jspec.step.on_mesh import mesh_for, on_one, spans_processes
from jspec.step.program import Program
from jspec.step.side import check_apart, sides_of
from jspec.step.weights import bound, drafter_on, on_devices
from pallas_kernels.recurrent.records import EVERY

logger = logging.getLogger(__name__)


def engine_config(options: Mapping[str, Any], target: ModelConfig) -> EngineConfig:
    """Check an engine's options for a target.

    Args:
        options: fields of `EngineConfig`; without ``max_len`` it is the default or, if that is less, the longest
            sequence that the target was trained for.

    Raises:
        ValueError: an option is impossible, or ``max_len`` is more than the target was trained for.
    """
    longest = target.max_position
    config = EngineConfig(**{"max_len": min(EngineConfig.max_len, longest), **options})
    if config.max_len > longest:
        raise ValueError(
            f"max_len: expected at most {longest}, the target's max_position_embeddings, got {config.max_len}; lower "
            "max_len, or raise max_position_embeddings in config.json if the target was trained for more"
        )
    return config


def model_options(
    target: ModelConfig, folder: Path, tokenizer: Any, stop_ids: Sequence[int] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the tokenizer and the EOS ids of an engine from its target's folder, before weights are read.

    Args:
        target: config of the target.
        folder: folder of the target.
        tokenizer: argument of `Engine.from_pretrained`.
        stop_ids: argument ``eos_ids`` of `Engine.from_pretrained`.
        options: fields of `EngineConfig`.

    Returns:
        The arguments "tokenizer" and "eos_ids" of `Engine`.

    Raises:
        ValueError: an option is impossible or does not fit the target, or a file of the folder is damaged.
    """
    engine_config(options, target)
    made = load_tokenizer(folder if tokenizer is None else tokenizer)
    check_size(made, target.vocab_size)
    warn_if_replaced(made, folder)
    return {
        "tokenizer": made,
        "eos_ids": eos_ids(folder, made, target.vocab_size) if stop_ids is None else stop_ids,
    }


def build_core(
    config: EngineConfig,
    target: Model,
    drafter: Drafter | None,
    logits_processor: LogitsProcessor | None,
    *,
    has_tokenizer: bool,
) -> EngineCore:
    """Check the options, compile the programs of target and drafter, and make the loop that runs them.

    Args:
        drafter: proposes tokens; None: plain decoding.
        has_tokenizer: whether the engine has a tokenizer. Grammars need one, and their tables take device memory.

    Raises:
        ValueError: options or models do not fit together or into memory.
    """
    drafter = NoDraft() if drafter is None else drafter
    check_layer_windows("target", target.config, drafter.tree)
    if config.predicted_tokens and not drafter.reads_predictions:
        raise ValueError(
            f'predicted_tokens: expected a drafter with a look-up, got {drafter!r}; name one (drafter="ngram", or '
            '"HEAD+ngram" beside a head; --ngram or --lookup ngram), or leave it out'
        )
    mesh = mesh_for(config, target)
    if config.adapters and spans_processes(mesh):
        raise NotImplementedError(
            f"adapters: expected 0 with devices of several processes, got {config.adapters}; leave it out, or merge "
            "the adapter into the target"
        )
    check_apart(config, mesh, target, drafter)
    target = on_devices(target, config, mesh)
    drafter = drafter_on(drafter, config, mesh)
    rule = verify.resolve(config.accept)
    rule.check(drafter.tree)
    depths, nodes = _draft_depths(config, drafter), _draft_nodes(config, drafter)
    processors.check(logits_processor, config, drafter.tree, target.config.vocab_size)
    program = Program(
        drafter=drafter,
        feature_layers=drafter.feature_layers(target),
        accept=rule,
        implementation=config.implementation,
        controls=config.controls,
        deterministic=config.deterministic,
        grammar_cells=config.grammar_cells if config.controls and has_tokenizer else 0,
        processor=logits_processor,
        processor_args=config.processor_args,
        mesh=mesh,
    )
    params = bound(target, drafter, config, mesh)
    if config.deterministic:
        check_deterministic(on_one(program, replace(params, draft=()))[1].main, config.implementation)
    calls = calls_on(mesh)
    calls.check_same(program, params, config)
    devices = sides_of(program, params, config, calls)
    runner = ModelRunner(program, params, config, round_sizes(depths, nodes), devices, calls)
    rows_read = None if logits_processor is not None else _rows_read(target, drafter, params.draft)
    limits = replace(_scheduler_limits(config, drafter), window=rows_read)
    states = StatePool(runner.pool.copies, EVERY, config.page_size) if target.config.has_slot_states else None
    scheduler = Scheduler(PagePool(runner.pool.pages, config.page_size), limits, states)
    return EngineCore(runner, scheduler, policy_of(config, drafter.tree, depths, nodes, runner))


def _rows_read(target: Model, drafter: Drafter, draft: Any) -> int | None:
    """Return how many of the newest cache rows the steps of an engine read at most; None: all rows.

    A logits processor may read the whole text, whose pages are the cache's: with one, all rows count as read.

    A drafter may compute the rows of the last accepted tokens one round late, so a round's tokens are added.

    Args:
        target: the target.
        drafter: the drafter.
        draft: parameters that the drafter was bound to.
    """
    windows = [_window(target.config)]
    draft_config = getattr(draft.model if isinstance(draft, (BoundModel, BoundDFlash)) else draft, "config", None)
    if isinstance(draft_config, DecoderConfig):
        windows.append(_window(draft_config) if drafter.draft_window is None else drafter.draft_window)
    if drafter.reads_text or None in windows:
        return None
    return max(window for window in windows if window is not None) + drafter.tree.depth + 1


def _window(config: DecoderConfig) -> int | None:
    """Return how many of the newest tokens a decoder's layers attend to at most; None if a layer attends to all."""
    reaches = [layer.mixer.reach for layer in config.layers]
    return None if None in reaches else max(reach for reach in reaches if reach is not None)


def _scheduler_limits(config: EngineConfig, drafter: Drafter) -> SchedulerLimits:
    assert config.buckets is not None and config.prefill_buckets is not None
    return SchedulerLimits(
        slots=config.slots,
        buckets=config.buckets,
        prefill_buckets=config.prefill_buckets,
        scratch_rows=drafter.tree.scratch_rows,
        rounds=config.rounds_per_dispatch,
        round_tokens=drafter.tree.depth + 1,
        prefix_cache=config.prefix_cache,
        prefill_budget=config.prefill_budget,
        adapters=config.adapters,
    )


def policy_of(
    config: EngineConfig, tree: Tree, depths: tuple[int, ...], nodes: tuple[int, ...], runner: ModelRunner
) -> Policy:
    """Return the policy that chooses the sizes of an engine's rounds.

    Args:
        tree: the drafter's tree.
        depths: draft depths to choose from, ascending.
        nodes: numbers of verified nodes per batch row to choose from.
        runner: knows the times of programs that were compiled ahead.
    """
    if not config.adaptive:
        return Fixed(depths[-1])
    return Adaptive(depths, nodes, shared_acceptance=tree.paths is not None, empty_seconds=runner.round_seconds)


def _draft_depths(config: EngineConfig, drafter: Drafter) -> tuple[int, ...]:
    """Return the draft depths for which to compile rounds, ascending; the last is the depth of the drafter's tree.

    Raises:
        ValueError: ``adaptive`` is set without a drafter, or the last of ``draft_depths`` is not the tree's depth.
    """
    depth = drafter.tree.depth
    if not config.adaptive:
        return (depth,)
    if depth == 0:
        raise ValueError("adaptive: expected a drafter, got none; name one or set adaptive=False")
    depths = halvings(depth) if config.draft_depths is None else config.draft_depths
    if depths[-1] != depth:
        raise ValueError(f"draft_depths: expected {depth} last, the depth of {drafter.tree}, got {depths}")
    return depths


def _draft_nodes(config: EngineConfig, drafter: Drafter) -> tuple[int, ...]:
    """Return the numbers of draft nodes per row, less than all, for which to compile rounds of many rows, ascending.

    Raises:
        ValueError: a number of ``draft_nodes`` is not less than the number of the tree's nodes.
    """
    every = drafter.tree.nodes - 1
    if not config.adaptive or config.draft_nodes == ():
        return ()
    if config.draft_nodes is None:
        return portions(every)
    if config.draft_nodes[-1] >= every:
        raise ValueError(
            f"draft_nodes: expected numbers below {every}, the draft nodes of {drafter.tree}, got {config.draft_nodes}"
        )
    return config.draft_nodes
