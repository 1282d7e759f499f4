"""The sampling that a checkpoint recommends, which servers and the command line take where a request says nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from convert.fields import CheckpointError, named, read_json
from jspec.engine.request.generation_config import without_counterpart
from jspec.engine.request.sampling_params import SamplingParams

FILE = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
AUTO, NONE = "auto", "jspec"  # take the target's file; take none


def model_sampling(choice: str, target: str | Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` for requests that leave them out.

    Args:
        choice: "auto": those of the target's generation_config.json, if it has one; "jspec": none; else a folder with
            such a file.
        target: folder of the target.

    Raises:
        CheckpointError: the folder that ``choice`` names has no such file, or a file has a wrong value.
    """
    if choice == NONE:
        return {}
    folder = Path(target if choice == AUTO else choice)
    if (folder / FILE).is_file():
        return _read(folder / FILE)
    if choice == AUTO:
        return {}
    raise CheckpointError(folder / FILE, f'expected the file, found none; name its folder, "{AUTO}" or "{NONE}"')


def _read(file: Path) -> dict[str, Any]:
    """Read the fields that a file names.

    A file that does not name ``do_sample`` may recommend values without saying so, as some published ones do. With
    ``do_sample`` false decoding is greedy; with true and no temperature it is 1, as in transformers.
    """
    config = read_json(file)
    fields = {name: config[name] for name in FIELDS if config.get(name) is not None}
    if config.get("do_sample") is not None:
        fields = {"temperature": 1.0, **fields} if config.flag("do_sample") else {"temperature": 0.0}
    if others := without_counterpart(config):
        warnings.warn(f"{file}: {', '.join(others)}: not applied, because it has no counterpart here", stacklevel=4)
    with named(file):
        SamplingParams(**fields)
    return fields
