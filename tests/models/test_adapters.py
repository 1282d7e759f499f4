"""Compare targets with low-rank adapters with PEFT's recorded models; wrong readings must differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.huggingface import unselected
from jspec import Model
from jspec.models import adapter_files, adapters
from jspec.models.adapter_files import read_adapter
from jspec.models.parts.adapter_tables import AdapterTables
from jspec.models.weights.tensor_parallel import mesh_of, place
from tests.support import tiny
from tests.support.low_rank import merged
from tests.support.recordings import most_likely, recording, run_texts

pytestmark = pytest.mark.once

RECORDED = (
    *("llama/all", "llama/rslora", "llama/patterns", "phi3/all", "gemma3_text/all", "qwen3_5_text/all"),
    *("mixtral/attention", "gpt_oss/attention", "deepseek_v3/attention", "lfm2/all"),
)
TOLERANCE = 2e-4  # float32 sums in another order, at logits up to 20
LEAST = 1e-2  # a wrong reading moves some logit by more
RANK = 6
GOLDEN = Path(__file__).parent.parent / "data" / "golden"


@pytest.fixture
def folder(golden: Path) -> Path:
    return golden / "adapters"


def adapted(golden: Path, name: str, change: Callable[[AdapterTables], AdapterTables] = lambda tables: tables) -> Model:
    """Return the target of a recorded adapter, whose rows all have the adapter, in the second of three tables."""
    target = tiny.load_target(golden / "families" / name.partition("/")[0])
    tables = adapters.empty_tables(target, 3, RANK)
    table = adapters.as_tables(read_adapter(golden / "adapters" / name), target, RANK)
    tables = change(tables.with_table(1, adapters.on_devices(table, target)))
    return replace(target, layers=tables.adapted(target.layers, jnp.full((1, 1), 2)))


def error(model: Model, golden: Path, name: str) -> float:
    """Return the largest difference from the recorded logits of the prompt's last token."""
    data, key = recording(golden / "adapters" / "expect.npz"), name.replace("/", ".")
    logits = run_texts(model, jnp.asarray(data["prompt"])[None]).logits[0, -1]
    return float(np.abs(logits - data[f"{key}.logits"]).max())


@pytest.mark.parametrize("name", RECORDED)
def test_logits_and_greedy_tokens_are_those_of_peft(name: str, golden: Path) -> None:
    model, data = adapted(golden, name), recording(golden / "adapters" / "expect.npz")
    assert error(model, golden, name) < TOLERANCE
    tokens = data[f"{name.replace('/', '.')}.tokens"].tolist()
    assert most_likely(model, [data["prompt"].tolist()], [tokens]) == [tokens]


FAMILIES = sorted(folder.name for folder in (GOLDEN / "families").iterdir() if folder.name != "quantized")
FEW = ("deepseek_v3", "gemma4_e2b", "nemotron_h")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FEW else pytest.mark.long) for name in FAMILIES]
)
def test_adapters_of_all_weights_have_the_logits_of_a_model_into_which_they_are_merged(family: str) -> None:
    target = tiny.load_target(GOLDEN / "families" / family)
    adapter = tiny.uno_adapter(target)
    table = adapters.as_tables(adapter, target, RANK)
    tables = adapters.empty_tables(target, 2, RANK).with_table(1, adapters.on_devices(table, target))
    adapted = replace(target, layers=tables.adapted(target.layers, jnp.full((1, 1), 2)))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, target.config.vocab_size, (1, 12)), jnp.int32)
    logits = [np.asarray(run_texts(model, ids).logits) for model in (adapted, merged(target, adapter), target)]
    np.testing.assert_allclose(logits[0], logits[1], atol=TOLERANCE)
    assert np.abs(logits[0] - logits[2]).max() > 1


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in (*FEW, "llama", "phi3", "qwen3_5_text")])
@pytest.mark.parametrize("devices", [1, 2])
def test_rows_of_b_have_zeros_in_the_columns_of_other_modules(family: str, devices: int) -> None:
    """The kernel of products with adapters reads no other columns, of the rows that a device has."""
    target = tiny.load_target(GOLDEN / "families" / family)
    target = target if devices == 1 else place(target, mesh_of(devices))
    table = adapters.as_tables(tiny.uno_adapter(target, rank=RANK), target, RANK)
    fused = 0
    for layer, weights in zip(
        adapters.empty_tables(target, 1, RANK).layers, adapters.on_devices(table, target), strict=True
    ):
        for name, weight in layer.items():
            ends = np.cumsum(weight.modules).tolist()
            for shard in weights[name].b.addressable_shards:
                b = np.asarray(shard.data)
                for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                    rows, columns = b[start:end], slice(index * RANK, (index + 1) * RANK)
                    assert rows[:, columns].all() and not np.delete(rows, columns, axis=1).any()
                assert sum(weight.modules) in (0, len(b))
            fused += len(weight.modules) > 1
    assert (fused > 0) == (family != "phi3")


def test_rows_without_an_adapter_have_the_targets_logits(golden: Path) -> None:
    """The tables hold an adapter, and the rows choose none, or one of the empty tables."""
    data, model = recording(golden / "adapters" / "expect.npz"), adapted(golden, "llama/all")
    tokens = data["llama.none.tokens"].tolist()
    for table in (0, 1, 3):
        layers = [replace(layer, **{n: _choosing(layer, n, table) for n in ("qkv", "o")}) for layer in model.layers]
        layers = [replace(layer, **{n: _choosing(layer, n, table) for n in ("gate_up", "down")}) for layer in layers]
        of_table = replace(model, layers=layers)
        assert most_likely(of_table, [data["prompt"].tolist()], [tokens]) == [tokens]


def _choosing(layer: Any, name: str, table: int) -> Any:
    return replace(getattr(layer, name), table=jnp.full((1, 1), table))


def _swapped(tables: AdapterTables) -> AdapterTables:
    """Exchange the rows of A of queries and keys in the second table."""
    queries = jnp.arange(RANK, 2 * RANK)
    keys = queries + 3 * RANK  # after all tables of queries

    def swapped(pair: Any) -> Any:
        return replace(pair, a=pair.a.at[queries].set(pair.a[keys]).at[keys].set(pair.a[queries]))

    return AdapterTables([{**layer, "qkv": swapped(layer["qkv"])} for layer in tables.layers])


def test_wrong_readings_have_other_logits(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(adapted(golden, "llama/all", _swapped), golden, "llama/all") > LEAST
    with monkeypatch.context() as patch:  # scale of r instead of sqrt(r)
        patch.setattr(adapter_files.math, "sqrt", float)
        assert error(adapted(golden, "llama/rslora"), golden, "llama/rslora") > LEAST
    with monkeypatch.context() as patch:  # alpha of all modules
        of_module = adapter_files._of_module
        patch.setattr(
            adapter_files, "_of_module", lambda f, o, *a: of_module(f, o, *a) if o == "rank_pattern" else None
        )
        assert error(adapted(golden, "llama/patterns"), golden, "llama/patterns") > LEAST
    with monkeypatch.context() as patch:  # rows of queries with gates in the order of the file
        patch.setattr(adapters, "unselected", lambda row: (unselected(row)[0], None))
        adapters.adaptable_weights.cache_clear()
        assert error(adapted(golden, "qwen3_5_text/all"), golden, "qwen3_5_text/all") > LEAST
    adapters.adaptable_weights.cache_clear()


@pytest.mark.parametrize("devices", [1, 2])
def test_bytes_of_tables_are_those_of_their_arrays_on_each_device(devices: int) -> None:
    """The two devices of this target have copies of the one head of keys and values."""
    target = tiny.load_target(GOLDEN / "families" / "qwen3_5_text")
    placed = target if devices == 1 else place(target, mesh_of(devices))
    tables = adapters.empty_tables(placed, 3, RANK)
    arrays = jax.tree.leaves(tables)
    for device in jax.devices()[:devices]:
        held = sum(
            shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device
        )
        assert held == adapters.table_bytes(placed, 3, RANK)


def copied(folder: Path, to: Path, config: dict[str, Any] | None = None, **tensors: np.ndarray | None) -> Path:
    """Write a copy of the adapter llama/all with other fields of the config and other tensors; None: left out."""
    source = folder / "llama" / "all"
    fields = json.loads((source / "adapter_config.json").read_text()) | (config or {})
    (to / "adapter_config.json").write_text(json.dumps(fields))
    arrays = {**load_file(source / "adapter_model.safetensors"), **tensors}
    save_file({name: array for name, array in arrays.items() if array is not None}, to / "adapter_model.safetensors")
    return to


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type"),
        ({"use_dora": True}, {}, "use_dora"),
        ({"bias": "all"}, {}, "bias"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"target_parameters": ["experts.down_proj"]}, {}, "target_parameters"),
        ({"r": 3}, {}, "expected lora_A"),
        ({}, {Q.format("A"): None}, "lora_A and lora_B of each module"),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights: expected an adapter of unchanged weights"),
        ({"rank_pattern": {"(q": 1}}, {}, "rank_pattern: expected regular expressions as keys"),
        ({"alpha_pattern": {"q_proj": "x"}}, {}, "q_proj: expected a number"),
        ({}, {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 128), np.float32)}, "embeddings"),
    ],
)
def test_adapter_that_would_be_read_wrongly_is_refused(
    folder: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], text: str
) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=text):
        read_adapter(copied(folder, tmp_path, config, **tensors))


def test_adapter_that_does_not_fit_the_target_is_refused(folder: Path, tmp_path: Path, golden: Path) -> None:
    target = tiny.load_target(golden / "families" / "llama")
    file = read_adapter(folder / "llama" / "all")
    with pytest.raises(ValueError, match="expected an adapter of rank 3 at most, got 4; raise adapter_rank"):
        adapters.as_tables(file, target, 3)
    head = {"base_model.model.lm_head.lora_A.weight": np.ones((4, 32), np.float32)}
    head |= {"base_model.model.lm_head.lora_B.weight": np.ones((128, 4), np.float32)}
    with pytest.raises(ValueError, match=r"expected adapters of down_proj, gate_proj, .* got lm_head"):
        adapters.as_tables(read_adapter(copied(folder, tmp_path, **head)), target, RANK)
    with pytest.raises(ValueError, match=r"q_proj: expected \(64, 32\) outputs and inputs"):
        adapters.as_tables(
            read_adapter(copied(folder, tmp_path, **{Q.format("A"): np.ones((4, 16), np.float32)})), target, RANK
        )
    for part, values in {"A": np.full((4, 32), np.nan), "B": np.full((64, 4), 3e38)}.items():
        changed = {Q.format(part): values.astype(np.float32)}
        with pytest.raises(ValueError, match="q_proj: expected finite values in float32, got NaN or infinity"):
            adapters.as_tables(read_adapter(copied(folder, tmp_path, **changed)), target, RANK)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json and adapter_model\.safetensors"):
        read_adapter(golden / "families" / "llama")


def test_weights_of_tensors_that_have_other_rows_too_have_no_adapters(golden: Path) -> None:
    """The steps of Mamba 2 are rows of its input projection, which are no part of the adaptable weight."""
    layers = adapters.adaptable_weights(tiny.load_target(golden / "families" / "nemotron_h").config)
    assert [sorted(layer) for layer in layers] == [["o"], [], ["o"], ["o", "qkv"], []]


def test_equal_adapters_have_equal_digests(folder: Path, tmp_path: Path) -> None:
    """The digest depends on the scale too."""
    digests = [read_adapter(path).digest for path in (folder / "llama" / "all", copied(folder, tmp_path))]
    assert digests[0] == digests[1] != read_adapter(copied(folder, tmp_path, {"lora_alpha": 4})).digest
