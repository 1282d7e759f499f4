"""The routes that load and unload adapters, with the names and fields of vLLM; the settings must allow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.types import Receive, Scope, Send

from jspec.server.ask.fields import LOAD_ADAPTER, UNLOAD_ADAPTER, Field
from jspec.server.http.errors import invalid, refused
from jspec.server.http.events import send_json
from jspec.server.routes.service import Service

NAMES = {"name": "lora_name", "path": "lora_path"}


class LoadAdapter:
    """The ASGI application of /v1/load_lora_adapter: requests may then name the adapter as their model."""

    table: Mapping[str, Field] = LOAD_ADAPTER
    needed: tuple[str, ...] = ("lora_name", "lora_path")

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = (await self._service.read(scope, receive, self.table)).own
        for name in self.needed:
            if name not in fields:
                raise invalid(name, "expected a text, got nothing")
        try:
            await self._service.in_thread(self._work(fields), loads_adapter=True)
        except (TypeError, ValueError, OSError, NotImplementedError) as error:
            fault = ValueError(str(error).partition("load_adapter: ")[2] or str(error))
            raise refused(fault, NAMES, self.table, self.needed[-1]) from error
        await send_json(send, {"object": "adapter", "id": fields["lora_name"]})

    def _work(self, fields: Mapping[str, str]) -> Callable[[], None]:
        """Return the function that a worker thread runs."""
        name, service = fields["lora_name"], self._service
        if name in service.settings.names:
            raise invalid("lora_name", f"expected another name than the model's, got {name[:80]!r}")
        return lambda: service.engine.load_adapter(name, fields["lora_path"])


class UnloadAdapter(LoadAdapter):
    """The ASGI application of /v1/unload_lora_adapter: requests that have the adapter go on."""

    table = UNLOAD_ADAPTER
    needed = ("lora_name",)

    def _work(self, fields: Mapping[str, str]) -> Callable[[], None]:
        return lambda: self._service.engine.unload_adapter(fields["lora_name"])
