"""Reads the sampling parameters that a checkpoint recommends in its generation_config.json."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from convert.fields import CheckpointError, Fields, read_json, short

FIELDS = {  # transformers' option: field of SamplingParams
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "num_return_sequences": "n",
}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # maps an unsupported option to its values that change no token
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "diversity_penalty": (0,),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "force_words_ids": ([],),
    "constraints": ([],),
    "min_length": (0,),
    "max_time": (),
    "forced_decoder_ids": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
    "dola_layers": (),
}
IGNORED = ("presence_penalty", "frequency_penalty")  # in some files, though transformers passes over them


def recommended(path: str | Path) -> dict[str, Any]:
    """Read the fields of `SamplingParams` that a generation_config.json sets.

    As in transformers, decoding is greedy without ``do_sample``, whatever the temperature. Fields that the file does
    not name keep the default of `SamplingParams`; for top_k it is 0, unlike 50 in transformers. ``max_length`` is not
    read, because the engine's option ``max_len`` limits prompt and output.

    Args:
        path: the file or its folder.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is not a JSON object, or sets an unsupported option that changes tokens.
    """
    file = Path(path)
    file = file / "generation_config.json" if file.is_dir() else file
    if not file.exists():
        raise FileNotFoundError(f"{file}: expected a generation_config.json, found none; write out the fields")
    config = read_json(file)
    if others := without_counterpart(config):
        raise CheckpointError(
            file, f"{others[0]} has no counterpart here; remove it from a copy of the file, or write out the other "
            "fields",
        )  # fmt: skip
    if ignored := [f"{name}={short(config[name])}" for name in IGNORED if config.get(name) not in (None, 0)]:
        warnings.warn(
            f"{file}: {', '.join(ignored)}: not read, as transformers has no such option; pass it to SamplingParams "
            "if it is meant",
            stacklevel=3,
        )
    fields = {field: config[name] for name, field in FIELDS.items() if config.get(name) is not None}
    if not config.flag("do_sample"):
        fields["temperature"] = 0.0
    return fields


def without_counterpart(config: Fields) -> list[str]:
    """Return the unsupported options of a file that change tokens, each with its value."""
    values = {name: config.get(name) for name in UNSUPPORTED}
    return [f"{n}={short(v)}" for n, v in values.items() if v is not None and v not in UNSUPPORTED[n]]
