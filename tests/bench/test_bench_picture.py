"""Pictures of the bench: what is drawn where, that every label is inside and over no other; traces of `bench step`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jspec import Tree
from jspec.__main__ import main
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.tools.bench import compare, picture, rounds, throughput
from jspec.tools.bench.compare import Own, Point
from jspec.tools.bench.synthetic import RATES
from pallas_kernels.layers.quantized import Quantized

matplotlib = pytest.importorskip("matplotlib")

pytestmark = pytest.mark.once

TREES = (None, Tree.chain(1), Tree.chain(4), Tree.topk(60, 8, 10))
BATCHES = (1, 8, 32, 64)


def timings(contexts: Sequence[int] = (128, 1024)) -> list[rounds.Timing]:
    """Made-up times: 4 ms, more for each row, node and thousand tokens; the floor is half of it."""
    cases = [rounds.Case("llama3-8b", b, c, t) for c, b, t in itertools.product(contexts, BATCHES, TREES)]
    return [rounds.Timing(case, milliseconds(case), 0.1, milliseconds(case) / 2, 9.0, 1.0) for case in cases]


def milliseconds(case: rounds.Case) -> float:
    return 4 + case.batch / 20 + (case.tree.nodes if case.tree else 1) / 10 + case.context / 1000


def check_readable(figure: Any) -> None:
    """Titles, legend and labels lie inside the figure; no two labels of a panel overlap."""
    figure.draw_without_rendering()
    (legend,) = figure.legends
    whole = figure.bbox
    shown = [text for ax in figure.axes for text in (ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts)]
    for box in [legend.get_window_extent(), *(text.get_window_extent() for text in shown if text.get_text())]:
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
    for ax in figure.axes:
        boxes = [text.get_window_extent() for text in ax.texts]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        assert all(box.y1 <= ax.get_window_extent().y1 for box in boxes)


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_step_draws_a_line_and_a_thin_floor_for_each_tree() -> None:
    figure = picture.step(timings())
    check_readable(figure)
    assert legend_of(figure) == ["none", "chain:1", "chain:4", "topk:60,8,10", "floor of each"]
    assert [ax.get_title() for ax in figure.axes] == [f"context {c}, page size 16" for c in (128, 1024)]
    for ax, context in zip(figure.axes, (128, 1024), strict=True):
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch (rows)", "ms a round")
        assert [tick.get_text() for tick in ax.get_xticklabels()] == [str(batch) for batch in BATCHES]
        drawn = [line for line in ax.lines if len(line.get_xdata())]
        for tree, line, floor in zip(TREES, drawn[::2], drawn[1::2], strict=True):
            expected = [milliseconds(rounds.Case("", batch, context, tree)) for batch in BATCHES]
            assert line.get_xdata().tolist() == list(BATCHES) == floor.get_xdata().tolist()
            assert line.get_ydata().tolist() == pytest.approx(expected)
            assert floor.get_ydata().tolist() == pytest.approx([value / 2 for value in expected])
            assert floor.get_linewidth() < line.get_linewidth() and floor.get_color() == line.get_color()
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() and figure.axes[0].get_ylim()[0] == 0
    assert figure.get_suptitle() == "llama3-8b bfloat16, nothing accepted"


def test_a_single_batch_and_many_trees_can_be_drawn() -> None:
    trees = [Tree.chain(length) for length in range(1, 10)]
    one = [rounds.Timing(rounds.Case("tiny", 1, 32, tree), tree.depth, 0.1, 1.0, 9.0, 1.0) for tree in trees]
    figure = picture.step(one)
    check_readable(figure)
    (ax,) = figure.axes
    drawn = [line for line in ax.lines if line.get_label().startswith("chain")]
    assert [line.get_ydata().tolist() for line in drawn] == [[depth] for depth in range(1, 10)]
    assert len({(line.get_color(), line.get_marker()) for line in drawn}) == 9


def test_throughput_says_that_it_is_synthetic() -> None:
    static = Tree.static([(0,), (1,), (0, 0), (0, 1)])
    results = []
    for batch, tree in itertools.product((1, 8), (None, Tree.chain(2), static)):
        case = throughput.Case(rounds.Case("tiny", batch, 32, tree), RATES[: tree.depth] if tree else (), tokens=16)
        length = 1 + sum(case.rates)
        results.append(throughput.Throughput(case, 100.0 * batch * length, 1, 0.1, 0.1, 1, length, length, 9, 1.0, 2))
    figure = picture.tokens(results)
    check_readable(figure)
    (ax,) = figure.axes
    assert "SYNTHETIC acceptance" in figure.get_suptitle() and ax.get_ylabel() == "tokens/s"
    assert legend_of(figure) == [
        "none, stated length 1.00",
        "chain:2, stated length 2.30",
        "static, 5 nodes, stated length 2.30",
    ]
    assert [line.get_ydata().tolist() for line in ax.lines if len(line.get_xdata())] == [
        pytest.approx([100 * length, 800 * length]) for length in (1, 2.3, 2.3)
    ]


def compared() -> Any:
    """Chains of 0 to 4 at four batches: a rival that lacks one, ours that lack a context and have a tree more."""
    ours, rival = {}, {}
    for context, batch, k in itertools.product((128, 1024), BATCHES, range(5)):
        point = Point("", context, batch, "eagle3" if k else "none", f"chain:{k}" if k else "none")
        rival[point] = 5 + k / 2 + batch / 16
        if context == 1024:
            ours[point] = Own(4.5 + k / 2 + batch / 20, 3.0)
    del rival[Point("", 1024, 32, "eagle3", "chain:3")]
    ours[Point("", 1024, 1, "eagle3", "topk:60,8,10")] = Own(7.0, 5.0)
    return compare.rows(rival, ours, RATES)


def test_compare_draws_both_sides_in_pairs() -> None:
    figure = picture.compare(compared(), "rival: a; ours: b")
    check_readable(figure)
    assert set(legend_of(figure)) == {"rival", "ours", "floor of ours"}
    left, right = figure.axes[2:]
    assert left.get_title().endswith("context 1024") and right.get_title().endswith("context 1024")
    heights = {name: heights_of(left, name) for name in ("rival", "ours")}
    assert len(heights["rival"]) == 19 and len(heights["ours"]) == 21
    assert heights["ours"][:6] == pytest.approx([4.55, 5.05, 5.55, 6.05, 6.55, 7.0])
    assert [text.get_text() for text in left.texts][:11] == [*"0011223344", "topk:60,8,10"]
    assert [tick.get_text() for tick in right.get_xticklabels()] == [str(batch) for batch in BATCHES]
    best = compare.best(row for row in compared() if row.point.context == 1024)
    assert heights_of(right, "rival") == pytest.approx([one.rival[1] for one in best])
    assert heights_of(right, "ours") == pytest.approx([one.ours[1] for one in best])
    assert [text.get_text() for text in right.texts] == [str(k) for one in best for k in (one.rival[0], one.ours[0])]
    assert not heights_of(figure.axes[0], "ours")  # the context that only the rival has


def heights_of(ax: Any, name: str) -> list[float]:
    return [bar.get_height() for bars in ax.containers if bars.get_label() == name for bar in bars]


def test_step_writes_picture_and_trace(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--shape", "tiny", "--dtype", "float32", "--tree", "none", "--batch", "2", "--context", "16"]
    words += ["--idle", "1"]
    files = ["--picture", str(tmp_path / "step.png"), "--profile", str(tmp_path / "traces")]
    assert main(["bench", "step", *words, *files]) == 0
    trace = tmp_path / "traces" / "tiny_float32_none_batch2_context16_page16_idle1"
    *_, row, where, last = capsys.readouterr().out.splitlines()
    assert where == f"trace: {trace}" and last == "no launches of a GPU in the trace"
    assert row.split()[5:7] == ["2", "1"] and row.split()[-2] == "1.00"  # a token a row
    assert [path.suffix for path in trace.rglob("*.pb")] == [".pb"]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_head_may_be_stored_unlike_its_target(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    seen = []

    def measure(case: rounds.Case, target: Model, head: EagleHead, **_: Any) -> rounds.Timing:
        seen.append([type(model.layers[0].qkv) for model in (target, head)])
        return rounds.Timing(case, 1.0, 0.1, 0.5, 9.0, 1.0)

    monkeypatch.setattr(rounds, "measure", measure)
    words = ["--shape", "tiny", "--dtype", "float32", "--tree", "chain:1", "--draft-quantize", "int8"]
    for more in ([], ["--quantize", "fp8"]):
        assert main(["bench", "step", *words, *more]) == 0
        assert f" {more[-1] if more else 'float32'}, head int8 " in capsys.readouterr().out
    (plain, small), both = seen
    assert small is Quantized is not plain and both == [Quantized] * 2


def test_a_round_needs_a_row_that_is_not_idle(capsys: pytest.CaptureFixture) -> None:
    words = ["--shape", "tiny", "--dtype", "float32", "--tree", "none", "--batch", "2", "--context", "16"]
    assert main(["bench", "step", *words, "--idle", "2"]) == 2
    assert "idle: expected 0 to 1 of a batch of 2 rows, got 2" in capsys.readouterr().err


def test_cases_have_folders_of_their_own() -> None:
    wide = [Tree.static((rank,) for rank in range(count)) for count in (200, 201)]
    cases = [rounds.Case("tiny", 1, 8, tree, greedy=greedy) for tree in (*TREES, *wide) for greedy in (True, False)]
    names = {case.name for case in cases}
    assert len(names) == len(cases) and max(map(len, names)) < 100
    assert not any(character in name for name in names for character in "/:, ")
