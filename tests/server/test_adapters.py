"""Test that requests name adapters as their model, and the routes that load and unload them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from jspec.tools import serve
from tests.support import serving

HIDDEN = 16  # of the engine's target


def written(folder: Path, *, alpha: int = 1, inputs: int = HIDDEN) -> str:
    """Write an adapter of rank 1 of the gate projection of layer 0."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": alpha}))
    module = "base_model.model.model.layers.0.mlp.gate_proj"
    arrays = {f"{module}.lora_A.weight": np.ones((1, inputs)), f"{module}.lora_B.weight": np.ones((32, 1))}
    save_file({name: array.astype(np.float32) for name, array in arrays.items()}, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Running]:
    engine = serving.small_engine(2, 64, adapters=2, adapter_rank=2)
    engine.load_adapter("formal", written(tmp_path_factory.mktemp("adapters") / "formal"))
    with serving.running(engine, adapter_routes=True) as running:
        yield running


def post(server: serving.Running, path: str, **body: Any) -> tuple[int, Any]:
    with server.http() as http:
        answer = http.post(path, json=body)
        return answer.status_code, answer.json()


def test_model_names_of_adapters_choose_them_on_every_route(
    server: serving.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, chosen = server.service, []
    submit = service.calls.submitted
    monkeypatch.setattr(service.calls, "submitted", lambda asked: [chosen.append(asked[0].adapter), submit(asked)][1])
    messages = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
        "/v1/messages": {"messages": messages, "max_tokens": 2},
    }
    for path, body in bodies.items():
        for name in ("formal", serving.NAME):
            status, answer = post(server, path, model=name, **body)
            assert (status, answer["model"]) == (200, name)
    assert [adapter and adapter.name for adapter in chosen] == ["formal", None] * 4


def test_list_of_models_has_the_adapters_with_their_parent(server: serving.Running) -> None:
    entries = {model.id: model for model in server.client().models.list()}
    assert list(entries)[:2] == [serving.NAME, "formal"]
    assert entries["formal"].parent == serving.NAME and entries["formal"].root.endswith("formal")  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="model: expected tiny, formal, got 'informal'"):
        server.client().completions.create(model="informal", prompt="Hi")


def test_adapters_are_loaded_and_unloaded_by_requests(server: serving.Running, tmp_path: Path) -> None:
    path = written(tmp_path / "other", alpha=2)
    assert post(server, "/v1/load_lora_adapter", lora_name="other", lora_path=path) == (
        200,
        {"object": "adapter", "id": "other"},
    )
    assert post(server, "/v1/completions", model="other", prompt="Hi", max_tokens=1)[0] == 200
    assert post(server, "/v1/unload_lora_adapter", lora_name="other")[0] == 200
    assert post(server, "/v1/completions", model="other", prompt="Hi", max_tokens=1)[0] == 404


def test_wrong_requests_to_load_say_what_was_expected(server: serving.Running, tmp_path: Path) -> None:
    wide = written(tmp_path / "wide", inputs=HIDDEN + 1)
    for body, param, text in (
        ({"lora_name": "x"}, "lora_path", "expected a text, got nothing"),
        ({"lora_name": serving.NAME, "lora_path": wide}, "lora_name", "another name than the model's"),
        ({"lora_name": "formal", "lora_path": wide}, "lora_name", "expected a new one"),
        ({"lora_name": "x", "lora_path": wide}, "lora_path", r"outputs and inputs"),
        ({"lora_name": "x", "lora_path": str(tmp_path / "none")}, "lora_path", "no such folder"),
        ({"lora_name": "x", "lora_path": wide, "load_inplace": True}, "load_inplace", "unloaded first"),
    ):
        status, answer = post(server, "/v1/load_lora_adapter", **body)
        assert (status, answer["error"]["param"]) == (400, param) and text in answer["error"]["message"]
    assert post(server, "/v1/unload_lora_adapter", lora_name="x")[1]["error"]["param"] == "lora_name"


def test_routes_that_load_adapters_are_off_unless_the_settings_allow_them(tmp_path: Path) -> None:
    with serving.running() as server:
        assert post(server, "/v1/load_lora_adapter", lora_name="x", lora_path=str(tmp_path))[0] == 404


def test_options_of_adapters_are_checked_before_weights_are_read() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)

    def parsed(line: str) -> dict[str, str]:
        arguments = parser.parse_args(["--target", "t", *line.split()])
        adapters = serve.adapters_of(arguments)
        assert serve.engine_options(arguments).get("adapters", 0) == (arguments.adapters or len(adapters))
        return adapters

    assert parsed("--adapter a=x b=y --adapter c=z") == {"a": "x", "b": "y", "c": "z"}
    assert parsed("--adapters 2 --adapter-routes") == {}
    for line, text in {
        "--adapter a": "expected NAME=PATH",
        "--adapter t=x": "expected another name",
        "--adapter a=x a=y": "expected another name",
        "--adapter-routes": "expected --adapters N",
    }.items():
        with pytest.raises(ValueError, match=text):
            parsed(line)
