"""`jspec bench inflate`: refused sizes and heads, written folders, command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from convert import hub
from jspec import Eagle3, Model, Tree
from jspec.__main__ import main
from jspec.models.weights.quantize import quantize_weights
from jspec.tools.bench.inflate.convert import grow_pair
from jspec.tools.bench.inflate.grow import UNPADDED
from tests.support import byte_pair, tiny
from tests.support.inflating import (
    BYTE_SIZES,
    LAYERS,
    SIZES,
    VOCAB,
    byte_models,
    compare,
    head_of,
    large_pair,
    target,
    text_tokens,
)

pytestmark = pytest.mark.once

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "families"


def refused(**changes: Any) -> Callable[[], Any]:
    """Return a function that inflates a target and its head to other sizes, which must raise."""
    return lambda: grow_pair(target(), SIZES | changes, head=head_of(target()))


def refused_head(**changes: Any) -> Callable[[], Any]:
    """Return a function that inflates a head with other fields or, in its config, other flags, which must raise."""
    fields = {name: changes.pop(name) for name in ("head", "fc") if name in changes}

    def attempt() -> Any:
        head = head_of(target()).replace(**fields)
        if "fc" in fields:
            changes["feature_layers"] = (LAYERS,)
        return grow_pair(target(), SIZES, head=head.replace(config=head.config.resized(**changes)))

    return attempt


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "hidden": (refused(hidden_size=8), "target: hidden_size: expected at least the small one's 16, got 8"),
    "intermediate": (refused(intermediate_size=31), "intermediate_size: expected at least the small one's 32, got 31"),
    "kv heads": (refused(num_kv_heads=1), "num_kv_heads: expected at least the small one's 2, got 1"),
    "group": (refused(num_heads=3), "num_heads / num_kv_heads: expected at least the small one's 2, got 1"),
    "vocabulary": (refused(vocab_size=39), "vocab_size: expected at least the small one's 40, got 39"),
    "head_dim": (refused(head_dim=6), "head_dim: expected a multiple of 4, .* got 6"),
    "no channel to spare": (refused(hidden_size=16), "hidden_size: expected more than the small model's 16, got 16"),
    "layers": (refused(num_layers=6), "layers: expected room for as many"),
    "draft vocabulary": (refused(draft_vocab_size=11), "draft_vocab_size: expected 12 to 36 .* got 11"),
    "padded draft tokens": (refused(draft_vocab_size=37), "draft_vocab_size: expected 12 to 36 .* got 37"),
    **{
        flag: (
            refused_head(**{flag: "head" if flag == "qk_norm" else True}),
            f"head: expected an EAGLE-3 or 3.1 head .* got {flag}; take",
        )
        for flag in UNPADDED
    },
    "target with head norms": (
        lambda: grow_pair(tiny.model(VOCAB, layers=LAYERS, qk_norm="head"), SIZES),
        "inflate: expected a target with Llama's layers, got llama layers with more",
    ),
    **{
        f"target of {family}": (
            lambda family=family: grow_pair(tiny.load_target(GOLDEN / family), SIZES),
            f"inflate: expected a target with Llama's layers, got {family} layers with more",
        )
        for family in ("lfm2", "qwen3_5_text", "deepseek_v3")
    },
    "normed features and more draft tokens": (
        lambda: grow_pair(target(), SIZES, head=head_of(target(), norm_output=True)),
        "draft_vocab_size: expected 12, as before, for a head that norms its features .* take --draft-vocab-size 12",
    ),
    "normed states of another width": (
        lambda: grow_pair(
            target(),
            SIZES,
            head=head_of(target(), fc_norm=True, hidden_size=8).replace(embed=jnp.zeros((VOCAB, 8))),
        ),
        "got fc_norm with a target of another hidden_size",
    ),
    "no fc": (refused_head(fc=None, fuse=False), "got no fc"),
    "shared output": (refused_head(head=None, draft_vocab_size=VOCAB), "got the target's output head"),
    "masked last state": (
        lambda: grow_pair(target(), SIZES, head=head_of(target(), feature_layers=(1, 2, LAYERS + 1))),
        "got the state after the final norm",
    ),
    "states": (
        lambda: grow_pair(target(), SIZES, head=head_of(target()), feature_layers=(1, 6, 9)),
        "2 of 7 -> 1 of 12",
    ),
    "number of states": (
        lambda: grow_pair(target(), SIZES, feature_layers=(1, 6)),
        r"feature_layers: expected a state for each of \(2, 3, 4\), got \(1, 6\)",
    ),
    "quantised": (
        lambda: grow_pair(quantize_weights(target(), "int8"), SIZES),
        "expected unquantised weights, got int8",
    ),
    "method": (lambda: grow_pair(target(), SIZES, head=tiny.eagle1_head(target())), "expected a head of method"),
    "another target's head": (
        lambda: grow_pair(target(), SIZES, head=head_of(tiny.model(41, layers=LAYERS))),
        "the target needs 40, the head has 41",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_inflation_to_impossible_sizes_or_heads_raises(what: str) -> None:
    attempt, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        attempt()


FLAGS = [f"--{name.replace('_', '-')}={size}" for name, size in BYTE_SIZES.items()]
LARGER_TINY = ("--shape", "tiny", "--hidden-size", "96", "--num-heads", "8")


def inflate(out: Path, *words: str | Path) -> list[str]:
    """Return the words of a command that inflates the byte pair's target."""
    return [str(word) for word in ("bench", "inflate", byte_pair.TARGET, out, *words)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("inflated")
    out, head = folder / "target", folder / "head"
    command = inflate(out, "--head", byte_pair.HEAD, "--head-out", head, "--dtype", "float32")
    assert main([*command, *FLAGS]) == 0
    return out, head


def test_inflated_folders_hold_compressed_weights_equal_to_those_in_memory(written: tuple[Path, Path]) -> None:
    model = Model.from_pretrained(written[0], dtype="float32")
    head = Eagle3.from_pretrained(written[1], tree=Tree.chain(2), dtype="float32").head
    assert (model.config, head.config) == tuple(part.config for part in large_pair())
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (model, head), large_pair())
    assert all(jax.tree.leaves(same))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(model))  # the padding is zeros, which compress well
    assert sum(file.stat().st_size for file in (written[0] / "weights").rglob("*")) < 0.8 * size
    assert hub.eos_ids(written[0]) == hub.eos_ids(byte_pair.TARGET) != {}
    match = compare(byte_models()[0], model, (2, 4, 5), (2, 4, 6), text_tokens())
    assert match.same, match


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected --shape or a size, such as --hidden-size, got none; name one that shall grow"),
        (("--intermediate-size", "8"), "--intermediate-size: expected at least the small one's"),
        (
            ("--shape", "tiny"),
            "--hidden-size: expected more than the small model's 64, got 64: a larger vocabulary needs one more "
            "channel; take a larger shape or --hidden-size, or --vocab-size 256",
        ),
        ((*LARGER_TINY, "--head", "demo"), "expected HEAD and a HEAD_OUT apart from OUT, got demo and None"),
        ((*LARGER_TINY, "--num-layers", "6"), "--num-layers: expected room"),
    ],
)
def test_inflate_command_with_a_wrong_option_prints_one_line_and_writes_nothing(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(inflate(tmp_path / "out", *words)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_inflate_command_onto_an_existing_head_folder_is_refused_before_writing(
    written: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = inflate(tmp_path / "out", *FLAGS, "--head", byte_pair.HEAD)
    assert main([*command, "--head-out", str(written[1])]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--head-out", str(tmp_path / "out")]) == 2
    assert "apart from OUT" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_inflate_command_overwrite_option_replaces_folder(
    written: tuple[Path, Path], capsys: pytest.CaptureFixture
) -> None:
    command = inflate(written[0], *LARGER_TINY)
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{written[0]}: bfloat16") and "hidden_size=96" in said
    assert json.loads((written[0] / "jspec.json").read_text())["config"]["vocab_size"] == 512
    assert main([*inflate(written[0], "--intermediate-size", "512"), "--overwrite"]) == 0
    small = byte_models()[0].config
    sizes = f"hidden_size={small.hidden_size}, intermediate_size=512, num_layers={small.num_layers},"
    assert sizes in capsys.readouterr().out, "without --shape what is not named stays"
