"""Test how the live page deals with its server: refusals, keys, copies of requests, the policy; and a real engine."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from jspec import Eagle3, Engine, Tree
from jspec.tools import demo
from tests.support import serving
from tests.support.browser import Browser
from tests.support.live_page import OVERLAPS, run, settle
from tests.support.live_stub import Stub

pytestmark = pytest.mark.once

# -- the server's refusals


def test_page_of_a_server_with_keys_asks_for_one_and_sends_it(browser: Browser, stub: Stub) -> None:
    stub.key = "secret"
    browser.eval("location.reload()")
    browser.wait("document.getElementById('keyform')?.hidden === false")
    browser.wait("document.activeElement.id === 'key'")
    assert "asks for an API key" in browser.eval("$('keyform').textContent")
    browser.type("wrong")
    browser.press("Enter")
    browser.wait("$('keyform').textContent.includes('does not know the key')")
    browser.wait("document.activeElement.id === 'key'")
    browser.type("secret")
    browser.press("Enter")
    browser.wait("document.getElementById('model').textContent === 'stub' && $('keyform').hidden")
    run(browser)
    assert stub.keys == ["Bearer secret"]
    assert "secret" not in browser.eval("curlOf(runs[0]) + pythonOf(runs[0])")
    browser.eval("sessionStorage.clear()")


def test_run_without_output_for_a_while_says_what_it_may_wait_for(browser: Browser, stub: Stub) -> None:
    stub.first_delay = 0.5
    browser.eval("patience = 100")
    browser.eval("$('demo').click()")
    browser.wait("runs.at(-1)?.status.textContent.includes('compiles programs')")
    browser.wait("turns.length === 1")
    assert "compiles" not in browser.eval("runs.at(-1).status.textContent")


@pytest.mark.parametrize(
    ("status", "words"), [(429, "only one is recorded at a time"), (503, "not ready"), (500, "step failed")]
)
def test_refused_request_is_explained_and_can_be_tried_again(
    browser: Browser, stub: Stub, status: int, words: str
) -> None:
    stub.refusals = [(status, {"message": "the step failed"}, {"Retry-After": "3"})]
    browser.eval("$('prompt').focus()")
    browser.type("Tell me")
    browser.press("Enter")
    browser.wait("!$('notice').hidden")
    told = browser.eval("$('notice').textContent")
    assert words in told and "the step failed" in told and "Try again in 3 s." in told
    assert browser.eval("$('prompt').value") == "Tell me"
    browser.click("#notice button")
    browser.wait("turns.length === 1")
    assert browser.eval("runs.at(-1).output.textContent") == stub.text
    assert browser.eval("document.querySelectorAll('.turn').length") == 1


def test_server_without_rounds_is_named_and_asked_without_them(browser: Browser, stub: Stub) -> None:
    stub.refusals = [(400, {"message": "jspec: expected a server with --live", "param": "jspec"}, {})]
    browser.eval("$('prompt').focus()")
    browser.type("Tell me")
    browser.press("Enter")
    browser.wait("!$('notice').hidden")
    assert "jspec serve --live" in browser.eval("$('notice').textContent")
    browser.click("#notice button")
    browser.wait("turns.length === 1")
    assert "jspec" in stub.asked[0] and "jspec" not in stub.asked[1] and "logprobs" not in stub.asked[1]
    assert browser.eval("runs.at(-1).output.textContent") == stub.text
    assert browser.eval("document.querySelectorAll('.run .target, .run .draft').length") == 0


def test_model_without_chat_template_is_asked_for_a_completion(browser: Browser, stub: Stub) -> None:
    stub.refusals = [(400, {"message": "messages: the tokenizer has no chat template"}, {})]
    browser.eval("setMode('chat')")
    browser.click("#demo")
    browser.wait("!$('notice').hidden")
    browser.click("#notice button")
    browser.wait("turns.length === 1")
    assert "messages" in stub.asked[0] and stub.asked[1]["prompt"] == stub.asked[0]["messages"][0]["content"]


def test_answer_that_is_stopped_keeps_its_rounds_and_another_can_run(browser: Browser, stub: Stub) -> None:
    stub.delay = 0.2
    browser.eval("$('prompt').focus()")
    browser.type("Tell me")
    browser.press("Enter")
    browser.wait("runs[0]?.rounds.length === 2")
    browser.press("Escape")
    browser.wait("!controller && $('stop').hidden")
    assert "stopped" in browser.eval("runs[0].status.textContent")
    assert "JSONL" in browser.eval("runs[0].tools.textContent") and browser.eval("runs[0].rounds.length") < 5
    stub.delay = 0
    run(browser, "Again")
    assert browser.eval("runs[1].output.textContent") == stub.text


def test_second_message_of_a_chat_brings_the_first_answer_along(browser: Browser, stub: Stub) -> None:
    browser.eval("setMode('chat')")
    run(browser, "one")
    browser.eval("$('prompt').focus()")
    browser.type("two")
    browser.press("Enter")
    browser.wait("turns.length === 2")
    roles = ("user", "assistant", "user")
    texts = ("one", stub.text, "two")
    assert stub.asked[1]["messages"] == [dict(role=r, content=t) for r, t in zip(roles, texts, strict=True)]
    assert browser.complaints == []


# -- copies


def test_copied_requests_hold_what_was_sent(browser: Browser, stub: Stub) -> None:
    run(browser, "it's \"quoted\" \\ é 'x'", other="none")
    for index, body in enumerate(stub.asked):
        words = shlex.split(browser.eval(f"curlOf(runs[{index}])").replace("\\\n", " "))
        assert words[:2] == ["curl", "-N"] and words[2].endswith("/v1/completions")
        assert json.loads(words[words.index("-d") + 1]) == body
        tree = ast.parse(browser.eval(f"pythonOf(runs[{index}])"))
        call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(".create"))
        sent = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert sent | sent.pop("extra_body") == body


def test_downloaded_rounds_are_those_sent(browser: Browser, stub: Stub, tmp_path: Path) -> None:
    run(browser)
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.eval("download(runs[0])")
    file = tmp_path / "rounds.jsonl"
    Browser.until(file.exists)
    assert [json.loads(line) for line in file.read_text().splitlines()] == stub.rounds


# -- the page as a page


def test_policy_allows_the_pages_own_script_and_no_other(browser: Browser, stub: Stub) -> None:
    run(browser, other="none")
    browser.click(".run footer button")
    assert browser.eval("$('snippet').open")
    assert browser.complaints == []
    browser.eval("document.body.insertAdjacentHTML('beforeend', '<img src=/x onerror=\"window.hacked = 1\">')")
    browser.eval("fetch('http://localhost:1/').catch(() => 0)")
    told = ("inline event handler", "img-src", "connect-src")
    Browser.until(lambda: browser.eval("1") and all(any(word in one for one in browser.complaints) for word in told))
    assert browser.eval("window.hacked ?? null") is None


@pytest.mark.parametrize("dark", [False, True])
def test_page_is_no_wider_than_a_phone(browser: Browser, stub: Stub, dark: bool) -> None:
    browser.resize(390, 844, dark=dark)
    assert browser.eval("document.documentElement.scrollWidth") <= 390
    run(browser, other="none")
    browser.eval("openSnippet(runs[0])")
    assert browser.eval("document.documentElement.scrollWidth") <= 390


def test_demo_prompt_runs_from_the_empty_page(browser: Browser, stub: Stub) -> None:
    browser.click("#demo")
    browser.wait("turns.length === 1")
    assert stub.asked[0]["prompt"] == demo.PROMPT
    assert browser.eval("$('empty').hidden")


# -- a real engine

FIELDS: dict[str, Any] = dict(
    max_tokens=24, temperature=0, trace=True, logprobs=5
)  # the page's, whose programs they use


def open_page(browser: Browser, server: serving.Running) -> None:
    browser.resize(1280, 860)
    browser.complaints.clear()
    browser.open(f"{server.url}/")
    browser.wait(f"document.getElementById('model').textContent === '{serving.NAME}'")
    browser.wait("stats.pages_total")


def rounds_of(server: serving.Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rounds of a request's answer, without the page."""
    lines = server.http().post("/v1/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [one for event in events for one in event.get("jspec", {}).get("rounds", [])]


def check_rounds(browser: Browser, server: serving.Running, prompt: str) -> None:
    """Run a prompt with and without drafting, and compare text, rounds and drawn nodes with the engine's own."""
    run(browser, prompt, other="none")
    assert browser.complaints == [] and browser.eval("$('notice').hidden")
    sent = rounds_of(server, browser.eval("runs[0].body"))
    bare = browser.eval("runs[0].rounds.map(({at, ...round}) => round)")
    assert len(sent) > 3 and bare == sent and max(len(one["t"]) for one in sent) > 1
    (own,) = server.service.engine.generate([prompt], **FIELDS)
    assert browser.eval("runs.map(textOf)") == [own.text, own.text]
    assert browser.eval("document.querySelector('.verdict').textContent").startswith("✓ Equal texts")
    for index, one in enumerate(sent):
        browser.eval(f"choose(runs[0], {index})")
        settle(browser)
        assert browser.eval("document.querySelectorAll('.node:not(.next)').length") == len(one["t"])
        assert browser.eval(OVERLAPS) == []
    assert browser.eval("runs[0].scores.length === runs[0].tokens.length")


def test_page_shows_the_rounds_of_a_small_engine(browser: Browser) -> None:
    with serving.running(live=True) as server:
        open_page(browser, server)
        browser.eval("$('tokens').value = 24; setMode('completion')")
        check_rounds(browser, server, "ab ab ab ab ab ab")
        browser.eval("setMode('chat'); $('other').value = ''; $('prompt').focus()")
        browser.type("hello")
        browser.press("Enter")
        browser.wait("turns.length === 2")
        (own,) = server.service.engine.chat([dict(role="user", content="hello")], **FIELDS)
        assert browser.eval("textOf(runs.at(-1))") == own.text


def test_page_of_a_server_that_records_no_rounds_says_so(browser: Browser) -> None:
    with serving.running() as server:
        open_page(browser, server)
        browser.wait("!$('notice').hidden")
        assert "jspec serve --live" in browser.eval("$('notice').textContent")
        browser.eval("$('tokens').value = 8; setMode('completion')")
        run(browser, "ab ab")
        assert "jspec" not in browser.eval("runs[0].body") and browser.eval("textOf(runs[0]).length > 0")


@pytest.mark.long
def test_page_shows_trees_of_60_nodes_of_the_demo_pair(browser: Browser) -> None:
    head = Eagle3.from_pretrained(demo.HEAD, tree=Tree.topk(60, 8, 10), dtype="float32")
    options = {**demo.OPTIONS, "controls": True}
    with (
        Engine.from_pretrained(demo.TARGET, drafter=head, **options) as engine,
        serving.running(engine, live=True, names=(demo.NAME,)) as server,
    ):
        engine.generate(["x"], max_tokens=4, trace=True, logprobs=5)
        engine.generate(["x"], max_tokens=4, trace=True, logprobs=5, draft=False)
        open_page(browser, server)
        assert browser.eval("$('mode').value") == "completion"
        browser.eval("$('tokens').value = 24")
        check_rounds(browser, server, demo.PROMPT)
