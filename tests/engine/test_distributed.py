"""Test that an engine on the devices of two processes emits the tokens of one process, and how both processes end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from convert import orbax
from jspec import Engine
from jspec.distributed.job import END_SECONDS
from jspec.distributed.link import SILENT_SECONDS
from jspec.models import load
from jspec.tools import convert
from tests.support import byte_pair, engines, processes
from tests.support.grammar_cases import PROMPTS, masked
from tests.support.process_scripts import ASKED, OPTIONS, PARAMS, PLAIN
from tests.support.processes import EndedProcess, run_script

pytestmark = pytest.mark.slow
BOUND = 30.0  # seconds in which a process ends after another one was lost


def expected_of_one_device() -> list[list[int]]:
    with Engine(engines.target(), **OPTIONS) as engine:
        return [one.token_ids for one in engine.generate(PROMPTS, PLAIN)]


def test_bounds_of_the_silence_and_of_the_end_add_up_to_less_than_thirty_seconds() -> None:
    assert SILENT_SECONDS + END_SECONDS < BOUND


def test_two_processes_with_a_drafter_emit_the_tokens_of_one_before_and_after_failed_steps() -> None:
    """Greedy and seeded, with penalties, grammars of both kinds, shared pages and preemption."""
    pytest.importorskip("llguidance")
    expected = [masked(prompt, params) for prompt, params in zip(ASKED, PARAMS, strict=True)]
    first, second = run_script("everything")
    assert (first.status, second.status) == (0, 0), (first.errors, second.errors)
    *runs, counts, failed, after_failure, lost, after_loss, interrupts, after_interrupts = first.said
    assert [*runs, after_failure, after_loss, after_interrupts] == [expected] * 5 and interrupts > 5
    assert counts["preempted"] > 0 and counts["cached"] > 0
    assert "error" in failed and "error" in lost
    refused, followed = second.said
    assert followed == "followed" and len(refused) == 3
    assert all("expected a call in process 0" in error for error in refused[:2]) and "one call" in refused[2]


def test_killed_process_ends_all_requests_with_its_name_and_the_other_process() -> None:
    first, second = run_script("killed 1")
    assert second.status == -9 and first.status == 1
    ended, healthy, refused = first.said
    assert ended and all(reason == "error" and "process 1 (" in error for reason, error in ended)
    assert not healthy and "process 1 (" in refused
    assert "process 1 (" in first.errors and first.end - second.said[0] < BOUND


@pytest.mark.long
def test_killed_process_0_ends_the_others_with_its_name() -> None:
    first, second = run_script("killed 0")
    assert first.status == -9 and second.status == 1
    assert "ProcessLost: process 0 (" in second.errors and second.end - first.said[0] < BOUND


@pytest.mark.long
def test_process_that_waits_for_something_else_ends_in_a_bounded_time_after_a_loss() -> None:
    first, second = run_script("hanging")
    assert second.status == -9 and first.status == 1
    assert "it has not ended by itself" in first.errors and first.end - second.said[0] < BOUND


@pytest.mark.long
def test_frozen_process_is_lost_after_its_silence() -> None:
    port = processes.free_port()
    commands = [processes.script("frozen", port, process_id) for process_id in range(2)]
    environment = processes.environment(2)
    frozen = subprocess.Popen(commands[1], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        (first,) = processes.run(commands[:1])
        assert frozen.stdout is not None
        began = float(frozen.stdout.readline().removeprefix("said "))
    finally:
        frozen.kill()
        frozen.wait()
    assert first.status == 1 and "process 1 (" in first.errors and "silent" in first.errors
    assert SILENT_SECONDS < first.end - began < BOUND


@pytest.mark.long
def test_two_processes_without_drafter_emit_the_tokens_of_one() -> None:
    first, second = run_script("plain")
    assert (first.status, second.status) == (0, 0), (first.errors, second.errors)
    assert all(one.said[0].startswith("out of memory:") for one in (first, second))
    assert "process 1 (" in first.said[1] and first.said[1].endswith(f": {second.said[1]}")
    assert second.said[1:] == ["the programs do not fit"] and first.said[2:] == [expected_of_one_device()]


@pytest.mark.long
def test_two_processes_whose_rounds_verify_a_part_of_the_nodes_emit_the_tokens_of_one() -> None:
    first, second = run_script("sized")
    assert (first.status, second.status) == (0, 0), (first.errors, second.errors)
    timed, *said = first.said
    assert second.said == [timed] and timed == 5 and said == [expected_of_one_device(), [1, 2]]


@pytest.mark.long
@pytest.mark.parametrize("form", ["Hugging Face", "converted"])
def test_two_processes_that_load_a_folder_emit_the_tokens_of_one(form: str, tmp_path: Path) -> None:
    folder = byte_pair.TARGET if form == "Hugging Face" else tmp_path / "converted"
    if form == "converted":
        assert convert.main([str(byte_pair.TARGET), str(folder)]) == 0
    first, second = run_script("loaded", str(folder), devices=1)
    assert (first.status, second.status) == (0, 0), (first.errors, second.errors)
    with Engine.from_pretrained(byte_pair.TARGET, tokenizer="bytes", slots=2, compile_cache=False) as engine:
        assert first.said == [engine.generate("def main(", PLAIN)[0].token_ids]


@pytest.mark.long
def test_processes_with_other_divided_weights_in_converted_folders_are_refused(tmp_path: Path) -> None:
    """The second folder has another output projection in one layer, and else the same weights."""
    arrays = {name: np.asarray(array) for name, array in orbax.flatten(load.load(byte_pair.TARGET).weights).items()}
    config = load.load(byte_pair.TARGET).config
    orbax.save(tmp_path / "0", "target", config, [arrays])
    orbax.save(tmp_path / "1", "target", config, [arrays | {"layers.0.o": -arrays["layers.0.o"]}])
    ended = run_script("loaded", str(tmp_path / "0"), str(tmp_path / "1"), devices=1)
    check_refused(ended, "Engine: expected the same", "values of the weights: ")


@pytest.mark.long
def test_process_with_altered_prompts_changes_the_tokens() -> None:
    """Negative control of the comparison with one device."""
    first, _ = run_script("altered")
    assert first.status == 0 and first.said != [expected_of_one_device()]


@pytest.mark.long
def test_process_that_misses_a_call_ends_all() -> None:
    first, second = run_script("skipping")
    assert (first.status, second.status) == (1, 1)
    ended, healthy, _ = first.said
    assert all("expected call 4 of process 0" in error for _, error in ended) and not healthy


def check_refused(ended: Sequence[EndedProcess], *expected: str) -> None:
    """Check that all processes failed, with errors that name the difference."""
    assert [one.status for one in ended] == [1, 1]
    assert all(text in one.errors for one in ended for text in expected), [one.errors for one in ended]


def test_processes_with_other_options_are_refused_with_the_names_of_the_options() -> None:
    check_refused(run_script("other_options"), "Engine: expected the same", "slots: 2 in process 0", "3 in process 1")


@pytest.mark.long
def test_processes_with_other_weights_are_refused() -> None:
    check_refused(run_script("other_weights"), "values of the weights: ")


@pytest.mark.long
def test_processes_with_other_programs_are_refused_with_the_name_of_the_program() -> None:
    first, second = run_script("other_program")
    assert (first.status, second.status) == (0, 0), (first.errors, second.errors)
    assert "prefill[16]: expected the same program" in first.said[0] and "process 1 (" in first.said[0]


@pytest.mark.long
def test_draft_model_on_other_devices_is_refused_beside_a_target_on_several_processes() -> None:
    for ended in run_script("apart"):
        assert ended.status == 0, ended.errors
        beside, elsewhere = ended.said
        assert "device: expected none beside tensor_parallel or mesh over devices of several processes" in beside
        assert "device: expected devices of this process (" in elsewhere and "set tensor_parallel=" in elsewhere


@pytest.mark.long
def test_error_of_one_process_is_shown_by_the_other() -> None:
    check_refused(run_script("failing"), "process 1 (", "KeyError: 'no such file'")


@pytest.mark.long
def test_process_that_ends_without_following_ends_process_0() -> None:
    first, _ = run_script("no_follower")
    assert first.status == 1 and "ProcessLost: process 1 (" in first.errors and "has ended" in first.errors


@pytest.mark.long
@pytest.mark.parametrize(("how", "statuses"), [("itself", (0, 0)), ("interrupt", (-2, 0)), ("sigterm", (143, 0))])
def test_process_0_that_ends_lets_the_others_return_from_follow(how: str, statuses: tuple[int, int]) -> None:
    ended = run_script(f"ended by {how}")
    assert tuple(one.status for one in ended) == statuses, [one.errors for one in ended]
    assert ended[1].said == ["followed"]


@pytest.mark.long
def test_process_0_that_ends_by_an_error_ends_the_others_with_it() -> None:
    check_refused(run_script("ended by error"), "ValueError: the script is wrong")


@pytest.mark.long
def test_generate_in_two_processes_prints_the_text_of_one() -> None:
    words = [sys.executable, "-m", "jspec", "generate", "--target", "demo", "--eagle3", "demo", "--max-tokens", "12"]
    words += ["--compile-cache", "", "def main("]
    port = processes.free_port()
    many = ["--tensor-parallel", "2", "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
    (alone,) = processes.run([words])
    first, second = processes.run([[*words, *many, str(process_id)] for process_id in range(2)], devices=1)
    assert (alone.status, first.status, second.status) == (0, 0, 0), (first.errors, second.errors)
    assert first.text and first.text == alone.text and second.text == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [("plain", 1, "tensor_parallel: expected at most 2, the number of cpu devices, got 4")],
)
def test_engine_of_too_many_devices_is_refused(name: str, devices: int, expected: str) -> None:
    check_refused(run_script(name, devices=devices), expected)
