"""The calls with which low-rank adapters (LoRA) of the target are loaded and unloaded, also while requests run."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping

from jspec.core.config import EngineConfig
from jspec.core.foreign_names import keywords_checked
from jspec.core.shorten import short
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.request.request import Adapter
from jspec.models.adapter_files import read_adapter
from jspec.models.adapters import as_tables
from jspec.models.decoder import Model


class AdapterCalls(abc.ABC):
    """Loads adapters, which requests choose by name; steps and other requests go on meanwhile.

    An adapter stays in the memory of the host until it is unloaded. It comes to the devices when a request with it
    starts, in the place of the least recently used one.
    """

    input_processor: InputProcessor

    @property
    @abc.abstractmethod
    def _adapted(self) -> tuple[EngineConfig, Model]:
        """The options of the engine, and its target, or the target's shapes."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """The paths of the loaded adapters, by name."""
        return {name: adapter.path for name, adapter in self.input_processor.adapters.items()}

    @keywords_checked
    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter of the target, in the format of PEFT (`SamplingParams.adapter`).

        Args:
            name: name by which requests choose it.
            path: folder or hub id ("owner/name").

        Raises:
            TypeError, ValueError: the name is no text or is in use; the engine was made without ``adapters=``; or the
                adapter does not fit the target or is damaged.
            NotImplementedError: the adapter has an option that is not supported.
            FileNotFoundError: there is no such folder.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"load_adapter: name: expected a text, got {short(name)}")
        self._check_new(name)
        config, target = self._adapted
        if not config.adapters:
            raise ValueError(
                "load_adapter: expected an engine with adapters, got one without; make it with adapters=, the number "
                "that may be in use at once"
            )
        file = read_adapter(path)
        try:
            layers = as_tables(file, target, config.adapter_rank)
        except ValueError as error:
            raise ValueError(f"load_adapter: {path}: {error}") from None
        with self.input_processor.changing_adapters:
            self._check_new(name)  # another thread may have loaded one meanwhile
            adapters = self.input_processor.adapters
            self.input_processor.adapters = {**adapters, name: Adapter(name, str(path), file.digest, layers)}

    def _check_new(self, name: str) -> None:
        if name in self.input_processor.adapters:
            raise ValueError(f"load_adapter: name: expected a new one, got {short(name)}; unload_adapter it first")

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it go on.

        Raises:
            ValueError: no adapter has this name.
        """
        with self.input_processor.changing_adapters:
            adapters = dict(self.input_processor.adapters)
            if adapters.pop(name, None) is None:
                loaded = ", ".join(map(repr, adapters)) or "none"
                raise ValueError(f"unload_adapter: name: expected one of {loaded}, got {short(name)}")
            self.input_processor.adapters = adapters
