"""Test the live page in a browser, over answers made up beforehand."""

from __future__ import annotations

import ast
import json
import math
import random
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jspec.tools import demo
from tests.support import live_stub
from tests.support.browser import Browser, chromium
from tests.support.live_stub import FIRST, Stub, random_round, serving

EDGE_POINTS = 40  # points of each edge at which it is compared with the labels
OVERLAPS = """(() => {
  const nodes = [...document.querySelectorAll("#canvas .node")];
  const boxes = nodes.map((n) => n.querySelector("rect").getBoundingClientRect());
  const texts = nodes.map((n) => [...n.querySelectorAll("text")].map((t) => t.getBoundingClientRect()));
  const depths = [...document.querySelectorAll("#canvas .depth")].map((t) => t.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const inside = (p, b) => p.x > b.left + 1 && p.x < b.right - 1 && p.y > b.top + 1 && p.y < b.bottom - 1;
  const found = [];
  const labels = [...boxes, ...depths];
  labels.forEach((a, i) => labels.forEach((b, j) => { if (i < j && meet(a, b)) found.push(`labels ${i} ${j}`); }));
  texts.forEach((pair, i) => { if (pair.length > 1 && meet(...pair)) found.push(`texts of node ${i}`); });
  const isOut = (t, box) => t.left < box.left || t.right > box.right;
  texts.forEach((all, i) => all.forEach((t) => { if (isOut(t, boxes[i])) found.push(`text ${i} out`); }));
  for (const edge of document.querySelectorAll("#canvas .edge")) {
    const matrix = edge.getScreenCTM(), length = edge.getTotalLength();
    for (let k = 0; k <= POINTS; k++) {
      const point = edge.getPointAtLength((k / POINTS) * length).matrixTransform(matrix);
      labels.forEach((box, i) => { if (inside(point, box)) found.push(`edge on label ${i}`); });
    }
  }
  return found;
})()""".replace("POINTS", str(EDGE_POINTS))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = chromium()
    if executable is None:
        pytest.skip("needs Chromium: install the package chromium")
    with Browser(executable, tmp_path_factory.mktemp("chromium")) as one:
        yield one


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Stub, str]]:
    stub = Stub()
    with serving(stub.app()) as address:
        yield stub, address


@pytest.fixture
def stub(served: tuple[Stub, str], browser: Browser) -> Stub:
    """The stub with 12 rounds of 60 nodes, and the browser at its page, in the mode for completions."""
    one, address = served
    rng = random.Random(0)
    one.__dict__ |= Stub(rounds=[random_round(rng, 60) for _ in range(12)]).__dict__
    browser.resize(1280, 860)
    browser.open("about:blank")
    browser.complaints.clear()
    browser.open(address)
    browser.eval("sessionStorage.clear()")
    browser.wait("document.getElementById('model').textContent === 'stub'")
    browser.eval("setMode('completion')")
    return one


def run(browser: Browser, prompt: str = "Tell me", *, other: str = "") -> None:
    """Enter a prompt with the keyboard and wait for the end of the answer."""
    browser.eval(f"$('other').value = {json.dumps(other)}; $('prompt').focus()")
    browser.type(prompt)
    browser.press("Enter")
    browser.wait("!controller && turns.length && $('send').hidden === false")
    settle(browser)


def settle(browser: Browser) -> None:
    """Wait until the page has drawn its newest state."""
    browser.eval("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")


def shown(browser: Browser) -> int:
    """Return the index of the round on show, as the slider tells it."""
    settle(browser)
    return browser.eval("$('slider').valueAsNumber") - 1


# -- trees


def test_tree_of_60_nodes_has_one_element_for_each_node_sent(browser: Browser, stub: Stub) -> None:
    run(browser)
    browser.press("Home")
    for index, one in enumerate(stub.rounds):
        assert shown(browser) == index
        kinds = browser.eval(
            "['root', 'accepted', 'rejected', 'next'].map((k) => document.querySelectorAll(`.node.${k}`).length)"
        )
        assert kinds == [1, len(one["a"]) - 1, 60 - len(one["a"]), 1]
        assert browser.eval("document.querySelectorAll('#canvas .edge').length") == 60
        titles = browser.eval("[...document.querySelectorAll('.node title')].map((t) => t.textContent)")
        texts = sorted([*one["t"], one["e"][-1]])
        assert sorted(json.JSONDecoder().raw_decode(title)[0] for title in titles) == texts
        browser.press("ArrowRight")
    assert browser.complaints == []


@pytest.mark.parametrize(("width", "height"), [(1280, 860), (390, 844)])
def test_labels_of_a_tree_of_60_nodes_meet_no_edge_and_no_label(
    browser: Browser, stub: Stub, width: int, height: int
) -> None:
    browser.resize(width, height)
    run(browser)
    for index in range(len(stub.rounds)):
        browser.eval(f"choose(runs[0], {index})")
        settle(browser)
        assert browser.eval(OVERLAPS) == []


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        ("n[9].setAttribute('transform', n[8].getAttribute('transform'))", "labels 8 9"),
        ("document.querySelectorAll('.edge')[3].setAttribute('d', 'M0 0L900 900')", "edge on label"),
        ("n[3].querySelector('rect').setAttribute('width', 4)", "text 3 out"),
    ],
)
def test_overlaps_of_a_tree_with_moved_parts_are_found(browser: Browser, stub: Stub, harm: str, found: str) -> None:
    """Negative controls of the test above."""
    run(browser)
    browser.eval(f"(n => {harm})(document.querySelectorAll('#canvas .node'))")
    assert any(found in one for one in browser.eval(OVERLAPS))


def test_break_off_shows_the_targets_token_the_drafts_best_and_their_probabilities(
    browser: Browser, stub: Stub
) -> None:
    tree = dict(t=["x", " cat", " dog"], p=[-1, 0, 0], s=[0.0, math.log(0.6), math.log(0.25)])
    stub.rounds = [tree | dict(a=[0], e=[" cow"], d=[False]), tree | dict(a=[0], e=[" cow"], d=[False], r=7, q=0.011)]
    run(browser)
    rows = "[...document.querySelectorAll('#outcome tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    best = ["The draft's best", "·cat", "1", "60%", "<61%"]  # the target's top list holds its own token alone
    assert browser.eval(rows)[1:] == [["The target's token", "·cow", "7", "1.1%", "61%"], best]
    browser.press("ArrowLeft")
    settle(browser)
    assert browser.eval(rows)[1:] == [["The target's token", "·cow", "not among its 2", "–", "61%"], best]


# -- text


def test_words_tell_who_wrote_them_with_and_without_colour(browser: Browser, stub: Stub) -> None:
    run(browser)
    spans = browser.eval("runs[0].tokens.map((t) => [t.span.textContent, t.span.classList.contains('draft')])")
    pairs = [pair for one in stub.rounds for pair in zip(one["e"], one["d"], strict=True)]
    assert spans == [[FIRST, False], *map(list, pairs)]
    looks = "(who => { const s = getComputedStyle(document.querySelector('.round ' + who)); "
    looks += "return [s.textDecorationLine, s.fontWeight > 600, s.color]; })"
    draft, target = (browser.eval(f"{looks}('{who}')") for who in (".draft:not(.blank)", ".target"))
    assert draft[:2] == ["underline", False] and target[:2] == ["none", True] and draft[2] != target[2]


@pytest.mark.parametrize("dark", [False, True])
def test_contrast_of_text_and_labels_is_at_least_4_5(browser: Browser, stub: Stub, dark: bool) -> None:
    run(browser)
    browser.resize(1280, 860, dark=dark)
    names = ("ink", "soft", "draft", "target", "good", "bad", "paper", "panel")
    colours = {
        name: browser.eval(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')") for name in names
    }
    for name in names[:-2]:
        assert min(contrast(colours[name], colours[ground]) for ground in ("paper", "panel")) >= 4.5, name


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours #rgb or #rrggbb by WCAG 2.1."""
    lights = sorted(map(luminance, (one, other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    digits = colour.strip().removeprefix("#")
    wide = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    parts = [int(wide[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_contrast_of_black_on_white_is_21() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)


def test_text_with_html_is_shown_as_text(browser: Browser, stub: Stub) -> None:
    evil = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
    stub.rounds = [dict(t=[evil, evil], p=[-1, 0], s=[0, -1], a=[0, 1], e=[evil, evil], d=[True, False])]
    run(browser, prompt=evil)
    assert browser.eval("runs[0].output.textContent") == FIRST + 2 * evil
    assert browser.eval("document.querySelector('.prompt').textContent") == evil
    assert browser.eval("document.querySelectorAll('main img, main script').length") == 0
    assert browser.eval("window.hacked ?? null") is None
    assert browser.complaints == []


def test_text_that_was_held_back_is_shown_in_full(browser: Browser, stub: Stub) -> None:
    """The text of a chunk may differ from its tokens' texts: the text is what counts."""
    chunks = [("", []), ("ab", ["a", "b"]), ("", ["c"]), ("cd", ["d"]), ("é", ["?", "?"]), ("!", [])]
    browser.eval("window.one = {tokens: [], rounds: [], scores: [], times: [], isTraced: true}")
    for text, pieces in chunks:
        rounds = [dict(t=["x"], p=[-1], s=[0], a=[0], e=pieces, d=[True] * len(pieces))] if pieces else []
        event = {"choices": [{"text": text}], "jspec": {"rounds": rounds}}
        browser.eval(f"take(one, {json.dumps(event)}).length")
    assert browser.eval("one.tokens.map((t) => t.text).join('')") == "abcdé!"


# -- two columns


def test_two_columns_with_equal_texts_are_ticked(browser: Browser, stub: Stub) -> None:
    run(browser, other="none")
    verdict = browser.eval("document.querySelector('.verdict').textContent")
    assert verdict.startswith("✓ Equal texts. First to last token: ") and "times as" in verdict
    assert browser.eval("document.querySelectorAll('.run').length") == 2
    one, two = stub.asked
    assert two == one | {"draft": False} and one["seed"] == two["seed"]


def test_two_columns_with_different_texts_are_crossed_at_the_first_difference(browser: Browser, stub: Stub) -> None:
    stub.rounds = [dict(t=["x"], p=[-1], s=[0], a=[0], e=["🚀abc", "def"], d=[True, False])]
    stub.undrafted = f"{FIRST}🚀abX"
    run(browser, other="none")
    verdict = browser.eval("document.querySelector('.verdict').textContent")
    assert verdict.startswith(f"✗ The texts differ from character {len(FIRST) + 4} on")
    assert browser.eval("[...document.querySelectorAll('.differs')].map((s) => s.textContent)") == ["🚀abc", "X"]


def test_times_with_a_wait_for_a_compilation_are_not_compared(browser: Browser, stub: Stub) -> None:
    waits = {"[0, 10, 20, 5000, 5010, 5020]": 4980, "[0, 10, 20, 30, 40, 300]": 0, "[0, 700, 1400, 2100]": 0, "[0]": 0}
    for times, wait in waits.items():
        assert browser.eval(f"pause({{times: {times}}})") == wait


# -- walking


def test_keys_slider_and_clicks_walk_the_rounds(browser: Browser, stub: Stub) -> None:
    run(browser)
    last = len(stub.rounds) - 1
    for key, index in (("ArrowLeft", last - 1), ("Home", 0), ("ArrowLeft", 0), ("ArrowRight", 1), ("End", last)):
        browser.press(key)
        assert shown(browser) == index
    browser.eval("$('slider').value = 4; $('slider').dispatchEvent(new Event('input'))")
    assert shown(browser) == 3
    browser.click(".round[data-round='5']")
    assert shown(browser) == 5
    assert browser.eval("document.querySelector('.round.on').textContent") == "".join(stub.rounds[5]["e"])
    browser.press("/")
    browser.press("w")
    browser.press("ArrowLeft")
    assert shown(browser) == 5 and browser.eval("$('prompt').value") == "w"


def test_worst_rounds_come_in_the_order_of_accepted_tokens(browser: Browser, stub: Stub) -> None:
    run(browser)

    def badness(index: int) -> tuple[int, float]:
        one = stub.rounds[index]
        offers = [math.exp(one["s"][i] - one["s"][p]) for i, p in enumerate(one["p"]) if p == one["a"][-1]]
        return len(one["a"]), -max(offers, default=0.0)

    order = sorted(range(len(stub.rounds)), key=badness)
    listed = browser.eval("[...document.querySelectorAll('#worst b')].map((b) => Number(b.textContent) - 1)")
    assert listed == order[:8]
    browser.press("Escape")
    browser.press("w")
    assert shown(browser) == order[0]
    browser.press("w")
    assert shown(browser) == order[1]


def test_statistics_equal_those_of_the_plots(browser: Browser, stub: Stub) -> None:
    run(browser)
    counts = [len(one["a"]) - 1 for one in stub.rounds]
    shares = [sum(count > i for count in counts) / len(counts) for i in range(max(counts))]
    assert browser.eval("acceptanceByPosition(runs[0].rounds)") == pytest.approx(shares)
    bins: dict[int, list[tuple[float, bool]]] = {}
    for one in stub.rounds:
        for node, parent in enumerate(one["p"]):
            if parent in one["a"]:
                p = math.exp(one["s"][node] - one["s"][parent])
                bins.setdefault(min(9, int(10 * p)), []).append((p, node in one["a"]))
    points = [
        [len(own), *(sum(values) / len(own) for values in zip(*own, strict=True))] for _, own in sorted(bins.items())
    ]
    drawn = browser.eval("calibration(runs[0].rounds).map((b) => [b.count, b.predicted, b.accepted])")
    assert len(points) > 5 and np.allclose(points, drawn)
    assert float(browser.eval("$('tau').textContent")) == pytest.approx(1 + sum(counts) / len(counts), abs=0.005)
    assert browser.eval("[$('pages').textContent, $('load').textContent]") == ["3 / 64", "1, 2"]


# -- the server's refusals


def test_page_of_a_server_with_keys_asks_for_one_and_sends_it(browser: Browser, stub: Stub) -> None:
    stub.key = "secret"
    browser.eval("location.reload()")
    browser.wait("!document.getElementById('keyform').hidden")
    browser.wait("document.activeElement.id === 'key'")
    browser.type("secret")
    browser.press("Enter")
    browser.wait("document.getElementById('model').textContent === 'stub' && $('keyform').hidden")
    run(browser)
    assert stub.keys == ["Bearer secret"]
    assert "secret" not in browser.eval("curlOf(runs[0]) + pythonOf(runs[0])")
    browser.eval("sessionStorage.clear()")


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


def test_stub_draws_rounds_in_which_parents_come_first() -> None:
    """The trees of these tests are trees, and differ."""
    rounds = [random_round(random.Random(seed), 60) for seed in range(20)]
    assert all(p < i for one in rounds for i, p in enumerate(one["p"]))
    assert all(b == 0 or one["p"][b] == a for one in rounds for a, b in zip(one["a"], one["a"][1:], strict=False))
    assert len({tuple(one["p"]) for one in rounds}) == 20 and len({len(one["a"]) for one in rounds}) > 3
    assert live_stub.TEXTS
