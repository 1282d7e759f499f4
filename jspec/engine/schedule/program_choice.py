"""Chooses the programs to compile for requests, and the program that runs a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from itertools import product

from jspec import verify
from jspec.core.config import EngineConfig
from jspec.engine.request.request import Request
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.schedule.scheduler import PrefillPlan, RoundPlan
from jspec.engine.schedule.sizes import RoundSize, sizes_of
from jspec.step.executable_key import ExecutableKey, Kind


@dataclass(frozen=True)
class Features:
    """The outputs and masks that requests need from their rounds.

    Attributes:
        traced: whether to return the draft tree of every round.
        logprobs: whether to return log-probabilities of the emitted tokens.
        masked: whether the host computes token masks for a grammar.
        gathers_logits: whether, on several devices, rounds gather the logits of the whole vocabulary.
        adapted: whether the target has adapters.
    """

    traced: bool = False
    logprobs: bool = False
    masked: bool = False
    gathers_logits: bool = False
    adapted: bool = False

    @classmethod
    def of(cls, request: Request) -> Features:
        flags = request.trace, request.params.logprobs is not None, request.matcher is not None
        return cls(*flags, request.gathers_logits, request.adapter is not None)

    def __or__(self, other: Features) -> Features:
        return Features(*(first or second for first, second in zip(astuple(self), astuple(other), strict=True)))


def gathering(config: EngineConfig, *, edits_all: bool) -> Callable[[SamplingParams], bool]:
    """Return the function that says whether rounds of a request on several devices gather all logits.

    Args:
        edits_all: whether a logits processor edits the logits of every request.
    """
    rule = verify.resolve(config.accept)

    def gathers(params: SamplingParams) -> bool:
        reads = params.logprobs is not None or rule.reads_probabilities(is_sampled=params.temperature > 0)
        return params.cuts_used or reads or edits_all or bool(params.controls_used)

    return gathers


class LiveRequests:
    """The queued requests that have not ended, with the union of their features."""

    def __init__(self) -> None:
        self._features: dict[int, Features] = {}
        self._counts: Counter[Features] = Counter()

    def __len__(self) -> int:
        return len(self._features)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._features

    def add(self, request: Request) -> None:
        self._features[request.id] = Features.of(request)
        self._counts[self._features[request.id]] += 1

    def discard(self, request: Request) -> None:
        """Remove a request; do nothing if it is not in the collection."""
        features = self._features.pop(request.id, None)
        if features is not None:
            self._counts[features] -= 1

    def features(self) -> Features:
        """Return every feature that at least one of the requests needs."""
        return union(features for features, count in self._counts.items() if count > 0)


def union(features: Iterable[Features]) -> Features:
    """Return every feature that at least one of the given records has."""
    return reduce(Features.__or__, features, Features())


class ProgramChoice:
    """Chooses the programs to compile, for all batch sizes and prompt lengths or for those of given requests.

    Args:
        sizes: draft depths to which a round may cut the drafter's tree, and numbers of nodes that it may verify.
        helpers: kinds of the small programs that change parts of this engine's state.
        edits_all: whether a logits processor edits the logits of every request.
        is_divided: whether the engine runs on several devices.
        is_split: whether every round is several programs, because the draft model is on other devices.
    """

    def __init__(
        self,
        config: EngineConfig,
        sizes: Sequence[RoundSize],
        helpers: Collection[Kind],
        *,
        edits_all: bool,
        is_divided: bool = False,
        is_split: bool = False,
    ) -> None:
        assert config.buckets is not None and config.prefill_buckets is not None
        self._buckets, self._prefill_buckets = config.buckets, config.prefill_buckets
        self._compile_ahead, self._has_adapters = config.compile_ahead, config.adapters > 0
        self._sizes = sizes
        self._helpers = helpers
        self._edits_all, self._is_divided, self._is_split = edits_all, is_divided, is_split

    def all_keys(self, features: Features = Features(), *, prompt_logprobs: bool = False) -> list[ExecutableKey]:
        """Return the keys of all programs for requests with any of the given features.

        Args:
            features: the features that requests may need.
            prompt_logprobs: whether requests may need log-probabilities of their prompts.
        """
        keys: list[ExecutableKey] = []
        wanted = features.traced, features.logprobs, features.masked, self._has_adapters
        for traced, logprobs, masked, adapted in product(*map(_modes, wanted)):
            needs_all = self._is_divided and (logprobs or masked or self._edits_all)
            for gathers in [True] if needs_all else _modes(self._is_divided):
                keys += self._round_keys(self._buckets, Features(traced, logprobs, masked, gathers, adapted))
            for prompt in _modes(prompt_logprobs):
                keys += self._prefill_keys(self._prefill_buckets, logprobs or prompt, prompt, masked, adapted)
        return list(dict.fromkeys([*keys, *map(ExecutableKey, self._helpers)]))

    def prefill_keys(self, requests: Sequence[Request]) -> list[ExecutableKey]:
        """Return the keys of the programs that compute the requests' first tokens."""
        keys: list[ExecutableKey] = []
        kinds = dict.fromkeys((self.prefill_sizes(request), *request.prefill_outputs) for request in requests)
        for sizes, *outputs in kinds:
            keys += self._prefill_keys(sizes, *outputs)
        if self._compile_ahead or self._edits_all or any(request.params.controls_used for request in requests):
            keys += self._helper_keys("controls", "grammar")
        if self._compile_ahead or any(request.prediction for request in requests):
            keys += self._helper_keys("prediction")
        return list(dict.fromkeys([*keys, *self._helper_keys("save_state", "load_state")]))

    def round_keys(self, requests: Sequence[Request], live: LiveRequests) -> list[ExecutableKey]:
        """Return the keys of the programs for the requests' rounds, with the features of all live requests."""
        rows = min(len(live) + sum(request not in live for request in requests), self._buckets[-1])
        buckets = self._buckets if self._compile_ahead else [_smallest(self._buckets, rows)]
        keys = self._round_keys(buckets, union([live.features(), *map(Features.of, requests)]))
        return keys + self._helper_keys("update_page_table", "write_pending_rows")

    def keys_of(self, plan: RoundPlan, size: RoundSize) -> tuple[ExecutableKey, ...]:
        """Return the keys of a round's programs, the one whose output goes to the host last.

        There are several if the host computes token masks for any request, or if every round is several programs.

        Args:
            size: draft depth to which the round cuts the drafter's tree, and number of nodes that it verifies.
        """
        return self._keys_of_round(plan.bucket, size, features_of(plan))

    def _helper_keys(self, *kinds: Kind) -> list[ExecutableKey]:
        return [ExecutableKey(kind) for kind in self._helpers if kind in kinds]

    def prefill_sizes(self, request: Request) -> tuple[int, ...]:
        """Return the numbers of tokens of the prefills in which a request may be the first one, ascending."""
        if self._compile_ahead:
            return self._prefill_buckets
        return (_smallest(self._prefill_buckets, len(request.prompt_token_ids)),)

    def _round_keys(self, buckets: Sequence[int], features: Features) -> list[ExecutableKey]:
        modes = [replace(features, masked=masked) for masked in _modes(features.masked)]
        keys = [
            self._keys_of_round(rows, allowed(size, mode), mode)
            for mode in modes
            for rows in buckets
            for size in reversed(sizes_of(rows, self._sizes))
        ]
        return list(dict.fromkeys(key for round_keys in keys for key in round_keys))

    def _keys_of_round(self, rows: int, size: RoundSize, features: Features) -> tuple[ExecutableKey, ...]:
        """Return the keys of the programs of one round; the last one's output goes to the host."""
        (depth, nodes), outputs = size, dict(logprobs=features.logprobs, traced=features.traced)
        outputs["adapted"] = features.adapted
        if self._is_split:
            draft, last = ExecutableKey.split(rows, depth, masked=features.masked, nodes=nodes, **outputs)
            return draft, ExecutableKey("commit", rows, depth), last
        if features.masked:
            return ExecutableKey.split(rows, depth, logprobs=features.logprobs, adapted=features.adapted)
        return (ExecutableKey.round(rows, depth, nodes=nodes, gathers_logits=features.gathers_logits, **outputs),)

    def _prefill_keys(
        self, sizes: Sequence[int], logprobs: bool, prompt_logprobs: bool, masked: bool, adapted: bool
    ) -> list[ExecutableKey]:
        outputs = dict(logprobs=logprobs, prompt_logprobs=prompt_logprobs, adapted=adapted)
        keys = [ExecutableKey("prefill", size, masked=mode, **outputs) for size in sizes for mode in _modes(masked)]
        return keys + [ExecutableKey("draft_prefill", size) for size in sizes if self._is_split]


def prefill_key(plan: PrefillPlan) -> ExecutableKey:
    """Return the key of a prefill, with token masks if the host computes one for a sampled token."""
    logprobs, prompt_logprobs, _, adapted = plan.pieces[0].request.prefill_outputs
    masked = any(piece.emits and piece.request.matcher is not None for piece in plan.pieces)
    outputs = dict(logprobs=logprobs, prompt_logprobs=prompt_logprobs, adapted=adapted)
    return ExecutableKey("prefill", plan.bucket, masked=masked, **outputs)


def allowed(size: RoundSize, features: Features) -> RoundSize:
    """Return a size that rounds with the given features may have: rounds that return more verify all their nodes."""
    return RoundSize(size.depth) if features.traced or features.logprobs or features.masked else size


def round_size(plan: RoundPlan, size: RoundSize) -> RoundSize:
    """Return the size of a plan's rounds if a policy chose the given one."""
    return size if size.nodes is None else allowed(size, features_of(plan))


def features_of(plan: RoundPlan) -> Features:
    """Return the features of a plan's rounds; the host computes masks only if a grammar needs the newest tokens."""
    return replace(union(map(Features.of, plan.requests)), masked=wants_newest(plan.requests))


def wants_newest(requests: Sequence[Request]) -> bool:
    """Return whether the next round needs grammar masks that the host computes from the newest tokens."""
    return any(request.matcher is not None and request.is_prefilled for request in requests)


def _modes(is_wanted: bool) -> list[bool]:
    return [False, True] if is_wanted else [False]


def _smallest(sizes: Sequence[int], least: int) -> int:
    """Return the smallest of ascending sizes that is at least ``least``; the largest size if there is none."""
    return next((size for size in sizes if size >= least), sizes[-1])
