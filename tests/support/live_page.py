"""What tests do with the live page in a browser: run prompts, walk rounds, look for labels that meet."""

from __future__ import annotations

import json

from tests.support.browser import Browser

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
