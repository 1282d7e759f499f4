"""Test `jspec generate`: the sources of the prompt, and the effects of the sampling options."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jspec import DFlash, DraftModel, Eagle3, Engine, SamplingParams
from jspec.__main__ import main
from jspec.draft.auto import load_drafter
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Chunk
from jspec.step.executables import Executables
from jspec.tools import command_line, demo, generate, serve, speed_meter
from tests.support import engines, lettered, paper, tool_serving

pytestmark = pytest.mark.once

LETTERED = "lettered"  # the name of a target that the fixture `asked` replaces by a small engine


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the prompts and parameters that commands give to a small engine.

    The small engine replaces the loaded one.
    """
    seen: list[Any] = []

    class Asked:
        """The small engine; closing has no effect, because other tests use it too."""

        def __init__(self, engine: Engine) -> None:
            self._engine = engine

        def __enter__(self) -> Asked:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def stream(self, prompt: Any, params: SamplingParams) -> Any:
            seen.append((prompt, params))
            return self._engine.stream(prompt, params)

        def generate(self, prompt: Any, params: SamplingParams) -> Any:
            seen.append((prompt, params))
            return self._engine.generate(prompt, params)

    monkeypatch.setattr(generate, "prepare", lambda arguments: lettered.tokenizer())
    monkeypatch.setattr(generate, "make_engine", lambda arguments, tokenizer: Asked(lettered.paper_chain()))
    monkeypatch.setattr(lettered.Lettered, "chat", lambda self, messages: self.encode(spoken(messages)))
    return seen


def spoken(messages: Sequence[dict[str, str]]) -> str:
    """Return a conversation as letters of the small tokenizer, "a" for a system message and "b" for a user message."""
    return "".join({"system": "a", "user": "b"}[message["role"]] + message["content"] for message in messages)


def run(*words: str) -> int:
    return main(["generate", "--target", LETTERED, "--max-tokens", "6", *words])


def test_generate_command_reads_the_prompt_from_argument_file_and_standard_input(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt").write_text("ab\n\n1")
    monkeypatch.setattr("sys.stdin", io.StringIO("ba12"))
    monkeypatch.setattr(lettered.Lettered, "encode", lambda self, text: [1] * len(text))
    for words in (("abab",), ("--prompt-file", str(tmp_path / "prompt")), ("--prompt-file", "-")):
        assert run(*words) == 0
    assert [prompt for prompt, _ in asked] == ["abab", "ab\n\n1", "ba12"]


@pytest.mark.parametrize("words", [(), ("ab", "--prompt-file", "-")], ids=["none", "both"])
def test_generate_command_without_one_prompt_exits_2(
    asked: list[Any], words: tuple[str, ...], capsys: pytest.CaptureFixture
) -> None:
    assert run(*words) == 2
    assert "expected a prompt or --prompt-file FILE, one of the two" in capsys.readouterr().err
    assert asked == []


def test_generate_command_chat_and_system_options_apply_the_chat_template(asked: list[Any]) -> None:
    assert run("--chat", "12") == 0
    assert run("--system", "1", "12") == 0
    assert run("12") == 0
    encode = lettered.tokenizer().encode
    assert [prompt for prompt, _ in asked] == [encode("b12"), encode("a1b12"), "12"]


def test_generate_command_sampling_options_set_the_requests_parameters(asked: list[Any]) -> None:
    words = "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --seed 7 --stop x --stop }"
    words += " --presence-penalty 0.25 --frequency-penalty -0.5 --ignore-eos --logprobs 2"
    assert run(*words.split(), "ab") == 0
    expected = SamplingParams(
        max_tokens=6,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        seed=7,
        stop=("x", "}"),
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        ignore_eos=True,
        logprobs=2,
    )
    assert asked == [("ab", expected)]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", dict(temperature=0.6, top_k=20)),
        ("--temperature 0 --top-p 0.5", dict(temperature=0, top_k=20, top_p=0.5)),
        ("--generation-config jspec", dict(temperature=0)),
        ("--generation-config FOLDER", dict(temperature=0.6, top_k=20)),
    ],
)
def test_generate_command_takes_the_sampling_of_the_targets_generation_config(
    asked: list[Any], tmp_path: Path, words: str, fields: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    target = LETTERED if "FOLDER" in words else str(tmp_path)
    options = words.replace("FOLDER", str(tmp_path)).split()
    assert main(["generate", "--target", target, "--max-tokens", "6", *options, "ab"]) == 0
    assert asked == [("ab", SamplingParams(max_tokens=6, **fields))]


def test_generate_command_stop_option_ends_the_text_before_the_stop_string(
    asked: list[Any], capsys: pytest.CaptureFixture
) -> None:
    assert run("ab") == 0
    whole = capsys.readouterr().out.rstrip("\n")
    assert len(whole) > 2
    assert run("--stop", whole[2], "ab") == 0
    assert capsys.readouterr().out == whole[: whole.index(whole[2])] + "\n"


def test_generate_command_n_option_prints_every_completion_of_the_engine(
    asked: list[Any], capsys: pytest.CaptureFixture
) -> None:
    assert run("--n", "2", "--temperature", "1", "--seed", "3", "ab") == 0
    ((prompt, params),) = asked
    first, second = lettered.paper_chain().generate(prompt, params)[0].samples
    out = capsys.readouterr().out
    assert out == f"--- completion 1 of 2\n{first.text}\n--- completion 2 of 2\n{second.text}\n"
    assert first.text != second.text, "negative control: two different texts"


@pytest.mark.parametrize("count", ["1", "2"])
def test_generate_command_writes_the_reasoning_of_every_chat_completion_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, count: str
) -> None:
    engine = tool_serving.engine()
    monkeypatch.setattr(generate, "prepare", lambda arguments: engine.tokenizer)
    monkeypatch.setattr(generate, "make_engine", lambda arguments, tokenizer: nullcontext(engine))
    with tool_serving.telling(engine, "<think>A thought.</think>The answer."):
        assert main(["generate", "--target", LETTERED, "--chat", "--n", count, "Hello"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("The answer.") == shown.err.count("A thought.") == int(count)
    assert "A thought." not in shown.out


def test_generate_command_grammar_options_constrain_the_output(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("outlines_core", reason="the grammar library is not installed")
    assert run("--regex", "(12){2}", "a") == 0
    assert capsys.readouterr().out == "1212\n"
    schema = {"type": "string", "pattern": "^[ab]$"}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for given in (json.dumps(schema), f"@{tmp_path / 'schema.json'}"):
        assert run("--json-schema", given, "a") == 0
        assert json.loads(capsys.readouterr().out) in ("a", "b")
    pytest.importorskip("llguidance", reason="the grammar library is not installed")
    (tmp_path / "grammar").write_text('start: "1" pair\npair: "a" | "b1"')
    assert run("--grammar", f"@{tmp_path / 'grammar'}", "a") == 0
    assert re.fullmatch(r"1(a|b1)\n", capsys.readouterr().out)


def test_generate_command_logprobs_option_prints_the_engines_records_after_the_text(
    asked: list[Any], capsys: pytest.CaptureFixture
) -> None:
    assert run("--logprobs", "2", "--ignore-eos", "ab") == 0
    ((prompt, params),) = asked
    (done,) = lettered.paper_chain().generate(prompt, params)
    text, heading, *lines = capsys.readouterr().out.splitlines()
    assert text == done.text and heading.startswith("logprob ") and len(lines) == params.max_tokens
    for record, line in zip(done.logprobs or [], lines, strict=True):
        numbers, *top = line.split("; ")[0].split()[:2], *line.split("; ")[1].split(", ")
        assert numbers == [f"{record.logprob:.3f}", str(record.rank)]
        assert [each.split()[-1] for each in top] == [f"{value:.3f}" for value in record.top.values()]


def test_generate_command_schema_file_missing_exits_2(asked: list[Any], capsys: pytest.CaptureFixture) -> None:
    assert run("--json-schema", "@nowhere.json", "a") == 2
    assert "nowhere.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_command_without_tokenizer_names_the_option_before_anything_is_compiled(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(Executables, "__init__", lambda *arguments: compiled.append(arguments))
    words = [command, "--target", str(demo.HEAD)] + (["hi"] if command == "generate" else [])
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--tokenizer bytes" in error and error.count("\n") == 1
    assert compiled == []


def test_generate_command_given_demo_loads_the_embedded_target_head_and_tokenizer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    built: list[Any] = []

    def compiled(self: Any, program: Any, params: Any, state: Any, *others: Any) -> None:
        built.append((params.target.config, program.drafter))
        raise ValueError("stop here")

    monkeypatch.setattr(Executables, "__init__", compiled)
    assert main(["generate", "--target", "demo", "--eagle3", "demo", "def main("]) == 2
    assert "stop here" in capsys.readouterr().err
    ((target, drafter),) = built
    assert (target.num_layers, target.vocab_size, drafter.tree.depth) == (7, 2048, 5)
    tokenizer = generate.prepare(command_line.make_parser().parse_args(["generate", "--target", "demo", "x"]))
    assert tokenizer.decode(tokenizer.encode("def main(")) == "def main(" and len(tokenizer.encode("def main(")) < 6
    assert (demo.folder("other", "eagle3"), demo.folder("./demo", "eagle3")) == ("other", "./demo")


def test_generate_command_given_demo_finds_the_embedded_folder_of_each_kind_of_drafter() -> None:
    expected = dict(eagle3=(demo.HEAD, Eagle3), dflash=(demo.DFLASH, DFlash), draft_model=(demo.TARGET, DraftModel))
    for name, (folder, kind) in expected.items():
        words = ["generate", "--target", "demo", f"--{name.replace('_', '-')}", "demo", "x"]
        arguments = command_line.make_parser().parse_args(words)
        generate.prepare(arguments)
        assert Path(getattr(arguments, name)) == folder and type(load_drafter(folder)) is kind
    arguments = command_line.make_parser().parse_args(["generate", "--target", "demo", "--draft", "demo", "x"])
    generate.prepare(arguments)
    assert arguments.eagle3 == demo.HEAD, "of the embedded heads --draft takes the EAGLE-3 head"


def test_draft_device_option_names_a_device_of_the_draft_model(capsys: pytest.CaptureFixture) -> None:
    def options(*words: str) -> Any:
        return generate.draft_options(command_line.make_parser().parse_args(["generate", "--target", "none", *words]))

    given = options("--draft-model", "none", "--draft-device", "2", "--draft-quantize", "int8")
    assert given == {"device": jax.devices()[2], "quantize": "int8"}
    assert options("--draft-model", "none") == {}
    for index in ("4", "-1"):
        with pytest.raises(ValueError, match=f"--draft-device: expected a number from 0 to 3, .* got {index}"):
            options("--draft-model", "none", "--draft-device", index)
    with pytest.raises(ValueError, match="--draft-device: expected --draft-model, whose device it is, got none"):
        options("--ngram", "--draft-device", "1")


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("--model", "instead: --target"),
        ("--prompt", "instead: the text alone, as an argument of jspec generate"),
        ("--max-model-len", "instead: --max-len"),
        ("--max_new_tokens", "instead: --max-tokens"),
        ("--num-speculative-tokens", "instead: --tree chain:K"),
        ("--speculative-config", "instead: --eagle3, --draft-model or another drafter, and --tree chain:K"),
        ("--kv-cache-dtype", "instead: --kv-dtype"),
        ("--gpu-memory-utilization", "from Python: memory_fraction="),
        ("--tensor-parallel-size", "instead: --tensor-parallel"),
        ("--typical-threshold", "from Python: accept=, such as accept=jspec.verify.Typical(0.09, 0.3)"),
    ],
)
def test_command_line_option_of_another_project_raises_naming_the_jspec_option(
    name: str, hint: str, command: str, capsys: pytest.CaptureFixture
) -> None:
    for words in ([name, "4"], [f"{name}=4"]):
        with pytest.raises(SystemExit) as stop:
            main([command, *words, "--", "hello"])
        shown = f"{name.replace('_', '-')} is no option of jspec {command}; {hint}"
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"jspec {command}: {shown}; see jspec {command} --help\n"


def test_foreign_options_are_no_options_of_ours_and_name_options_that_exist() -> None:
    parsers = [argparse.ArgumentParser() for _ in range(2)]
    for parser, command in zip(parsers, (generate, serve), strict=True):
        command.add_arguments(parser)
    ours, served = (set(re.findall("--[a-z0-9-]+", parser.format_help())) for parser in parsers)
    hints = command_line.FOREIGN_OPTIONS
    assert not {f"--{name.replace('_', '-')}" for name in hints} & ours
    assert set(re.findall("--[a-z0-9-]+", " ".join(hints.values()))) <= ours | served
    assert command_line.foreign_hint("draft_model", {"draft_model"}) is None  # no option in Python, but one here


def test_stream_chunks_have_the_text_of_each_token() -> None:
    chunks: list[Chunk] = list(lettered.paper_chain().stream("ab{", SamplingParams(max_tokens=12, temperature=0)))
    assert [len(chunk.pieces or []) for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
    assert all((chunk.text or "").startswith("".join(chunk.pieces or [])) for chunk in chunks)
    assert "".join(chunk.text or "" for chunk in chunks)


def test_speed_meter_does_not_count_the_compilation_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds are compiled between the first chunk and the second one."""
    options: dict[str, Any] = dict(slots=1, max_len=engines.MAX_LEN, prefill_buckets=(8,), controls=False)
    engine, clock = paper.make(engines.target(), tokenizer=lettered.tokenizer(), **options), [0.0]
    compiled = engine.core.runner.compile

    def slow(*arguments: Any) -> None:
        clock[0] += 1000.0
        compiled(*arguments)

    def now() -> float:
        clock[0] += 0.5  # seconds that pass between two looks at the clock
        return clock[0]

    monkeypatch.setattr(engine.core.runner, "compile", slow)
    monkeypatch.setattr(speed_meter.time, "perf_counter", now)
    meter = speed_meter.SpeedMeter(engine, 12)
    for _ in meter.watch(engine.stream("ab{", max_tokens=12, temperature=0.0, ignore_eos=True)):
        pass
    (speed,) = re.findall(r"([\d.]+) tokens/s", meter.line())
    assert float(speed) > 0.1


@pytest.mark.parametrize(("seconds", "speeds"), [(0.0004, []), (0.05, []), (0.5, ["10.0"])])
def test_speed_line_has_no_speed_of_chunks_that_came_at_once(
    seconds: float, speeds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last five tokens come some time after the first round's, which come a second after the prompt's."""
    times = iter([0.0, 1.0, 1.0 + seconds])
    monkeypatch.setattr(speed_meter, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    engine: Any = SimpleNamespace(metrics=Metrics())
    meter = speed_meter.SpeedMeter(engine, 8)
    chunks = [Chunk("", [7] * count, [False] * count) for count in (1, 2, 5)]
    assert list(meter.watch(chunks)) == chunks
    assert re.findall(r"([\d.]+) tokens/s", meter.line()) == speeds


@pytest.mark.parametrize(
    ("max_tokens", "prompt", "is_cut"),
    [
        (engines.MAX_LEN, "ab{", True),
        (None, "ab{", True),
        (12, "ab{", False),
        (engines.MAX_LEN - 4, "ab{", False),
    ],
)
def test_speed_line_says_that_max_len_ended_an_answer(max_tokens: int | None, prompt: str, is_cut: bool) -> None:
    options: dict[str, Any] = dict(slots=2, max_len=engines.MAX_LEN, prefill_buckets=(8,), controls=False)
    with paper.make(engines.target(), tokenizer=lettered.tokenizer(), **options) as engine:
        for n in (1, 2):
            meter = speed_meter.SpeedMeter(engine, max_tokens)
            for _ in meter.watch(engine.stream(prompt, n=n, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)):
                pass
            assert meter.line().endswith(f"; ended by max_len {engines.MAX_LEN}") == is_cut


def test_generate_command_with_a_regex_and_without_its_library_says_so_before_it_looks_for_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    assert main(["generate", "--target", "no/such/folder", "--regex", "a+", "prompt"]) == 2
    assert "outlines_core, which is not installed" in capsys.readouterr().err
