"""`jspec bench inflate`: refused sizes and heads, written folders, command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from convert import hub
from jspec import Eagle3, Model, Tree
from jspec.__main__ import main
from jspec.models.quantize import quantize_weights
from jspec.tools import demo
from jspec.tools.bench.inflate import convert as inflate
from jspec.tools.bench.inflate.grow import Sizes
from tests.support import tiny
from tests.support.inflating import (
    DEMO_SIZES,
    LAYERS,
    SIZES,
    VOCAB,
    compare,
    demo_pair,
    head_of,
    large_pair,
    target,
    text_tokens,
    variant,
)

pytestmark = pytest.mark.once


def refused(**changes: Any) -> Callable[[], Any]:
    """Return a function that inflates a target and its head to other sizes, which must raise."""
    return lambda: inflate.pair(target(), replace(SIZES, **changes), head=head_of(target()))


def refused_head(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: inflate.pair(target(), replace(SIZES, **changes), head=variant(name, target()))


def wide_features() -> Any:
    """Inflate a target with a narrower EAGLE-3 head that norms the target's states, which must raise."""
    small = target()
    head = variant("fc_norm", small)
    narrow = head_of(tiny.model(VOCAB, layers=LAYERS, hidden=8))
    config = replace(narrow.config, target_hidden_size=16, fc_norm=True)
    embed = jnp.ones((VOCAB, 8))
    return inflate.pair(
        small, SIZES, head=narrow.replace(fc=head.fc[:8], fc_norm=head.fc_norm, embed=embed, config=config)
    )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "hidden": (refused(hidden_size=8), "target: hidden_size: expected at least the small one's 16, got 8"),
    "intermediate": (refused(intermediate_size=31), "intermediate_size: expected at least the small one's 32, got 31"),
    "kv heads": (refused(num_kv_heads=1), "num_kv_heads: expected at least the small one's 2, got 1"),
    "group": (refused(num_heads=3), "num_heads / num_kv_heads: expected at least the small one's 2, got 1"),
    "vocabulary": (refused(vocab_size=39), "vocab_size: expected at least the small one's 40, got 39"),
    "head_dim": (refused(head_dim=6), "head_dim: expected a multiple of 4, .* got 6"),
    "no channel to spare": (refused(hidden_size=16), "hidden_size: expected more than 16"),
    "layers": (refused(num_layers=6), "layers: expected room for as many"),
    "nothing": (refused(head_dim=0), "head_dim: expected at least 1, got 0"),
    "draft vocabulary": (refused(draft_vocab_size=11), "draft_vocab_size: expected 12 to 36 .* got 11"),
    "padded draft tokens": (refused(draft_vocab_size=37), "draft_vocab_size: expected 12 to 36 .* got 37"),
    "shared output": (refused_head("shared output"), "draft_vocab_size: expected 64 to 64 .* got 16"),
    "normed residual": (refused_head("norm_before_residual"), "head with norm_before_residual"),
    "normed output": (refused_head("norm_output"), "head with norm_output"),
    "normed states": (refused_head("fc_norm"), "head with fc_norm"),
    "normed features": (refused_head("norm_before_fc"), "head with norm_before_fc"),
    "one eps": (wide_features, "features that are normed before fc as wide as its own state .8., .* got 16"),
    "masked last state": (
        lambda: inflate.pair(target(), SIZES, head=head_of(target(), feature_layers=(1, 2, LAYERS + 1))),
        "expected states before the final norm, .* got state 8",
    ),
    "states": (
        lambda: inflate.pair(target(), SIZES, head=head_of(target()), feature_layers=(1, 6, 9)),
        "2 of 7 -> 1 of 12",
    ),
    "number of states": (
        lambda: inflate.pair(target(), SIZES, feature_layers=(1, 6)),
        r"feature_layers: expected a state for each of \(2, 3, 4\), got \(1, 6\)",
    ),
    "dtype": (lambda: inflate.pair(target(), SIZES, dtype="float16"), "dtype: expected one of float32, bfloat16"),
    "quantised": (
        lambda: inflate.pair(quantize_weights(target(), "int8"), SIZES),
        "expected unquantised weights, got int8",
    ),
    "shape": (lambda: Sizes.of("llama9"), "shape: expected one of llama3-8b, tiny, least, got 'llama9'"),
    "method": (lambda: inflate.pair(target(), SIZES, head=tiny.eagle1_head(target())), "expected a head of method"),
    "another target's head": (
        lambda: inflate.pair(target(), SIZES, head=head_of(tiny.model(41, layers=LAYERS))),
        "the target needs 40, the head has 41",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_inflation_impossible_sizes_or_heads_raise_error(what: str) -> None:
    attempt, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        attempt()


FLAGS = [f"--{name.removesuffix('_size').replace('_', '-')}={size}" for name, size in asdict(DEMO_SIZES).items()]
LARGER_TINY = ("--shape", "tiny", "--hidden", "96", "--num-heads", "8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inflated")
    out, head = folder / "target", folder / "head"
    command = ["bench", "inflate", "demo", str(out), "--head", "demo", "--head-out", str(head), "--dtype", "float32"]
    assert main([*command, *FLAGS]) == 0
    return out, head


def test_inflated_folders_load_with_weights_equal_to_those_in_memory(written: tuple[Path, Path]) -> None:
    model = Model.from_pretrained(written[0], dtype="float32")
    head = Eagle3.from_pretrained(written[1], tree=Tree.chain(2), dtype="float32").head
    assert (model.config, head.config) == tuple(part.config for part in large_pair())
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (model, head), large_pair())
    assert all(jax.tree.leaves(same))
    assert hub.eos_ids(written[0]) == hub.eos_ids(demo.TARGET) != ()
    match = compare(demo_pair()[0], model, (2, 4, 5), (2, 4, 6), text_tokens())
    assert match.same, match


def test_inflated_folder_weights_padded_with_zeros_are_compressed(written: tuple[Path, Path]) -> None:
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(Model.from_pretrained(written[0], dtype="float32")))
    assert sum(file.stat().st_size for file in (written[0] / "weights").rglob("*")) < 0.8 * weights


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (LARGER_TINY[2:], "expected --shape or every size, got none for intermediate_size, num_layers"),
        (("--shape", "tiny"), "hidden_size: expected more than 64"),
        ((*LARGER_TINY, "--head", "demo"), "expected HEAD and a HEAD_OUT apart from OUT, got demo and None"),
        ((*LARGER_TINY, "--feature-layers", "3,2,5"), "layers: expected room"),
    ],
)
def test_inflate_command_mistake_prints_one_line_and_writes_nothing(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", "inflate", "demo", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_inflate_command_existing_head_folder_is_refused_before_writing(
    written: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["bench", "inflate", "demo", str(tmp_path / "out"), *FLAGS, "--head", "demo"]
    assert main([*command, "--head-out", str(written[1])]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--head-out", str(tmp_path / "out")]) == 2
    assert "apart from OUT" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_inflate_command_overwrite_option_replaces_folder(
    written: tuple[Path, Path], capsys: pytest.CaptureFixture
) -> None:
    command = ["bench", "inflate", "demo", str(written[0]), *LARGER_TINY]
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{written[0]}: bfloat16") and "hidden_size=96" in said
    assert json.loads((written[0] / "jspec.json").read_text())["config"]["vocab_size"] == 512
