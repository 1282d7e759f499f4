"""Test what the live page shows, in a browser, over answers made up beforehand."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from tests.support.browser import Browser
from tests.support.live_page import OVERLAPS, run, settle, shown
from tests.support.live_stub import FIRST, Stub, random_round

pytestmark = pytest.mark.once

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


def test_round_of_a_chain_and_round_that_ends_the_answer_show_no_row_without_a_question(
    browser: Browser, stub: Stub
) -> None:
    chain = dict(t=["x", " a", "</s>"], p=[-1, 0, 1], s=[0.0, -0.1, -0.5])
    stub.rounds = [chain | dict(a=[0], e=[" b"], d=[False]), chain | dict(a=[0, 1, 2], e=["", ""], d=[True, True])]
    run(browser)
    assert "emitted no text" in browser.eval("$('outcome').textContent")
    assert browser.eval("document.querySelectorAll('#outcome table').length") == 0
    browser.press("ArrowLeft")
    settle(browser)
    assert browser.eval("document.querySelector('#outcome tr:nth-child(2)').cells[2].textContent") == "not drafted"


def test_tree_on_a_phone_begins_at_the_root(browser: Browser, stub: Stub) -> None:
    browser.resize(390, 844)
    settle(browser)
    assert browser.eval("$('canvas').scrollLeft") == 0, "the example"
    run(browser)
    for index in range(len(stub.rounds)):
        browser.eval(f"choose(runs[0], {index})")
        settle(browser)
        assert browser.eval("$('canvas').scrollLeft") == 0


def test_replay_shows_every_round_with_the_text_up_to_it_and_ends_with_a_choice(browser: Browser, stub: Stub) -> None:
    run(browser)
    hidden = "document.querySelectorAll('.later').length"
    browser.eval("[...document.querySelectorAll('footer button')].find((b) => b.textContent === 'Replay').click()")
    assert shown(browser) < len(stub.rounds) - 1 and browser.eval(hidden) > 0
    browser.wait(f"$('slider').valueAsNumber === {len(stub.rounds)}")
    browser.wait(f"{hidden} === 0")
    browser.eval("replay(runs[0])")
    browser.press("ArrowRight")
    index = shown(browser)
    assert browser.eval(f"{hidden} === 0 && new Promise((done) => setTimeout(() => done(true), 3 * BEAT))")
    assert shown(browser) == index


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


def test_stub_draws_rounds_in_which_parents_come_first() -> None:
    """The trees of these tests are trees, and differ."""
    rounds = [random_round(random.Random(seed), 60) for seed in range(20)]
    assert all(p < i for one in rounds for i, p in enumerate(one["p"]))
    assert all(b == 0 or one["p"][b] == a for one in rounds for a, b in zip(one["a"], one["a"][1:], strict=False))
    assert len({tuple(one["p"]) for one in rounds}) == 20 and len({len(one["a"]) for one in rounds}) > 3
