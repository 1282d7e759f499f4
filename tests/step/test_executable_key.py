"""Test keys of executables: their names in logs and `Engine.compile_seconds`, and their equality."""

from __future__ import annotations

import pytest

from jspec.step.executable_key import ExecutableKey

pytestmark = pytest.mark.once

NAMES = {
    "round[2]": ExecutableKey.round(2, 3),
    "round[2, depth 1]": ExecutableKey.round(2, 1),
    "round[2] traced": ExecutableKey.round(2, 3, traced=True),
    "round[2] with logprobs": ExecutableKey.round(2, 3, logprobs=True),
    "round[2] of gathered logits": ExecutableKey.round(2, 3, gathers_logits=True),
    "draft[2, depth 3]": ExecutableKey.split(2, 3)[0],
    "masked verify[2, depth 3]": ExecutableKey.split(2, 3)[1],
    "masked verify[2, depth 3] with logprobs": ExecutableKey.split(2, 3, logprobs=True)[1],
    "verify[2, depth 3]": ExecutableKey.split(2, 3, traced=False, masked=False)[1],
    "verify[2, depth 3] traced": ExecutableKey.split(2, 3, masked=False)[1],
    "verify[2, depth 3] with logprobs": ExecutableKey.split(2, 3, logprobs=True, masked=False)[1],
    "commit[2, depth 3]": ExecutableKey("commit", 2, 3),
    "draft prefill[16]": ExecutableKey("draft_prefill", 16),
    "prefill[16]": ExecutableKey("prefill", 16),
    "prefill[16] with logprobs": ExecutableKey("prefill", 16, logprobs=True),
    "prefill[16] with prompt logprobs": ExecutableKey("prefill", 16, logprobs=True, prompt_logprobs=True),
    "masked prefill[16]": ExecutableKey("prefill", 16, masked=True),
    "masked prefill[16] with logprobs": ExecutableKey("prefill", 16, logprobs=True, masked=True),
    "masked prefill[16] with logprobs of prompts": ExecutableKey(
        "prefill", 16, logprobs=True, prompt_logprobs=True, masked=True
    ),
    "update_page_table": ExecutableKey("update_page_table"),
    "controls": ExecutableKey("controls"),
    "grammar": ExecutableKey("grammar"),
    "write_pending_rows": ExecutableKey("write_pending_rows"),
}


@pytest.mark.parametrize("name", NAMES)
def test_executable_key_of_each_kind_has_bucket_depth_and_outputs_in_its_name(name: str) -> None:
    assert NAMES[name].name(full_depth=3) == name


def test_executable_key_of_a_round_with_logprobs_ignores_whether_it_is_traced() -> None:
    """The results of a round with logprobs always contain the drafts, so one program serves both."""
    assert ExecutableKey.round(2, 3, logprobs=True) == ExecutableKey.round(2, 3, logprobs=True, traced=True)
