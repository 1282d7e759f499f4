"""Known faults of tokenizer files are repaired as transformers does; EOS ids come from all files that name them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convert.fields import CheckpointError
from jspec.engine.text.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer
from jspec.engine.text.tokenizer_files import eos_ids
from tests.support import paper, tiny, tokenizer_folders

pytestmark = pytest.mark.once


def test_tokenizer_import_without_torch_in_a_notebook_without_widgets_prints_nothing() -> None:
    """Negative control, in the second line: importing transformers alone prints that both are missing."""
    hidden = (
        "import sys, types; sys.modules['torch'] = sys.modules['ipywidgets'] = None; "
        "sys.modules['ipykernel.zmqshell'] = sys.modules['IPython'] = types.SimpleNamespace(get_ipython=object); "
    )
    for code, messages in (
        ("from jspec.engine.text import tokenizer_files; tokenizer_files.auto_tokenizer()", ()),
        ("from transformers import AutoTokenizer", ("PyTorch was not found", "IProgress not found")),
    ):
        error = subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True, check=True).stderr
        assert all(message in error for message in messages) and bool(messages) == bool(error), error


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [(None, None, (0,)), ([7, 9], None, (7, 9, 0)), (None, 2, (2, 0)), (5, [2, 5], (5, 2, 0)), (0, 0, (0,))],
)
def test_eos_ids_are_those_of_both_files_and_of_the_tokenizer(
    tmp_path: Path, generation: Any, config: Any, ids: tuple[int, ...], has_folder: bool
) -> None:
    folder = tokenizer_folders.write(tmp_path / "byte_level", "byte_level")  # its <|endoftext|> is token 0
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (folder / name).write_text(json.dumps({"model_type": "llama", "eos_token_id": value}))
    tokenizer = load_tokenizer(folder)
    assert eos_ids(folder if has_folder else None, tokenizer, 40) == (ids if has_folder else (0,))
    assert eos_ids(None, ByteTokenizer(), 40) == eos_ids(None, None, 40) == eos_ids(None, tokenizer, 0) == ()


@pytest.mark.parametrize(("options", "ids"), [({}, (2,)), ({"eos_ids": ()}, ()), ({"eos_ids": (5,)}, (5,))])
def test_engine_of_a_loaded_model_ends_requests_at_the_tokenizers_eos(
    tmp_path: Path, options: dict[str, Any], ids: tuple[int, ...]
) -> None:
    folder = tokenizer_folders.write(tmp_path / "chat", "chat")  # its <|im_end|> is token 2
    with paper.make(tiny.model(1200, layers=1), tokenizer=str(folder), slots=1, max_len=32, **options) as engine:
        assert engine.eos_ids == ids


@pytest.mark.parametrize("wrong", [-1, 40])
def test_eos_id_beyond_the_vocabulary_is_left_out_with_a_warning_if_another_file_has_one(
    tmp_path: Path, wrong: int, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": wrong}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert eos_ids(tmp_path, None, 40) == (2,)
    assert f"config.json: eos_token_id: expected ids in [0, 40), got {wrong}; it is left out" in caplog.text


def test_eos_id_of_a_file_beyond_the_vocabulary_raises_naming_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    with pytest.raises(
        CheckpointError, match=r"config\.json: eos_token_id: expected ids in \[0, 7\), got 7; pass eos_"
    ):
        eos_ids(tmp_path, None, 7)


LLAMA3 = (  # the regular expression of Llama 3, with which Mistral's older files were published
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def camel_case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of more than 100,000 tokens, of which one joins two words that Mistral's regex parts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(word[:end], word[end]) for word in ("Ġlove", "ĠJava", "Script") for end in range(1, len(word))]
    merges.append(("ĠJava", "Script"))
    tokens = [*letters, *map("".join, merges), *(f"filler{number}" for number in range(100_000))]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    words = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "[INST]"])
    folder = tmp_path_factory.mktemp("mistral")
    made.save(str(folder / "tokenizer.json"))
    return describe(folder)


def describe(folder: Path) -> Path:
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize(
    ("config", "is_repaired"),
    [
        ({"model_type": "mistral", "transformers_version": "4.48.0"}, True),
        ({"model_type": "mistral3"}, True),
        ({"model_type": "ministral", "transformers_version": "5.0.0.dev0"}, True),
        ({"model_type": "mistral", "transformers_version": "5.1.0"}, False),
        ({"model_type": "llama", "transformers_version": "4.48.0"}, False),
        ({"transformers_version": "4.48.0"}, False),
        (None, False),
    ],
)
def test_older_mistral_tokenizer_is_repaired_as_transformers_option_does(
    camel_case: Path, config: dict[str, str] | None, is_repaired: bool
) -> None:
    from transformers import AutoTokenizer

    file = camel_case / "config.json"
    file.unlink(missing_ok=True)
    if config is not None:
        file.write_text(json.dumps(config))
    tokenizer, text = load_tokenizer(camel_case), "I love JavaScript"
    assert isinstance(tokenizer, HFTokenizer) and bool(tokenizer.repairs) == is_repaired
    assert len(tokenizer.encode(text)) == (4 if is_repaired else 3)
    if config is not None and "model_type" in config:
        theirs = AutoTokenizer.from_pretrained(camel_case, local_files_only=True, fix_mistral_regex=True)
        assert tokenizer.encode(text) == theirs.encode(text)


def test_other_vocabulary_of_a_mistral_model_keeps_its_regular_expression(camel_case: Path, tmp_path: Path) -> None:
    text = (camel_case / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"[INST]"', '"<|end|>"'))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    tokenizer = load_tokenizer(describe(tmp_path))
    assert isinstance(tokenizer, HFTokenizer) and tokenizer.repairs == ()
