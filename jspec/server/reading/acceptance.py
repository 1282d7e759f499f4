"""How many draft tokens of a request were accepted, as JSON under vLLM's and OpenAI's names."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from jspec.engine.request.metrics import Metrics


def acceptance_json(metrics: Metrics) -> dict[str, Any]:
    """Return a request's counters of drafting.

    Entry k of ``acceptance_histogram`` is the number of rounds that accepted k draft tokens. Those after the request's
    end count in it, and in no other entry. With a look-up beside a head, tokens are also counted by source: those that
    the "head" and those that the "lookup" drafted.
    """
    drafted, accepted = metrics.num_draft_tokens_per_source, metrics.num_accepted_tokens_per_source
    by_source = {"num_accepted_draft_tokens_per_source": accepted, "num_draft_tokens_per_source": drafted}
    more_than = [metrics.num_drafts, *metrics.num_accepted_per_position, 0]
    return {
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.acceptance_rate,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(more_than)],
        "num_spec_steps": metrics.num_drafts,
        "num_accepted_draft_tokens": metrics.num_accepted_tokens,
        "num_draft_tokens": metrics.num_draft_tokens,
        **(by_source if drafted else {}),
    }


def prediction_details(metrics: Metrics) -> dict[str, int]:
    """Return the counters that the usage of a request with a prediction has.

    They count the draft tokens of the look-up in all the request's rounds, from the prediction and from the request's
    text: those that were accepted and emitted, and those that were verified and not emitted.
    """
    drafted = metrics.num_draft_tokens_per_source.get("lookup", metrics.num_draft_tokens)
    accepted = metrics.num_accepted_tokens_per_source.get("lookup", metrics.num_accepted_tokens)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
