"""Test the options of `jspec serve`: config files, keys, addresses, and what is printed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jspec import Tree, distributed
from jspec.server import run
from jspec.server.http.settings import Settings
from jspec.tools import command_line, serve
from tests.support import serving


def settings(*words: str) -> Settings:
    """Return the settings of a command line."""
    arguments = command_line.make_parser().parse_args(["serve", *serve.with_config(words)])
    serve._take_model(arguments)
    return serve.make_settings(arguments)


def test_options_of_the_command_become_those_of_the_engine() -> None:
    words = ["--slots=3", "--pages=40", "--memory-fraction=0.5", "--prefill-budget=64", "--predicted-tokens=99"]
    arguments = command_line.make_parser().parse_args(["serve", *words, "--adaptive"])
    expected = dict(slots=3, pages=40, memory_fraction=0.5, prefill_budget=64, predicted_tokens=99, adaptive=True)
    assert serve.engine_options(arguments) == expected


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)


def test_settings_without_options_are_the_defaults_and_the_demo() -> None:
    assert settings() == Settings(names=("demo",))


def test_demo_has_its_head_unless_another_drafter_is_named() -> None:
    parser = command_line.make_parser()
    for words, head in (([], "demo"), (["--ngram"], None), (["--eagle3", "a/b"], "a/b")):
        arguments = parser.parse_args(["serve", *words])
        serve._take_demo(arguments)
        assert (arguments.target, arguments.eagle3) == ("demo", head)


def test_config_file_is_read_and_flags_override_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "port: 9\nmax_queue: 7\nlive: true\nlog-text: false\nrequest_timeout: 2.5\n"
        "served_model_name: [one, two]\ntool_parser:\nunknown_fields: ignore\n"
    )
    made = settings("--config", str(file), "--port", "10")
    assert made == Settings(
        names=("one", "two"), port=10, max_queue=7, live=True, request_timeout=2.5, ignore_unknown=True
    )
    assert settings(f"--config={file}").port == 9


@pytest.mark.parametrize("text", ["- a", "a: {b: 1}", "a: [[1]]", "a: [", "config: x.yaml", "\x00"])
def test_config_file_of_another_form_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"serve\.yaml: "):
        serve.with_config(["--config", str(file)])


def test_unknown_option_in_a_config_file_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("prot: 9\n")
    with pytest.raises(SystemExit):
        command_line.run(["serve", "--config", str(file)])
    assert "--prot" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_address_that_others_reach_needs_a_key_or_a_word(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="--api-key-file FILE or JSPEC_API_KEY, or --no-auth"):
        settings("--host", host)
    assert settings("--host", host, "--no-auth").keys == ()
    file = tmp_path / "keys"
    file.write_text("first\n\n second \n")
    made = settings("--host", host, "--api-key-file", str(file))
    assert [made.accepts_key(key) for key in (b"first", b"second", b"third", b"")] == [True, True, False, False]
    monkeypatch.setenv(serve.KEY_VARIABLE, "third, fourth")
    made = settings("--host", host)
    assert [made.accepts_key(key) for key in (b"third", b"fourth", b"first", b"")] == [True, True, False, False]
    assert b"third" not in repr(made).encode()
    with pytest.raises(ValueError, match="--no-auth: expected no key"):
        settings("--no-auth")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_address_needs_no_key(host: str) -> None:
    assert settings("--host", host).is_loopback


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--warm", "logprobs,other"], "--warm: expected some of logprobs,grammar,rounds, got 'other'"),
        (["--tool-parser", "other"], "--tool-parser: expected one of"),
        (["--reasoning-parser", "other"], "--reasoning-parser: expected one of"),
        (["--tree", "chain:2", "--target", "demo"], "--tree: expected a drafter"),
        (["--max-queue", "0"], "--max-queue: expected 1 to 1048576, got 0"),
        (["--max-body", "0"], "--max-body: expected 1 to 1073741824, got 0"),
        (["--request-timeout", "-1"], "--request-timeout: expected 0.001 to 31536000, got -1.0"),
        (["--drain-timeout", "nan"], "drain_seconds: expected 0 to 31536000, got nan"),
    ],
)
def test_wrong_option_is_an_error_of_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.run(["serve", "--port", "0", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_impossible_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["serve", "--port", "65536"]) == 2
    assert "port: expected 0 to 65535, got 65536" in capsys.readouterr().err


def test_file_of_keys_without_a_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    with pytest.raises(ValueError, match="keys: expected a key a line, got none"):
        settings("--api-key-file", str(tmp_path / "keys"))


def test_address_in_use_is_an_error_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert command_line.run(["serve", "--port", str(port), "--target", "no/such/folder"]) == 2
    assert f"127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_process_that_follows_another_does_not_take_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def make_engine(arguments: Any, tokenizer: Any, **options: Any) -> Iterator[Any]:
        yield SimpleNamespace(follow=lambda: followed.append(options))

    monkeypatch.setattr(distributed, "_job", SimpleNamespace(process_id=1))
    monkeypatch.setattr(serve.generate, "make_engine", make_engine)
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert command_line.run(["serve", "--port", str(other.getsockname()[1]), "--slots", "3"]) == 0
    assert followed == [{"slots": 3}]


@pytest.mark.parametrize(("words", "sampling"), [((), {"top_k": 3}), (("--generation-config", "jspec"), {})])
def test_server_has_the_sampling_of_the_targets_generation_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sampling: dict[str, Any]
) -> None:
    served: list[Settings] = []
    (tmp_path / "generation_config.json").write_text('{"top_k": 3}')
    monkeypatch.setattr(serve, "make_engine", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("jspec.server.run.serve", lambda engine, settings, *_: served.append(settings))
    command_line.run(["serve", "--port", "0", "--target", str(tmp_path), "--tokenizer", "bytes", *words])
    assert served[0].sampling == sampling
    with pytest.raises(ValueError, match=r"SamplingParams\.top_k: expected an int"):
        Settings(sampling={"top_k": 0.5})


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("--model", "--target"),
        ("--max-model-len", "--max-len"),
        ("--max-num-seqs", "--slots"),
        ("--tensor-parallel-size", "--tensor-parallel"),
        ("--api-key", "--api-key-file FILE"),
    ],
)
def test_options_of_other_servers_are_answered_with_ours(
    word: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line.run(["serve", word, "1"])
    assert ours in capsys.readouterr().err


def test_missing_library_is_named_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Any = serve.importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name == "uvloop" else real(name)

    monkeypatch.setattr(serve.importlib.util, "find_spec", find)
    assert command_line.run(["serve"]) == 2
    assert "expected uvloop, not installed; pip install -e '.[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "drafted"),
    [
        ([], ("demo", serve.TREE)),
        (["--tree", "chain:2"], ("demo", "chain:2")),
        (["--ngram"], (None, None)),
        (["--dflash", "demo"], (None, None)),
    ],
)
def test_embedded_pair_drafts_a_tree_unless_another_one_is_given(
    words: list[str], drafted: tuple[str | None, str | None]
) -> None:
    arguments = command_line.make_parser().parse_args(["serve", *words])
    serve._take_demo(arguments)
    assert (arguments.target, arguments.eagle3, arguments.tree) == ("demo", *drafted)
    assert not Tree.parse(serve.TREE).is_chain


def test_greeting_has_the_address_and_asks_for_the_key_if_there_is_one() -> None:
    text = serve.greeting("127.0.0.1:8000", Settings(names=("m",)))
    assert "http://127.0.0.1:8000/v1" in text and "Authorization" not in text and "page" not in text
    assert "\n  page: http://127.0.0.1:8000/\n" in serve.greeting("127.0.0.1:8000", Settings(names=("m",), live=True))
    assert "sampling" not in text
    text = serve.greeting("h:1", Settings(sampling={"temperature": 0.6, "top_k": 20}))
    assert text.splitlines()[-1].endswith(": temperature 0.6, top_k 20 (--generation-config)")
    text = serve.greeting("h:1", Settings(names=("m",), keys=(b"digest",)))
    assert "Bearer $KEY" in text and "digest" not in text


@pytest.mark.parametrize("warm", [(), ("logprobs",)])
def test_command_says_that_it_serves_only_when_it_does(warm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    compiling = threading.Event()

    def warmup(**wanted: bool) -> None:
        assert compiling.wait(30)

    engine = serving.small_engine(1, 64)
    monkeypatch.setattr(type(engine), "warmup", lambda self, **wanted: warmup(**wanted))
    listener = run.bind("127.0.0.1", 0)
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def listens() -> None:
        said.append(f"{serve.compiling(address, Settings(names=('m',), warm=warm))}listens")
        threading.Timer(0.5, compiling.set).start()

    def ready() -> None:
        said.append(f"ready {compiling.is_set() or not warm}")
        os.kill(os.getpid(), signal.SIGTERM)

    with engine:
        assert run.serve(engine, Settings(names=("m",), warm=warm), listener, listens, ready) == 0
    first = f"jspec compiles for logprobs, and then serves m at http://{address}\n" if warm else ""
    assert said == [f"{first}listens", "ready True"]


@pytest.mark.once
def test_command_line_without_serve_needs_none_of_the_servers_libraries() -> None:
    code = "import sys, jspec.tools.command_line; print({'starlette', 'uvicorn', 'ray'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
