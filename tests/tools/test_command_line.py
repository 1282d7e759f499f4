"""Test `jspec generate` and `jspec info`: every drafter, every form of tree, and errors of one line."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jspec import MTP, Engine, Model, NGram, PEagle, Suffix, Tree
from jspec.__main__ import main
from jspec.core.config import ACCEPT_RULES, EngineConfig
from jspec.core.tree import TREE_FORMS
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.models.weights.quantize import quantized_as
from jspec.step.executables import Executables
from jspec.tools import demo
from jspec.tools.command_line import make_parser
from jspec.tools.generate import make_drafter
from jspec.tools.replay import continue_greedily
from tests.support import folders

pytestmark = pytest.mark.once

PROMPT = '!"#$%!"#$%!"'
TOKENS = 20
SPEED = r"(\d+) tokens, (\d+) rounds, mean acceptance length [\d.]+(?:, [\d.]+ tokens/s)?"  # no speed of a short answer


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write a target of one layer and a drafter of every kind, with random weights; return the folders by name."""
    root = tmp_path_factory.mktemp("small")
    vocabulary = {"vocab_size": 256}
    config = {**folders.TARGET, **vocabulary, "num_hidden_layers": 1, "eos_token_id": None}
    states = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    folders.write(root / "target", config, folders.target_tensors(config))
    folders.write(
        root / "eagle3", {**folders.HEAD, **vocabulary, **states}, folders.without(folders.head_tensors(), "t2d")
    )
    folders.write(root / "eagle", {**folders.EAGLE, **vocabulary}, folders.eagle_tensors())
    medusa = folders.write(root / "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 1}, {})
    (medusa / "model.safetensors").unlink()
    outputs = folders.random_tensors({f"{head}.1.weight": (256, 16) for head in range(3)})
    folders.save_file(folders.medusa_tensors(3) | outputs, medusa / "medusa_lm_head.safetensors")
    return {path.name: str(path) for path in root.iterdir()} | {"draft-model": str(root / "target")}


def generate(small: dict[str, str], *words: str) -> int:
    options = ["--tokenizer", "bytes", "--max-len", "64", "--max-tokens", str(TOKENS)]
    return main(["generate", "--target", small["target"], *options, *words, PROMPT])


@pytest.fixture(scope="module")
def plain(small: dict[str, str]) -> str:
    """Return the target's greedy text, decoded without an engine."""
    prompt = np.frombuffer(PROMPT.encode(), np.uint8).astype(np.int32)
    text = continue_greedily(Model.from_pretrained(small["target"], dtype="float32"), prompt[None], TOKENS)
    return ByteTokenizer().decode(text[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    "words",
    [
        ("--eagle3", "topk:6,2,2", "--accept", "rejection"),
        pytest.param(("--medusa", "static:0,1,0.0", "--accept", "multi_candidate"), marks=pytest.mark.long),
        pytest.param(("--draft-model", None), marks=pytest.mark.long),
    ],
    ids=lambda words: words[0],
)
def test_generate_command_with_drafter_prints_the_targets_greedy_text(
    small: dict[str, str],
    plain: str,
    words: tuple[str | None, ...],
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", partial(Engine.from_pretrained, controls=False))  # compiles sooner
    method, tree, *more = words
    path = [small[method.removeprefix("--")]] if method.removeprefix("--") in small else []
    assert generate(small, method, *path, *(["--tree", tree] if tree else []), *more) == 0
    said = capsys.readouterr()
    assert said.out == plain + "\n"
    tokens, rounds = re.fullmatch(SPEED, said.err.splitlines()[-1]).groups()  # type: ignore[union-attr]
    assert int(tokens) == TOKENS
    rounds = int(rounds)
    assert rounds < TOKENS - 1 if method == "--draft-model" else rounds <= TOKENS - 1  # the target drafts for itself


def options(**given: object) -> Namespace:
    heads = (
        "eagle3",
        "peagle",
        "eagle",
        "medusa",
        "dflash",
        "dflash2",
        "dspark",
        "mtp",
        "gemma4_assistant",
        "uno",
        "draft_model",
    )
    names = (
        *heads,
        "ngram",
        "suffix",
        "tree",
        "dtype",
        "draft_quantize",
        "draft_vocab",
        "draft_device",
        "lookup",
        "join",
    )
    return Namespace(**{**dict.fromkeys(names), **given})


def test_drafter_made_from_the_tree_option_has_that_tree(small: dict[str, str], golden: Path) -> None:
    for text, tree in (
        (None, Tree.chain(5)),
        ("chain:2", Tree.chain(2)),
        ("topk:6,2,3", Tree.topk(6, 2, 3)),
        ("static:0,1,0.0", Tree.static([(0,), (1,), (0, 0)])),
    ):
        for given in ({"ngram": True}, {"suffix": True}, {"eagle": small["eagle"]}):
            drafter = make_drafter(options(tree=text, **given))
            assert drafter is not None and drafter.tree == tree
    medusa = make_drafter(options(medusa=small["medusa"]))
    assert medusa is not None and medusa.tree == Tree.chain(3), "as many as there are heads"
    peagle = make_drafter(
        options(peagle=str(golden / "peagle/speculators/draft"), draft_quantize="int8", tree="chain:6")
    )
    assert isinstance(peagle, PEagle) and peagle.tree == Tree.chain(6) and quantized_as(peagle.head) == "int8"
    mtp = make_drafter(options(mtp=str(golden / "families/glm4_moe"), tree="chain:2", draft_quantize="int8"))
    assert isinstance(mtp, MTP) and mtp.tree == Tree.chain(2) and quantized_as(mtp.head) == "int8"
    reduced: Any = make_drafter(options(eagle=small["eagle"], draft_vocab="9"))
    assert reduced.draft_vocab.tolist() == [*range(9)]
    assert isinstance(make_drafter(options(ngram=True)), NGram)
    assert isinstance(make_drafter(options(suffix=True)), Suffix)
    assert make_drafter(options()) is None


def test_look_up_beside_a_head_has_a_chain_that_fits_their_join(small: dict[str, str]) -> None:
    for given, shown in (
        (dict(lookup="ngram"), "Beside(Eagle('chain:5'), NGram('chain:5'), 'replace', threshold=None)"),
        (
            dict(lookup="suffix", tree="topk:6,2,3"),
            "Beside(Eagle('topk:6,2,3'), Suffix('chain:10'), 'beside', threshold=None)",
        ),
        (
            dict(lookup="suffix", tree="chain:2", join="beside"),
            "Beside(Eagle('chain:2'), Suffix('chain:10'), 'beside', threshold=None)",
        ),
    ):
        assert repr(make_drafter(options(eagle=small["eagle"], **given))) == shown


def cache_dtypes(cache: Any) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(cache) if leaf.ndim == 4}


def test_generate_command_dtype_options_set_dtypes_of_weights_and_caches(
    small: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine gets quantised weights, and caches of the given dtypes."""
    built: list[Any] = []

    def compiled(self: Any, program: Any, params: Any, state: Any, config: EngineConfig, *_: Any) -> None:
        built.append((params, state, config))
        raise ValueError("stop here")

    monkeypatch.setattr(Executables, "__init__", compiled)
    draft = ("--draft-model", small["draft-model"])
    words = ("--quantize", "int8", "--kv-dtype", "bfloat16", "--draft-kv-dtype", "float16", "--draft-quantize", "fp8")
    assert generate(small, *draft, *words) == 2
    assert generate(small, *draft) == 2
    (params, state, config), (plain_params, plain_state, _) = built
    assert (quantized_as(params.target), quantized_as(params.draft)) == ("int8", "fp8")
    assert (cache_dtypes(state.target), cache_dtypes(state.draft)) == ({"bfloat16"}, {"float16"})
    assert (config.quantize, config.kv_dtype, config.draft_kv_dtype) == ("int8", "bfloat16", "float16")
    assert quantized_as(plain_params) is None, "negative control"
    assert (cache_dtypes(plain_state.target), cache_dtypes(plain_state.draft)) == ({"float32"}, {"float32"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--eagle3", "medusa"), "expected a checkpoint of kind 'eagle3', got 'medusa'"),
        (("--medusa", "medusa", "--tree", "chain:4"), "there are 3 heads"),
        (("--medusa", "medusa", "--tree", "topk:4,2,2"), "expected a chain or a static tree"),
        (("--ngram", "--tree", "chain"), "expected chain:LENGTH, topk:NODES,DEPTH,K or static:0,1,0.0"),
        (("--tree", "chain:4"), "expected a drafter"),
        (("--ngram", "--accept", "sometimes"), "accept: expected one of"),
        (("--suffix", "--tree", "topk:6,2,2", "--accept", "block"), "block"),
        (("--max-tokens", "0"), "max_tokens"),
        (
            ("--quantize", "int3"),
            "quantize: expected one of (None, 'int8', 'fp8', 'fp8_dynamic', 'int4', 'mxfp4', 'none'), got 'int3'",
        ),
        (("--kv-dtype", "int8"), "--kv-dtype: expected one of"),
        (("--draft-kv-dtype", "int8"), "--draft-kv-dtype: expected one of"),
        (("--eagle", "eagle", "--draft-quantize", "int3"), "quantize: expected None or one of int8"),
        (
            ("--ngram", "--draft-quantize", "int8"),
            "--draft-quantize: expected one of --eagle3, --peagle, --eagle, --dflash, --dflash2, --dspark, --mtp, "
            "--gemma4-assistant, --draft-model",
        ),
        (("--medusa", "medusa", "--tree", "chain:3", "--draft-quantize", "int8"), "--draft-quantize: expected one of"),
        (("--draft-quantize", "int8"), "--draft-quantize: expected one of"),
        (
            ("--ngram", "--lookup", "suffix"),
            "--lookup: expected a head beside which it drafts, one of --eagle3, --peagle",
        ),
        (("--lookup", "suffix"), "--lookup: expected a head"),
        (("--eagle3", "eagle3", "--join", "beside"), "--join: expected --lookup"),
        (
            ("--eagle3", "eagle3", "--lookup", "ngram", "--tree", "topk:6,2,2", "--join", "replace"),
            '--join "replace" expects a model that drafts a chain',
        ),
        (("--ngram", "--draft-vocab", "9"), "--draft-vocab: expected one of --eagle3, --peagle, --eagle,"),
        (("--eagle", "eagle", "--draft-vocab", "0"), "Eagle: --draft-vocab: expected 1 to"),
        (("--eagle3", "eagle3", "--draft-vocab", "9"), "Eagle3: --draft-vocab: expected a head that uses the target's"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_generate_command_invalid_value_prints_one_line_and_exits_2(
    small: dict[str, str], words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert generate(small, *(small.get(word, word) for word in words)) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert message in error and error.startswith("jspec: ")
    assert all(line.startswith("jspec: loading ") for line in progress)


@pytest.mark.parametrize(
    ("words", "message", "shown"),
    [
        (
            "train",
            "train: ttt: expected 3, which the head of init drafts",
            "train: --ttt: expected 3, which the head of",
        ),
        ("train", "pass feature_layers= (the default 2)", "pass --feature-layers (the default 2)"),
        ("train", "begin a new run with init= of this head", "begin a new run with --init of this head"),
        ("train", "or another held_out (0: none).", "or another --held-out (0: none)."),
        ("train", 'pass tokenizer= ("bytes" if', 'pass --tokenizer ("bytes" if'),
        ("train", "/data/held_out/x.held_out: no such file", "/data/held_out/x.held_out: no such file"),
        (
            "generate",
            "prompt: expected fewer tokens than max_len=64, which",
            "prompt: expected fewer tokens than --max-len 64,",
        ),
        ("serve", "slots: expected 1 or more", "--slots: expected 1 or more"),
        ("generate", "Eagle: quantize: expected None", "Eagle: quantize: expected None"),  # that of the drafter
        ("generate", "pass feature_layers= (the default", "pass feature_layers= (the default"),  # no option of it
        ("bench serve", "num_prompts: expected", "--num-prompts: expected"),
    ],
)
def test_messages_name_the_options_of_the_command(words: str, message: str, shown: str) -> None:
    assert make_parser().in_flags(words.split(), message).startswith(shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate --target a --ngram --suffix hello", "--suffix: not allowed with argument --ngram"),
        ("generate --target a --eagle b --eagle3 c hello", "not allowed with argument"),
        ("generate --target a --beam 4 hello", "unrecognized arguments: --beam"),
        ("generate hello", "required: --target"),
        ("info --check head", "--check: expected 2 arguments"),
        ("fly", "invalid choice: 'fly'"),
    ],
)
def test_command_line_invalid_arguments_print_one_line_and_exit_2(
    words: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("info", "expected a folder, HEAD TARGET, or --check HEAD TARGET"),
        ("info a --check b c", "expected a folder, HEAD TARGET, or --check HEAD TARGET"),
        ("info a --text b", "expected text with --check"),
    ],
)
def test_info_command_invalid_combination_of_folder_check_and_text_exits_2(
    words: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate --coordinator h:1 --target a b", "--num-processes, --process-id: expected beside the other options"),
        ("serve --coordinator h:1 --replicas 2", "--replicas: expected no such option beside --coordinator, got 2"),
        (
            "generate --coordinator h:1 --draft-device 0 --target a b",
            "--draft-device: expected no such option beside --coordinator, got 0",
        ),
    ],
)
def test_options_that_do_not_fit_to_several_processes_exit_2(
    words: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_generate_command_help_lists_tree_forms_and_accept_rules(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert TREE_FORMS in out
    assert all(rule in out for rule in ACCEPT_RULES)


def test_command_whose_reader_has_gone_ends_without_a_word() -> None:
    words = [sys.executable, "-m", "jspec", "info", "demo"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(120)) == ("", 1)


def test_characters_that_the_encoding_of_the_output_lacks_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, written = shutil.copytree(demo.HEAD, tmp_path / "\u00e9"), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["info", str(folder)]) == 0
    assert rf"{tmp_path}/\xe9: Hugging Face folder" in written.getvalue().decode("ascii")
    assert capsys.readouterr().err == ""
