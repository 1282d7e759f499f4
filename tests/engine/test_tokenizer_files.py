"""Damaged, dangerous or foreign tokenizers are refused by name; every clear way to name a tokenizer is accepted."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from convert.fields import CheckpointError
from convert.plan import Plan
from jspec import Engine, Model
from jspec.engine.text import tokenizer_files as module
from jspec.engine.text.tokenizer import ByteTokenizer, HFTokenizer, check_size, load_tokenizer
from tests.support import folders, tiny
from tests.support.folders import TARGET

pytestmark = pytest.mark.once

LETTERS = "helowrdHW!,.24Stresn abcfgijkmpquvxyz"


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A byte-level tokenizer of single letters with an EOS token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(["</s>", "Ġ", *sorted(set(LETTERS) - {" "})])}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return save(made, tmp_path / "tokenizer", tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>")


@pytest.fixture
def metaspace(tmp_path: Path) -> Path:
    """A tokenizer of single letters whose blanks are SentencePiece's, named as GPT-2's, which has other blanks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(["<unk>", "▁", *sorted(set(LETTERS) - {" "})])}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return save(made, tmp_path / "metaspace", tokenizer_class="PreTrainedTokenizerFast", unk_token="<unk>")


def save(made: Any, folder: Path, **about: Any) -> Path:
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return describe(folder, **about)


def describe(folder: Path, **about: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


# ---- what is refused


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GPT2Tokenizer"])
def test_tokenizer_folder_without_a_vocabulary_raises(tmp_path: Path, kind: str) -> None:
    folder = describe(tmp_path / "empty", tokenizer_class=kind)
    with pytest.raises(CheckpointError, match=f"{folder}: expected a vocabulary, got . special tokens; mend"):
        load_tokenizer(folder)


def test_tokenizer_with_an_id_that_no_vocabulary_has_raises(metaspace: Path) -> None:
    """Lists of all its tokens would exhaust the memory."""
    written = json.loads((metaspace / "tokenizer.json").read_text())
    written["model"]["vocab"]["far"] = 2**31
    (metaspace / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match="expected token ids below 1048576, got 2147483648; mend"):
        load_tokenizer(metaspace)


def test_tokenizer_whose_class_loses_blanks_raises(metaspace: Path) -> None:
    assert load_tokenizer(metaspace) is not None
    describe(metaspace, tokenizer_class="GPT2Tokenizer", unk_token="<unk>")
    with pytest.raises(
        CheckpointError, match="'helloworld' for 'hello world' from GPT2Tokenizer; correct tokenizer_cl"
    ):
        load_tokenizer(metaspace)


@pytest.mark.parametrize("prefix", ["x" * 30, 5, [[]]])
def test_damaged_tokenizer_file_raises_even_if_the_library_panics(byte_level: Path, prefix: Any) -> None:
    """A prefix longer than a merged token ends in a panic of tokenizers, which is no `Exception`."""
    file = byte_level / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"] |= {"continuing_subword_prefix": prefix, "merges": [["h", "e"]]}
    file.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=f"{byte_level}: expected tokenizer files that transformers can read, got"
    ):
        load_tokenizer(byte_level)


def test_tokenizer_whose_vocabulary_lacks_letters_is_accepted(tmp_path: Path) -> None:
    """The round trip of a text says nothing about a tokenizer without its letters."""
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    folder = save(made, tmp_path / "words", tokenizer_class="PreTrainedTokenizerFast", unk_token="<unk>")
    assert load_tokenizer(folder) is not None


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_tokenizer_folder_with_code_loads_without_asking_for_or_running_it(
    byte_level: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    def asked(*_: Any) -> str:
        raise AssertionError("asked on stdin")

    monkeypatch.setattr(builtins, "input", asked)
    (byte_level / "own.py").write_text(f"open({str(byte_level / 'ran')!r}, 'w')\nclass Own: pass\n")
    about = {
        "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
        "config.json": {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": "own.Own"}},
    }
    (byte_level / file).write_text(json.dumps(about[file]))
    if file == "config.json":
        (byte_level / "tokenizer_config.json").unlink()
    if file == "config.json":  # tokenizer.json is read without that code
        assert load_tokenizer(byte_level) is not None
    else:
        with pytest.raises(CheckpointError, match=r"code of its own \(auto_map\), which is never run"):
            load_tokenizer(byte_level)
    assert not (byte_level / "ran").exists()


def test_tokenizer_model_file_without_sentencepiece_raises_naming_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_installed", lambda name: name != "sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(CheckpointError, match=r"expected sentencepiece to read it.*\.\[sentencepiece\]") as error:
        load_tokenizer(tmp_path)
    assert "tiktoken" not in str(error.value)


def test_sentencepiece_extra_is_declared_in_pyproject() -> None:
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'sentencepiece = ["sentencepiece", "protobuf"]' in declared


def test_tokenizer_file_larger_than_the_limit_raises(byte_level: Path) -> None:
    os.truncate(byte_level / "tokenizer.json", module.MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected at most 268,435,456 bytes"):
        load_tokenizer(byte_level)


# ---- what is accepted


def test_tokenizer_given_as_a_transformers_object_has_the_ids_of_its_folder(byte_level: Path) -> None:
    from transformers import AutoTokenizer

    wrapped, read = load_tokenizer(AutoTokenizer.from_pretrained(byte_level)), load_tokenizer(byte_level)
    assert isinstance(wrapped, HFTokenizer) and isinstance(read, HFTokenizer)
    assert wrapped.encode("hello") == read.encode("hello") != []
    assert (wrapped.vocab_size, wrapped.hidden_ids, wrapped.eos_id) == (read.vocab_size, read.hidden_ids, read.eos_id)


def test_tokenizer_given_by_hub_id_downloads_no_weights(byte_level: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(byte_level)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_tokenizer("owner/name") is not None
    assert asked[0] == "owner/name" and not any("safetensors" in pattern or "bin" in pattern for pattern in asked)


def test_tokenizer_path_may_be_relative_or_in_the_home_folder(
    byte_level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(byte_level.parent)
    monkeypatch.setenv("HOME", str(byte_level.parent))
    for source in (byte_level.name, f"./{byte_level.name}", f"~/{byte_level.name}", Path(byte_level.name)):
        assert isinstance(load_tokenizer(source), HFTokenizer)
    own = ByteTokenizer()
    assert load_tokenizer(own) is own


@pytest.mark.parametrize("source", [5, b"gpt2", ["gpt2"], object()])
def test_tokenizer_argument_of_a_wrong_type_raises(source: Any) -> None:
    with pytest.raises(TypeError, match="tokenizer: expected a folder, a hub id, a tokenizer of transformers"):
        load_tokenizer(source)


# ---- the tokenizer and its target


class Sized(ByteTokenizer):
    def __init__(self, size: int, hidden: set[int]) -> None:
        self.vocab_size, self.hidden_ids = size, frozenset(hidden)


@pytest.mark.parametrize(
    ("size", "hidden", "is_accepted"),
    [(100, set(), True), (99, set(), True), (101, set(), False), (102, {101}, False), (102, {100, 101}, True)],
)
def test_check_size_accepts_only_special_tokens_beyond_the_vocabulary(
    size: int, hidden: set[int], is_accepted: bool
) -> None:
    if is_accepted:
        return check_size(Sized(size, hidden), 100)
    with pytest.raises(ValueError, match=f"expected ids below 100, the target's vocabulary, got a tokenizer of {size}"):
        check_size(Sized(size, hidden), 100)
    return None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "bytes"}, "tokenizer: expected ids below 40"),
        ({"max_len": 4096}, "max_len: expected at most 2048, the target's max_position_embeddings, got 4096; lower"),
        ({"slots": 0}, "slots: expected an int from 1 to"),
    ],
)
@pytest.mark.parametrize("form", ["folder", "model"])
def test_engine_option_that_the_target_lacks_raises_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, options: dict[str, Any], message: str
) -> None:
    folder = folders.write(tmp_path, TARGET, folders.target_tensors())
    source: Any = folder if form == "folder" else Model.from_pretrained(folder)

    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Plan, "batches", read)
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(source, **options)


def test_engine_config_default_length_is_that_of_a_short_target() -> None:
    from jspec.engine.run.build import engine_config

    assert engine_config({}, tiny.config(40)).max_len == 2048
    assert engine_config({}, tiny.config(40).resized(max_position=512)).max_len == 512
    assert engine_config({"max_len": 512}, tiny.config(40).resized(max_position=512)).max_len == 512
