"""Test heads that name their targets: one name gives both."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from convert.fields import CheckpointError
from jspec import MTP, Eagle3, Engine
from jspec.draft.choice import DrafterChoice, choose_drafter, drafter_of
from jspec.draft.verifier import NamedTarget, named_target
from jspec.tools import generate, info, serve
from jspec.tools.command_line import make_parser
from tests.support import folders

pytestmark = pytest.mark.once

LAYER = {**folders.HEAD, "num_hidden_layers": 1}


def pair_of(tmp_path: Path, **changes: Any) -> tuple[Path, Path]:
    """Write a target and an EAGLE-3 head of speculators that names it; return their folders."""
    target = folders.write(tmp_path / "target", folders.TARGET, folders.target_tensors())
    verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"], **changes.pop("verifier", {})}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, **changes.pop("method", {})}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LAYER | changes.pop("layer", {}),
        "draft_vocab_size": folders.HEAD["draft_vocab_size"],
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier, "proposal_methods": [method]},
    }
    return target, folders.write(tmp_path / "head", config | changes, folders.head_tensors())


def test_one_name_gives_the_engine_of_target_and_head(tmp_path: Path) -> None:
    target, head = pair_of(tmp_path)
    assert named_target(head) == NamedTarget(str(target), "eagle3", 3)
    assert named_target(target) is None
    options: dict[str, Any] = dict(slots=1, max_len=32, prefill_buckets=(16,), dtype="float32", controls=False)
    with Engine.from_pretrained(head, **options) as engine:
        (done,) = engine.generate([[1, 2, 3]], max_tokens=6, temperature=0, ignore_eos=True)
        assert str(engine.core.runner.program.drafter.tree) == "chain:3"
    with Engine.from_pretrained(target, **options) as engine:
        (plain,) = engine.generate([[1, 2, 3]], max_tokens=6, temperature=0, ignore_eos=True)
    assert done.token_ids == plain.token_ids
    assert f"names its target: {target}" in info.describe(head)


@pytest.mark.parametrize(("tree", "wanted"), [([], "chain:3"), (["--tree", "chain:7"], "chain:7")])
def test_target_of_the_command_line_may_be_such_a_head(tmp_path: Path, tree: list[str], wanted: str) -> None:
    target, head = pair_of(tmp_path)
    arguments = make_parser().parse_args(["generate", "a", "--target", str(head), "--tokenizer", "bytes", *tree])
    generate.prepare(arguments)
    assert (arguments.target, arguments.eagle3, arguments.tree) == (target, head, wanted)


def test_model_of_the_server_is_its_target_and_may_be_such_a_head(tmp_path: Path) -> None:
    target, head = pair_of(tmp_path)
    arguments = make_parser().parse_args(["serve", str(head), "--tokenizer", "bytes"])
    serve._take_model(arguments)
    assert arguments.target == str(head)
    generate.prepare(arguments)
    assert (arguments.target, arguments.eagle3) == (target, head)
    with pytest.raises(ValueError, match=r"--target: expected none with the model .*, got .*; leave it out"):
        serve._take_model(make_parser().parse_args(["serve", str(head), "--target", str(target)]))


def test_drafter_auto_is_that_beside_the_target_or_its_own_layer_or_a_suffix(tmp_path: Path, golden: Path) -> None:
    target, head = pair_of(tmp_path)
    assert choose_drafter(target) == DrafterChoice("suffix", None)
    own = golden / "families" / "glm4_moe"
    assert choose_drafter(own) == DrafterChoice("mtp", own)
    assert isinstance(DrafterChoice("mtp", own).load(dtype="float32"), MTP)
    adapter = drafter_of(golden / "adapters" / "llama" / "all")
    flag, path = str(adapter).split(maxsplit=1)
    assert adapter.method == "uno" and (flag, path) == ("--draft", str(adapter.path)), "an adapter has no other flag"
    beside = target / "drafter"
    head.rename(beside)
    assert choose_drafter(target) == DrafterChoice("eagle3", beside)
    arguments = make_parser().parse_args(["serve", str(target), "--tokenizer", "bytes", "--draft", "auto"])
    serve._take_model(arguments)
    generate.prepare(arguments)
    assert (arguments.target, arguments.eagle3, arguments.tree) == (target, beside, None)
    with Engine.from_pretrained(target, drafter="auto", slots=1, max_len=32, dtype="float32") as engine:
        assert isinstance(engine.core.runner.program.drafter, Eagle3)
        with pytest.raises(ValueError, match='"auto" expected a target by its path'):
            Engine(engine.core.runner.params.main, drafter="auto")


def test_names_that_lead_to_no_such_target_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    def refusal(name: str, **changes: Any) -> str:
        target, head = pair_of(tmp_path / name, **changes)
        for file in tmp_path.glob(f"{name}/*/*.safetensors"):
            file.unlink()
        if name == "cycle":
            (target / "config.json").write_text((head / "config.json").read_text())
        with pytest.raises((CheckpointError, FileNotFoundError)) as error:
            Engine.from_pretrained(head)
        return str(error.value)

    assert "give the target, and this head as the drafter" in refusal("null", verifier={"name_or_path": None})
    assert "or give the target, and the head as the drafter" in refusal("gone", verifier={"name_or_path": "/no/such"})
    assert "got a head; give the target" in refusal("cycle")
    assert "expected a vocabulary of 41 tokens" in refusal("vocabulary", layer={"vocab_size": 41})
    config = json.loads((tmp_path / "null" / "target" / "config.json").read_text())
    assert "architectures" not in config, "the next refusal needs one"


def test_another_architecture_is_refused_and_a_lossy_rule_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, head = pair_of(tmp_path, method={"accept_tolerance": 0.1})
    with caplog.at_level(logging.WARNING):
        named_target(head)
    assert "it is ignored, and outputs are the target's" in caplog.text
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"expected the architecture LlamaForCausalLM, .* got Qwen3ForCausalLM"):
        named_target(head)


def test_drafter_that_is_given_stands_beside_a_target_alone(tmp_path: Path) -> None:
    _, head = pair_of(tmp_path)
    with pytest.raises(CheckpointError, match="expected a checkpoint of kind 'target', got 'eagle3'"):
        Engine.from_pretrained(head, drafter="ngram")
