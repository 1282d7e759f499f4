"""Test that replicas refuse devices, factories and engines that do not fit, by name, and close what was made."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import pytest

from jspec import Engine, Replicas
from tests.support import engines, lettered, tiny
from tests.support.engines import byte_engine

BAD: tuple[tuple[Any, Any, dict[str, Any], str], ...] = (
    (byte_engine, 5, {}, "devices: expected 1 to 4, the number of cpu devices, got 5"),
    (byte_engine, 0, {}, "devices: expected 1 to 4, the number of cpu devices, got 0"),
    (byte_engine, [], {}, "devices: expected at least one device, got none"),
    (
        byte_engine,
        "cpu",
        {},
        r"devices: expected jax devices, such as jax.devices\(\), or their number, got 'cpu'",
    ),
    (byte_engine, [0, 1], {}, r"devices: expected jax devices, .* got \[0, 1\]"),
    (
        byte_engine,
        3,
        {"tensor_parallel": 2},
        "tensor_parallel: expected a divisor of 3, the number of devices, got 2",
    ),
    (
        byte_engine,
        2,
        {"tensor_parallel": 0},
        "tensor_parallel: expected a divisor of 2, the number of devices, got 0",
    ),
    ("factory", 2, {}, "factory: expected a function that makes an engine on a mesh, got 'factory'"),
    (lambda mesh: "engine", 2, {}, "factory: expected a function that returns an Engine, got 'engine'"),
    (
        lambda mesh: byte_engine(),
        2,
        {},
        "factory: expected an engine on .*, got one on the default device; pass the me",
    ),
)


@pytest.mark.parametrize(("factory", "devices", "options", "message"), BAD)
def test_replicas_refuse_wrong_arguments(factory: Any, devices: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Replicas(factory, devices, **options)


def test_replicas_refuse_a_device_twice() -> None:
    with pytest.raises(ValueError, match=f"devices: expected each device once, got {jax.devices()[1]} twice"):
        Replicas(byte_engine, [*jax.devices()[:2], jax.devices()[1]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_len=60), "equal max_len, got 64 for replica 0 and 60 for replica 1"),
        (dict(tokenizer=None), "equal tokenizer, got .* for replica 0 and None for replica 1"),
        (dict(eos_ids=(3,)), r"equal eos_ids, got \(\) for replica 0 and \(3,\) for replica 1"),
        (dict(seed=1), "equal seed, got 0 for replica 0 and 1 for replica 1"),
    ],
)
def test_replicas_refuse_engines_that_differ_and_close_them(changes: dict[str, Any], message: str) -> None:
    made: list[Engine] = []

    def factory(mesh: Any) -> Engine:
        made.append(byte_engine(mesh, **(changes if made else {})))
        return made[-1]

    with pytest.raises(ValueError, match=f"factory: expected engines with {message}"):
        Replicas(factory, 2)
    assert [engine.core.runner.state for engine in made] == [None, None]


@pytest.mark.parametrize("equal", [True, False])
def test_replicas_compare_tokenizers_by_the_texts_of_their_tokens(equal: bool) -> None:
    """The tokenizers are objects of one class, of which each engine has its own."""
    letters = [[b"a", b"b", b"c", b"d"], [b"a", b"b", b"c", b"d" if equal else b"e"]]

    def factory(mesh: Any) -> Engine:
        return byte_engine(mesh, tokenizer=lettered.Lettered(letters.pop()))

    with nullcontext() if equal else pytest.raises(ValueError, match="factory: expected engines with equal tokenizer"):
        Replicas(factory, 2).close()


def test_replicas_refuse_engines_with_other_models() -> None:
    def factory(mesh: Any) -> Engine:
        layers = 1 + (mesh.devices[0] != jax.devices()[0])
        return engines.make(tiny.model(256, layers=layers), mesh=mesh, **engines.BYTE_OPTIONS)

    with pytest.raises(ValueError, match="factory: expected engines with equal target"):
        Replicas(factory, 2)


def test_name_of_vllm_is_answered_with_ours() -> None:
    with pytest.raises(TypeError, match=r"expected jspec\.Replicas\(.*\), .* got data_parallel_size="):
        engines.make(tiny.model(256), data_parallel_size=2)  # type: ignore[call-arg]
