"""Test the drawings of `jspec.plot`: heights, positions, and labels that do not overlap."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec.engine.request.metrics import Metrics
from jspec.engine.request.request import Completion
from jspec.engine.request.round_record import Round
from jspec.engine.text.tokenizer import load_tokenizer
from jspec.tools import plot
from tests.support.lettered import Lettered

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def close_figures() -> Any:
    yield
    plt.close("all")


def make_round(parents: list[int], path: list[int], bonus: int | None = 7) -> Round:
    tokens = np.arange(len(parents)) + 97
    emitted = [int(tokens[node]) for node in path[1:]] + ([] if bonus is None else [bonus])
    scores = -0.25 * np.arange(len(parents))
    return Round(tokens, np.array(parents), scores, path, len(path) - 1, emitted)


def make_completion(rounds: list[Round] | None) -> Completion:
    metrics = Metrics()
    for r in rounds or []:
        nodes = len(r.parents) - 1
        metrics.count_round(depth=nodes, drafted=nodes, accept_len=r.accept_len, emitted_drafts=r.accept_len)
    return Completion("", [], [], [], "length", None, None, metrics, rounds)


def golden_round(golden: Path, iteration: int, name: str = "tree_d7_k10_t60") -> Round:
    """Return one round recorded from the EAGLE-3 authors' code."""
    with np.load(golden / f"{name}.npz") as file:
        tokens, parents = file["tree_tokens"][iteration], file["parent"][iteration]
        scores = np.concatenate([[0.0], file["sel_scores"][iteration]])
        accept_len, best = int(file["accept_len"][iteration]), int(file["best"][iteration])
        path = file["retrieve"][iteration, best, : accept_len + 1].tolist()
        emitted = [int(tokens[node]) for node in path[1:]] + [int(file["bonus"][iteration])]
    return Round(tokens, parents, scores, path, accept_len, emitted)


def labels_of(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


def check_apart(ax: Any) -> None:
    """Check that no two labels of a drawn tree overlap and that labels and legend are inside the figure."""
    figure = ax.get_figure()
    figure.canvas.draw()
    boxes = [text.get_bbox_patch().get_window_extent() for text in ax.texts]
    for (i, one), (j, other) in itertools.combinations(enumerate(boxes), 2):
        assert not one.overlaps(other), f"{labels_of(ax)[i]} overlaps {labels_of(ax)[j]}"
    check_inside(figure, [*boxes, ax.get_legend().get_window_extent()])


def check_inside(figure: Any, boxes: list[Any]) -> None:
    whole = figure.bbox
    assert all(whole.x0 <= b.x0 and b.x1 <= whole.x1 and whole.y0 <= b.y0 and b.y1 <= whole.y1 for b in boxes)


def test_plot_of_rounds_stacks_accepted_draft_tokens_and_the_target_token() -> None:
    first, second = make_round([-1, 0, 1], [0, 1, 2]), make_round([-1, 0, 1], [0])
    cut = make_round([-1, 0, 1], [0, 1, 2], bonus=None)
    ax = plot.rounds(make_completion([first, second, cut]))
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    assert heights == [[2, 0, 2], [1, 1, 0]]
    assert ax.lines[0].get_ydata()[0] == pytest.approx(1 + 4 / 3)


@pytest.mark.parametrize("count", [1, 200])
def test_plot_of_few_or_many_rounds_has_its_legend_inside_the_figure(count: int) -> None:
    ax = plot.rounds(make_completion([make_round([-1, 0, 1], [0, 1, 2])] * count))
    ax.get_figure().canvas.draw()
    check_inside(ax.get_figure(), [ax.get_legend().get_window_extent()])


def test_plot_of_rounds_without_trace_raises() -> None:
    with pytest.raises(ValueError, match="trace=True"):
        plot.rounds(make_completion(None))


def test_plot_of_acceptance_has_a_bar_for_the_share_at_each_position() -> None:
    metrics = make_completion([make_round([-1, 0, 1], [0, 1, 2]), make_round([-1, 0, 1], [0, 1])]).metrics
    ax = plot.acceptance(metrics)
    assert [bar.get_height() for bar in ax.patches] == [1.0, 0.5]
    assert "2.50" in ax.get_title()


def test_plot_of_acceptance_without_accepted_tokens_says_so_in_its_title() -> None:
    assert "no draft token" in plot.acceptance(Metrics()).get_title()


def test_plot_of_methods_stacks_target_token_and_mean_accepted_tokens() -> None:
    metrics = {"none": Metrics(num_drafts=9), "some": Metrics(num_drafts=10, num_accepted_tokens=24)}
    ax = plot.methods(metrics)
    assert [[bar.get_width() for bar in bars] for bars in ax.containers] == [[1, 1], [0, pytest.approx(2.4)]]
    assert [bar.get_x() for bar in ax.containers[1]] == [1, 1]
    assert labels_of(ax) == ["1.00", "3.40"]
    ax.get_figure().canvas.draw()
    check_inside(ax.get_figure(), [ax.get_legend().get_window_extent(), *(t.get_window_extent() for t in ax.texts)])


def scored_round(parents: list[int], probs: list[float], path: list[int]) -> Round:
    """Return a round whose nodes have these probabilities given their parents."""
    scores = np.zeros(len(parents))
    for node in range(1, len(parents)):
        scores[node] = scores[max(parents[node], 0)] + np.log(probs[node])
    return Round(np.arange(len(parents)), np.array(parents), scores, path, len(path) - 1, [])


def test_plot_of_calibration_counts_only_children_of_accepted_nodes() -> None:
    """Children of rejected nodes were never verified, so nodes 4 and 6 and padding do not count."""
    first = scored_round([-1, 0, 0, 1, 2, -1], [1, 0.9, 0.06, 0.84, 0.5, 0.5], [0, 1])
    second = scored_round([-1, 0, 0, 1, 1, 3, 4], [1, 0.86, 0.08, 0.3, 0.1, 1.0, 0.7], [0, 1, 3, 5])
    ax = plot.calibration([first, second], bins=5)
    (line,) = [line for line in ax.lines if line.get_label() == "measured"]
    expected = [((0.06 + 0.08 + 0.1) / 3, 0.0), (0.3, 1.0), ((0.9 + 0.84 + 0.86 + 1.0) / 4, 3 / 4)]
    np.testing.assert_allclose(line.get_xydata(), expected, atol=1e-12)
    assert labels_of(ax) == ["3", "1", "4"]


def test_plot_of_calibration_without_drafts_has_no_points() -> None:
    assert labels_of(plot.calibration([make_round([-1], [0])])) == []


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_plot_of_calibration_of_a_calibrated_drafter_is_diagonal(temperature: float) -> None:
    """Tokens are accepted with exactly their draft probability. Negative control: too sharp draft probabilities."""
    rng = np.random.default_rng(0)
    rounds = []
    for _ in range(4000):
        probs = rng.uniform(0.05, 1.0, 3)
        accepted_count = np.cumprod(rng.uniform(size=3) < probs).sum()
        rounds.append(scored_round([-1, 0, 1, 2], [1, *probs**temperature], list(range(accepted_count + 1))))
    predicted, accepted = plot.calibration(rounds).lines[1].get_xydata().T
    assert (np.abs(predicted - accepted).max() < 0.06) == (temperature == 1.0)


def test_plot_of_a_tree_labels_every_node_except_padding() -> None:
    ax = plot.tree(make_round([-1, 0, 0, 1, -1, -1], [0, 1, 3], bonus=120), load_tokenizer("bytes"))
    assert labels_of(ax) == ["a", "b -0.25", "c -0.50", "d -0.75", "x"]
    assert labels_of(plot.tree(make_round([-1, 0], [0], bonus=None))) == ["#97", "#98 -0.25"]
    joined = plot.tree(make_round([-1, 0, -1, 1, 3, -1], [0, 1, 3, 4], bonus=120), load_tokenizer("bytes"))
    assert labels_of(joined) == ["a", "b -0.25", "d -0.75", "e -1.00", "x"]
    assert [text.get_position()[0] for text in joined.texts] == [0, 1, 2, 3, 4]


def test_plot_of_a_tree_has_a_column_per_depth_with_siblings_in_order() -> None:
    ax = plot.tree(make_round([-1, 0, 0, 1, 1, 2], [0, 2, 5], bonus=None))
    places = [text.get_position() for text in ax.texts]
    assert [x for x, _ in places] == [0, 1, 1, 2, 2, 2]
    assert [y for _, y in places] == [1.25, 0.5, 2.0, 0.0, 1.0, 2.0]
    assert ax.yaxis_inverted()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0", "1", "2"]


def test_round_text_of_a_tree_marks_accepted_nodes_and_contains_tokens() -> None:
    r, tokenizer = make_round([-1, 0, 0, 1], [0, 1, 3], bonus=255), load_tokenizer("bytes")
    assert tokenizer is not None
    r.tokens[1:] = [10, 255, 120]
    lines = r.to_text(tokenizer.decode).splitlines()
    assert [line.split()[:-1] for line in lines[:-1]] == [["*", "'a'"], ["*", repr("\n")], ["*", "'x'"], ["#255"]]
    assert r.to_text().splitlines()[1].split()[:2] == ["*", "10"]


def test_plot_of_a_tree_colours_the_accepted_path() -> None:
    ax = plot.tree(make_round([-1, 0, 0, 1], [0, 1, 3]))
    faces = [matplotlib.colors.to_hex(text.get_bbox_patch().get_facecolor()).upper() for text in ax.texts]
    assert faces == [plot.TARGET, plot.DRAFT, "#FFFFFF", plot.DRAFT, plot.TARGET]


@pytest.mark.parametrize("iteration", [0, 57, 200])
def test_plot_of_recorded_60_node_trees_has_no_overlapping_labels(golden: Path, iteration: int) -> None:
    check_apart(plot.tree(golden_round(golden, iteration), load_tokenizer("bytes")))


@pytest.mark.parametrize(
    "parents",
    [
        [-1],
        [-1, *range(12)],
        [-1, *[0] * 59],
        [-1, *[(i - 1) // 2 for i in range(1, 63)]],
        [-1, *[0] * 10, *[i for i in range(1, 11) for _ in range(5)]],
    ],
    ids=["root", "chain", "star", "binary", "bushy"],
)
def test_plot_of_extreme_trees_has_no_overlapping_labels(parents: list[int]) -> None:
    check_apart(plot.tree(make_round(parents, [0])))


def test_plot_of_a_tree_on_given_axes_is_drawn_there_without_overlaps(golden: Path) -> None:
    _, axes = plt.subplots(1, 2, figsize=(12, 8))
    ax = plot.tree(golden_round(golden, 3), load_tokenizer("bytes"), ax=axes[1])
    assert ax is axes[1]
    check_apart(ax)


def test_plot_of_a_tree_with_blank_or_long_tokens_has_readable_labels(
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Blanks are visible, long tokens are shortened, and a token that the font lacks is shown by its id."""
    texts = [" a", "\n", "$", " internationalization", "你"]
    tokens = np.arange(5)
    tokenizer = Lettered([text.encode() for text in texts])
    ax = plot.tree(Round(tokens, np.array([-1, 0, 0, 0, 0]), np.zeros(5), [0], 0, []), tokenizer)
    shown = [label.split()[0] for label in labels_of(ax)]
    assert shown == ["·a", "↵", "$", "·internat…", "#4"]
    ax.get_figure().canvas.draw()
    assert not [str(w.message) for w in recwarn if "Glyph" in str(w.message)]


def test_plot_without_matplotlib_raises_naming_the_notebooks_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_matplotlib(name: str, *args: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(plot.importlib, "import_module", no_matplotlib)
    with pytest.raises(ImportError, match=r"pip install -e \"\.\[notebooks\]\""):
        plot.acceptance(Metrics())


def test_plots_saved_to_files_are_not_blank(golden: Path, tmp_path: Path) -> None:
    rounds = [golden_round(golden, iteration) for iteration in range(24)]
    completion = make_completion(rounds)
    pictures = {
        "tree": plot.tree(rounds[2], load_tokenizer("bytes")),
        "rounds": plot.rounds(completion),
        "acceptance": plot.acceptance(completion.metrics),
    }
    for name, ax in pictures.items():
        ax.get_figure().savefig(tmp_path / f"{name}.png", dpi=80)
        assert plt.imread(tmp_path / f"{name}.png")[..., :3].min() == pytest.approx(0, abs=0.1)
