"""Test that a checkpoint's generation_config.json becomes sampling parameters."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from convert.fields import CheckpointError
from jspec import SamplingParams
from jspec.engine.request.model_sampling import model_sampling
from tests.support import byte_pair

pytestmark = pytest.mark.once


def written(folder: Path, **fields: Any) -> Path:
    """Write a folder with the generation_config.json that transformers saves for these fields."""
    from transformers import GenerationConfig

    GenerationConfig(**fields).save_pretrained(folder)
    return folder


def test_generation_config_saved_by_transformers_sets_every_supported_parameter(tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        max_new_tokens=90,
        min_new_tokens=3,
        stop_strings=["\n\n"],
        bad_words_ids=[[5], [6, 7]],
        eos_token_id=[2, 3],
    )
    params = SamplingParams(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        max_tokens=90,
        min_tokens=3,
        stop="\n\n",
        bad_words=((5,), (6, 7)),
    )
    assert SamplingParams.from_generation_config(folder) == params
    assert SamplingParams.from_generation_config(folder / "generation_config.json") == params


def test_generation_config_without_do_sample_is_greedy(tmp_path: Path) -> None:
    folder = written(tmp_path, eos_token_id=2)
    assert SamplingParams.from_generation_config(folder) == SamplingParams(temperature=0)
    sampled = SamplingParams.from_generation_config(folder, temperature=0.5, max_tokens=7, seed=1)
    assert sampled == SamplingParams(temperature=0.5, max_tokens=7, seed=1)


def test_generation_config_of_the_demo_target_is_greedy() -> None:
    assert SamplingParams.from_generation_config(byte_pair.TARGET) == SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(num_beams=4), "num_beams=4"),
        (dict(no_repeat_ngram_size=3), "no_repeat_ngram_size=3"),
        (dict(suppress_tokens=[7]), r"suppress_tokens=\[7\]"),
        (dict(do_sample=True, typical_p=0.5), "typical_p=0.5"),
        (dict(min_length=30), "min_length=30"),
        (dict(do_sample="false"), "do_sample: expected true or false, got 'false'"),
        (dict(do_sample=True, temperature=-1.0), "SamplingParams.temperature: expected a finite number >= 0"),
    ],
)
def test_generation_config_with_unsupported_option_raises_naming_the_option(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=named):
        SamplingParams.from_generation_config(tmp_path)


@pytest.mark.parametrize("value", [1, 1.0, 0, None])
def test_generation_config_with_options_without_effect_raises_nothing(tmp_path: Path, value: object) -> None:
    name = "num_beams" if value == 1 else "no_repeat_ngram_size"
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    assert SamplingParams.from_generation_config(tmp_path) == SamplingParams(temperature=0)


def test_generation_config_that_is_missing_or_invalid_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a generation_config\.json, found none"):
        SamplingParams.from_generation_config(tmp_path)
    for text, got in (("{", "expected JSON"), ("[]", "expected a JSON object, got list")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=got):
            SamplingParams.from_generation_config(tmp_path)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_generation_config_with_a_penalty_that_transformers_lacks_warns_once(tmp_path: Path, name: str) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, name: 1.5}))
    with pytest.warns(UserWarning, match=rf"{file}: {name}=1\.5: not read, .*; pass it to SamplingParams") as told:
        assert SamplingParams.from_generation_config(tmp_path) == SamplingParams()
    assert len(told) == 1
    file.write_text(json.dumps({name: 0}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingParams.from_generation_config(tmp_path)


def test_generation_config_value_of_another_type_raises_naming_file_and_field(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    for fields, named in (({"top_k": "5"}, "top_k"), ({"max_new_tokens": [1]}, "max_tokens"), ({"top_p": {}}, "top_p")):
        file.write_text(json.dumps({"do_sample": True, **fields}))
        with pytest.raises(CheckpointError, match=rf"^{tmp_path}: SamplingParams\.{named}: expected"):
            SamplingParams.from_generation_config(tmp_path)


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        (None, {}),
        ({"eos_token_id": 2, "bos_token_id": 1}, {}),
        ({"temperature": 0.01, "top_k": 1}, {"temperature": 0.01, "top_k": 1}),
        ({"do_sample": True, "top_p": 0.95}, {"temperature": 1.0, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.05,
             "max_new_tokens": 5},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.0, "repetition_penalty": 1.05},
        ),
    ],
)  # fmt: skip
def test_model_sampling_is_what_the_file_names(tmp_path: Path, file: Any, fields: dict[str, Any]) -> None:
    """The last file is that of Qwen2.5, with a length beside it, which is no sampling."""
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
        assert model_sampling(str(tmp_path), "elsewhere") == fields
    assert model_sampling("auto", tmp_path) == fields
    assert model_sampling("jspec", tmp_path) == {}


def test_model_sampling_of_wrong_files_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    with pytest.raises(CheckpointError, match=rf'^{file}: expected the file, found none; name its folder, "auto" or '):
        model_sampling(str(tmp_path), "elsewhere")
    file.write_text('{"top_p": 7}')
    with pytest.raises(CheckpointError, match=rf"^{file}: SamplingParams\.top_p: expected in \(0, 1\], got 7"):
        model_sampling("auto", tmp_path)
    file.write_text('{"top_k": 3, "num_beams": 4}')
    with pytest.warns(UserWarning, match=rf"{file}: num_beams=4: not applied"):
        assert model_sampling("auto", tmp_path) == {"top_k": 3}
