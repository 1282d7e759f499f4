"""Reads tensors from files written by torch.save, without running code that the files contain."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from convert.fields import CheckpointError, short
from convert.sources import Source, Tensor, incomplete

OLDEST_TORCH = (2, 10)  # in older versions, weights_only is known to let code run
SHARED = 4  # tensors in a file may share values; their sizes may add up to this many times the file's size


@final
class TorchFiles(Source):
    """The tensors of files written by torch.save; each read maps the file again, as in `Safetensors`."""

    def _headers(self, file: Path) -> dict[str, Tensor]:
        check_torch(file)
        check_archive(file)
        headers, size, values = {}, file.stat().st_size, 0
        for name, tensor in _load(file).items():
            if fault := _fault(tensor):
                raise CheckpointError(
                    file, f"{short(name)}: expected a plain dense tensor, got {fault}; save the model as safetensors"
                )
            headers[name] = Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), file)
            values += tensor.numel() * tensor.element_size()
            if max(values / SHARED, tensor.untyped_storage().nbytes()) > size:
                raise CheckpointError(
                    file, f"{short(name)}: expected tensors of {size:,} bytes, the file's size, got more; "
                    "save the model as safetensors",
                )  # fmt: skip
        return headers

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        import torch

        rows = torch.atleast_1d(_load(self.tensors[name].file)[name].detach())[start:stop].contiguous()
        if rows.dtype == torch.float8_e4m3fn:
            return rows.view(torch.uint8).numpy().view(float8_e4m3fn).copy()
        if rows.dtype == torch.bfloat16:
            return rows.view(torch.int16).numpy().view(bfloat16).copy()
        return rows.numpy().copy()


def _fault(tensor: Any) -> str:
    """Return why a tensor is refused, as text; "" for dense real values on the CPU, which are accepted."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"the class {type(tensor).__name__}"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"the layout {'nested' if tensor.is_nested else tensor.layout}"
    if tensor.device.type != "cpu":
        return f"the device {tensor.device}"
    if tensor.is_quantized or tensor.is_complex():
        return f"the dtype {tensor.dtype}"
    return "a negated view" if tensor.is_neg() else ""


def _load(file: Path) -> Mapping[str, Any]:
    import torch

    others = CheckpointError(file, "expected tensors by name, got other objects; save the model's state_dict()")
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        raise others from None  # torch's own message advises to disable this protection
    except MemoryError:
        raise
    except Exception as error:  # any class: a damaged pickle calls functions of torch with wrong arguments
        raise incomplete(file, "torch file", f"{type(error).__name__}: {error}") from error
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise others
    return tensors


def check_torch(file: Path) -> None:
    """Raise ImportError unless torch is installed in a version that can read files without running their code."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{file} needs torch to be read: pip install -e '.[convert]' in jspec's folder, or save it as safetensors"
        ) from error
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH:
        raise ImportError(
            f"{file}: expected torch {oldest} or later, got {torch.__version__}, whose protection against code in the "
            "file has known flaws; install a later torch, or save the file as safetensors"
        )


def check_archive(file: Path) -> None:
    """Raise CheckpointError unless a file is a zip archive without compression, which cannot expand when read."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise incomplete(file, "torch file", error) from error
    size = file.stat().st_size
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise CheckpointError(
            file, f"expected values of {size:,} bytes, the file's size, got a compressed archive; save as safetensors"
        )
