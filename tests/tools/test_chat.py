"""Test `jspec chat`: the conversation, its commands, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jspec import Engine, SamplingParams
from jspec.__main__ import main
from jspec.engine.reading.reasoning import FORMATS
from jspec.engine.request.request import Chunk
from jspec.engine.text.tokenizer import HFTokenizer
from jspec.tools import chat, colour, demo, generate
from tests.server.test_reasoning import WRITTEN
from tests.support import lettered, tool_serving

pytestmark = pytest.mark.once

SPEED = r"\(\d+ tokens, \d+ rounds, mean acceptance length \d\.\d\d(, [\d.]+ tokens/s)?\)"  # no speed of a short answer
GREEDY = SamplingParams(max_tokens=5, temperature=0)
LONG = SamplingParams(max_tokens=20, temperature=0)
USER: Any = {"role": "user", "content": "caf\udce9"}


class ChatTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return a small engine whose chat template joins the texts of all messages."""

    def template(self: lettered.Lettered, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages).replace("Hello", "a"))

    monkeypatch.setattr(lettered.Lettered, "chat", template)
    return lettered.chain()


def say(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Make `input` return the given lines or raise the given errors, and then signal the end of the input."""
    said: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(said)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def completed(engine: Engine, text: str, params: SamplingParams = GREEDY) -> str:
    (done,) = engine.generate(text, params)
    assert done.text is not None
    return done.text


def test_chat_answers_the_whole_conversation_until_reset(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = completed(engine, "1ab")
    second = completed(engine, f"1ab{first}b,")
    fresh = completed(engine, "1a{")
    out = io.StringIO()
    talk = chat.ChatSession(engine, GREEDY, "1", out)
    say(monkeypatch, "ab", " b, ", "", "/reset", "a{", "/unknown", "/exit", "never read")
    talk.run()
    assert talk.messages == [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "a{"},
        {"role": "assistant", "content": fresh},
    ]
    answers = [line for line in out.getvalue().split("\n") if not re.fullmatch(SPEED, line)]
    assert answers == [chat.HELP, first, second, fresh, chat.HELP, ""]


def test_chat_prints_speed_and_acceptance_after_each_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    say(monkeypatch, "ba", "/reset", "b")
    chat.ChatSession(engine, LONG, None, out).run()
    first, second = engine.generate(["ba", "b"], LONG)
    lines = [line for line in out.getvalue().split("\n") if re.fullmatch(SPEED, line)]
    assert [re.sub(r"(, [\d.]+ tokens/s)?\)$", "", line) for line in lines] == [
        f"({len(one.token_ids)} tokens, {one.metrics.num_drafts} rounds, "
        f"mean acceptance length {one.metrics.mean_acceptance_length:.2f}"
        for one in (first, second)
    ]
    assert first.metrics.mean_acceptance_length > 1, "negative control: some drafts are accepted"


def test_chat_ctrl_c_stops_the_answer_and_keeps_its_beginning(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stream = completed(engine, "ba", LONG), engine.stream
    stopped: list[bool] = []

    def interrupted(prompt: Any, params: SamplingParams) -> Iterator[Chunk]:
        try:
            chunks = stream(prompt, params)
            yield next(chunks)
            yield next(chunks)
            raise KeyboardInterrupt
        finally:
            stopped.append(True)

    monkeypatch.setattr(engine, "stream", interrupted)
    out = io.StringIO()
    talk = chat.ChatSession(engine, GREEDY, None, out)
    say(monkeypatch, KeyboardInterrupt, "ba", KeyboardInterrupt)
    talk.run()
    answer = talk.messages[-1]["content"]
    assert whole.startswith(answer) and len(answer) < len(whole)
    assert f"{answer} (stopped)\n(" in out.getvalue()
    assert stopped == [True]
    assert out.getvalue().count(chat.HELP) == 3, "at the start and after each Ctrl-C at the prompt"


FINAL = "<|start|>assistant<|channel|>final<|message|>"
ANSWERS = [*WRITTEN, ("harmony", "", f"<|channel|>analysis<|message|>I add.<|end|>{FINAL}It is 3.")]
ANSWERS += [("think", "<think>\n", "I add.</think>It is 3."), ("think", "", "It is 3.")]


@pytest.mark.parametrize(("name", "prompt", "text"), ANSWERS)
def test_chat_prints_reasoning_and_keeps_the_answer_without_it(name: str, prompt: str, text: str) -> None:
    template = f"{{# {FORMATS[name].signs[0]} #}}{{{{ messages[-1].content }}}}{prompt}"
    engine, out = tool_serving.special_engine(template), io.StringIO()
    talk = chat.ChatSession(engine, SamplingParams(max_tokens=120), None, out)
    with tool_serving.telling(engine, text):
        talk.answer("Hi")
    assert talk.messages[-1] == {"role": "assistant", "content": "It is 3."}
    assert out.getvalue().startswith(f"{text}\n")


def test_chat_message_that_is_no_text_in_utf8_is_refused_and_not_kept() -> None:
    """A terminal's byte that is no UTF-8 is half of a surrogate pair in Python."""
    engine, out = tool_serving.engine(), io.StringIO()
    talk = chat.ChatSession(engine, GREEDY, None, out)
    talk.answer("caf\udce9")
    assert talk.messages == [] and "surrogates not allowed" in out.getvalue()
    for messages, name in (([USER], "messages"), ([[{**USER, "content": "Hi"}], [USER]], r"messages\[1\]")):
        with pytest.raises(ValueError, match=f"^{name}: expected texts that UTF-8 can represent"):
            engine.chat(messages)


def test_chat_message_that_is_too_long_is_refused_and_not_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    talk = chat.ChatSession(engine, GREEDY, None, out)
    say(monkeypatch, "1" * 60, "ab")
    talk.run()
    assert "max_len=48" in out.getvalue() and "/reset" in out.getvalue()
    assert [message["content"] for message in talk.messages] == ["ab", completed(engine, "ab")]


def test_chat_on_a_terminal_colours_drafted_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    (done,) = engine.generate("ba", LONG)
    tokens = zip(done.pieces or [], done.from_draft, strict=True)
    drafted = "".join(piece for piece, is_drafted in tokens if is_drafted)
    assert drafted and len(drafted) < len(done.text or "")
    out = ChatTerminal()
    say(monkeypatch, "ba")
    chat.ChatSession(engine, LONG, None, out).run()
    pattern = re.escape(colour.COLOUR) + "(.*?)" + re.escape(colour.RESET)
    assert "".join(re.findall(pattern, out.getvalue(), re.S)) == drafted
    assert re.sub(pattern, r"\1", out.getvalue()).startswith(f"{chat.HELP}\n{done.text}\n(")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = ChatTerminal()
    say(monkeypatch, "ba")
    chat.ChatSession(engine, LONG, None, plain).run()
    assert "\033" not in plain.getvalue()


def test_chat_command_reads_options_and_runs_until_the_end_of_the_input(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    made: list[SamplingParams] = []
    init: Callable[..., None] = chat.ChatSession.__init__

    def remember(self: chat.ChatSession, one: Engine, params: SamplingParams, system: str | None) -> None:
        made.append(params)
        init(self, one, params, system)

    monkeypatch.setattr(chat.ChatSession, "__init__", remember)
    monkeypatch.setattr(type(engine), "close", lambda self: None)
    monkeypatch.setattr(generate, "prepare", lambda arguments: lettered.tokenizer())
    monkeypatch.setattr(generate, "make_engine", lambda arguments, tokenizer: engine)
    say(monkeypatch, "b")
    assert main(["chat", "--target", "a", "--system", "a", "--max-tokens", "5", "--temperature", "0"]) == 0
    assert completed(engine, "ab") in capsys.readouterr().out
    assert made == [GREEDY]


def test_chat_ctrl_c_before_the_first_token_leaves_no_counters_and_no_message(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(prompt: Any, params: SamplingParams) -> Iterator[Chunk]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(engine, "stream", interrupted)
    out = io.StringIO()
    talk = chat.ChatSession(engine, GREEDY, "1", out)
    say(monkeypatch, "ab")
    talk.run()
    assert out.getvalue() == f"{chat.HELP}\n (stopped)\n\n"
    assert talk.messages == [{"role": "system", "content": "1"}]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Copy the embedded target without its chat template."""
    folder = tmp_path / "bare"
    shutil.copytree(demo.TARGET, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    return folder


def test_chat_command_without_a_chat_template_names_what_to_do_and_exits_2(
    bare: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["chat", "--target", str(bare)]) == 2
    error = capsys.readouterr().err
    assert "no chat template" in error and "jspec generate" in error and error.count("\n") == 1
    assert "--chat-template FILE" in error


def test_chat_template_of_the_embedded_model_begins_as_its_texts_do() -> None:
    tokenizer = HFTokenizer(demo.TARGET)
    assert tokenizer.chat([{"role": "user", "content": "def f():"}]) == tokenizer.encode("def f():")


@pytest.mark.parametrize("command", ["chat", "serve", "generate --system a"])
def test_chat_template_option_replaces_the_targets_template_or_adds_one(
    command: str, bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rendered: list[str] = []

    def render(arguments: Any, tokenizer: Any, **options: Any) -> Engine:
        roles = ("user", "def f():"), ("assistant", "    pass"), ("user", "def g():")
        ids = tokenizer.chat([{"role": role, "content": text} for role, text in roles])
        rendered.append(tokenizer.decode(ids))
        raise ValueError("stop here")

    monkeypatch.setattr(generate, "make_engine", render)
    file = bare / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
    for target, template in (("demo", []), ("demo", [str(file)]), (str(bare), [str(file)])):
        words = ["--target", target, *(["--chat-template"] * len(template)), *template]
        more = {"serve": ["--port", "0"], "generate": ["def"]}.get(command.split()[0], [])
        assert main([*command.split(), *words, *more]) == 2
    written = "[user]def f():[assistant]    pass[user]def g():[assistant]"
    assert rendered == ["def f():\n    pass\ndef g():", written, written]
    assert main(["chat", "--target", "demo", "--tokenizer", "bytes", "--chat-template", str(file)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("jspec: --chat-template: expected a tokenizer")
