"""Test that each of thousands of damaged checkpoints loads, or raises a short error that names the folder.

A case is a copy of a small checkpoint with one to three random faults. The seed is the case's number.
"""

from __future__ import annotations

import json
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import hub, orbax
from convert.fields import CheckpointError
from jspec import SamplingParams
from jspec.draft import auto
from jspec.engine.text.tokenizer import load_tokenizer
from jspec.tools.convert import main
from tests.support import folders, quantized_folders
from tests.support.folders import EAGLE, HEAD, TARGET
from tests.support.tokenizer_folders import CHATML

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("small_heap"),  # damage in a converted folder makes the loader collect garbage
    pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR|torch.quantize_per_tensor|TypedStorage)"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # raised in threads of orbax
]

QUICK, MANY, PARTS = 100, 10_000, 10
SECONDS = 30  # per case; a hang takes longer on any machine
REFUSALS = (ValueError, TypeError, NotImplementedError, FileNotFoundError)
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 97.5, 2**31, 10**7, 10**30, 1e400, -1e400, float("nan"), "", "llama", "x" * 3000,
    [], [None], [[]], [1, 2], ["a"], {}, {"a": {}}, {"rope_type": "llama3"}, {"0": 1}, "../../config.json",
    "\0", "\ud800",
]  # fmt: skip
SIZES = ("num_hidden_layers", "num_layers", "vocab_size", "hidden_size", "num_heads", "medusa_num_heads")


# ---- the undamaged checkpoints


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> list[Path]:
    """Write undamaged checkpoints of every kind in every file format, with a tokenizer and a generation_config.json."""
    root = tmp_path_factory.mktemp("originals")
    target = folders.write(root / "target", TARGET, folders.target_tensors())
    heads = {"eagle3": (HEAD, folders.head_tensors()), "eagle": (EAGLE, folders.eagle_tensors())}
    written = [folders.write(root / name, *content) for name, content in heads.items()]
    written.append(write_wrapped(root / "speculators"))
    written.append(folders.write(root / "medusa", {"medusa_num_heads": 3}, folders.medusa_tensors()))
    written.append(folders.write(root / "sharded", TARGET, folders.target_tensors(), shards=3))
    for name in ("fp8 by block", "compressed-tensors by row"):
        form = quantized_folders.FORMATS[name]
        written.append(quantized_folders.write(root / name, form, quantized_folders.quantised(form)[0]))
    for folder in (target, *written[:2]):
        write_tokenizer(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], "do_sample": True, "top_k": 5}))
    written += [convert(folder) for folder in (target, *written[:4], *written[-2:])]
    families = [shutil.copytree(file.parent, root / file.parent.name) for file in golden.glob("families/*/config.json")]
    return [target, *written, *torch_folders(root), *sorted(families)]


def write_wrapped(folder: Path) -> Path:
    layer = folders.without(HEAD, "architectures", "draft_vocab_size") | {"num_hidden_layers": 1}
    outer = {"speculators_model_type": "eagle3", "norm_before_residual": False, "draft_vocab_size": 10}
    return folders.write(folder, outer | {"transformer_layer_config": layer}, folders.head_tensors())


def convert(folder: Path) -> Path:
    assert main([str(folder), f"{folder}-converted"]) == 0
    return Path(f"{folder}-converted")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", *"helowrd ", "Ġ", "he", "ll"])}
    made = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l")], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "</s>", "unk_token": "<unk>", "extra_special_tokens": {}, "model_max_length": 64}
    (folder / "special_tokens_map.json").write_text(json.dumps(about))
    added = {"1": {"content": "</s>", "special": True, "normalized": False}}
    about |= {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def torch_folders(root: Path) -> list[Path]:
    """Write a target and an EAGLE-3 head as torch files; return no folders if torch is missing."""
    try:
        import torch
    except ImportError:
        return []
    made = []
    for name, config, tensors in (("target", TARGET, folders.target_tensors()), ("head", HEAD, folders.head_tensors())):
        folder = root / f"torch-{name}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        torch.save({key: torch.tensor(value) for key, value in tensors.items()}, folder / "pytorch_model.bin")
        made.append(folder)
    return made


# ---- faults


def change_json(folder: Path, draw: random.Random) -> None:
    """Replace, remove or add one value of a JSON file, at any depth."""
    file = draw.choice(sorted(folder.glob("*.json")))
    content = json.loads(file.read_text())
    change_value(content, draw)
    if file.name == orbax.MANIFEST and draw.random() < 0.2:
        content["file_sizes"] = orbax._file_sizes(folder / orbax.WEIGHTS)
    file.write_text(json.dumps(content))


def change_value(content: Any, draw: random.Random) -> None:
    node = content
    while children := [child for child in (node.values() if isinstance(node, dict) else node) if holds(child)]:
        if draw.random() < 0.5:
            break
        node = draw.choice(children)
    if not isinstance(node, dict):
        node[draw.randrange(len(node))] = draw.choice(ODD)
        return
    name = draw.choice(sorted(node))
    match draw.randrange(8):
        case 0:
            del node[name]
        case 1:
            node[draw.choice(SIZES)] = draw.choice(ODD)
        case 2:
            node[draw.choice(["rope_theta", "rope_scaling", "rope_parameters", "eagle_config"])] = draw.choice(ODD)
        case _:
            node[name] = draw.choice(ODD)


def holds(value: Any) -> bool:
    return isinstance(value, (dict, list)) and len(value) > 0


def damage_text(folder: Path, draw: random.Random) -> None:
    """Make a JSON file deeply nested, of another type, or not JSON at all."""
    file = draw.choice(sorted(folder.glob("*.json")))
    depth = draw.choice([20, 100, 900, 10_000, 100_000])
    texts = ["", "[]", "null", "5", "{", "\ufeff{}", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"]
    texts += ["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, f'{{"vocab_size": {"9" * depth}}}']
    file.write_bytes(draw.choice([*(text.encode() for text in texts), b"\xff\xfe\x00", bytes(100)]))


def damage_bytes(folder: Path, draw: random.Random) -> None:
    """Cut a file off, or overwrite, remove or insert some of its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    file = draw.choice(sorted(files, key=lambda path: (path.stat().st_size, str(path))))  # orbax names are random
    content = bytearray(file.read_bytes())
    at, size = draw.randrange(len(content) + 1), draw.choice([1, 1, 1, 8, 100])
    noise = draw.choice([bytes(size), b"\xff" * size, draw.randbytes(size)])
    match draw.randrange(4):
        case 0:
            content = content[:at]
        case 1:
            content[at : at + size] = noise[: len(content) - at]
        case 2:
            del content[at : at + size]
        case _:
            content[at:at] = noise
    file.write_bytes(content)
    manifest = folder / orbax.MANIFEST
    if manifest != file and manifest.is_file() and draw.random() < 0.7:  # makes the sizes in the manifest match
        about = json.loads(manifest.read_text())
        about["file_sizes"] = orbax._file_sizes(folder / orbax.WEIGHTS)
        manifest.write_text(json.dumps(about))


def change_header(folder: Path, draw: random.Random) -> None:
    """Change the header of a safetensors file: names, shapes, dtypes, offsets."""
    if not (files := sorted(folder.glob("*.safetensors"))):
        return change_json(folder, draw)
    file = draw.choice(files)
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = draw.choice(sorted(header))
    match draw.randrange(5):
        case 0:
            header[draw.choice(["9" * 5000, "²", "x" * 2000, "99999999.0.linear.weight", ""])] = header.pop(name)
        case 1:
            header[name]["dtype"] = draw.choice(["F64", "F16", "BF16", "I8", "U64", "BOOL", "F8_E4M3", "C64", "?"])
        case 2:
            header[name]["shape"] = draw.choice([[], [0], [2**40, 2**40], [-1], header[name]["shape"][::-1], "x"])
        case _:
            change_value(header, draw)
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])
    return None


def change_values(folder: Path, draw: random.Random) -> None:
    """Give a tensor of a safetensors file NaN, infinite or huge values, or another shape or dtype."""
    from safetensors.numpy import load_file, save_file

    if not (files := sorted(folder.glob("*.safetensors"))):
        return change_json(folder, draw)
    file = draw.choice(files)
    tensors = load_file(file)
    name = draw.choice(sorted(tensors))
    values = tensors[name]
    odd = [np.full(values.shape, value, np.float32) for value in (np.nan, np.inf, -np.inf)]
    odd += [values.astype(np.float64) * 1e300, values.astype(np.int64), values[:0], values[None]]
    odd += [values.reshape(-1), np.zeros((), np.float32), np.full(values.shape, 2**62)]
    tensors[name] = draw.choice(odd)
    save_file(tensors, file)
    return None


def odd_tensors(torch: Any) -> list[Any]:
    values = torch.ones(16, 16)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return [
        values.to_sparse(), values.to_sparse_csr(), nested, values.to("meta"), torch.ones(16, 16, dtype=torch.cfloat),
        torch.ones(16, 16, dtype=torch.cfloat).conj(), torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
        torch.zeros(1).expand(2**40), torch.zeros(1).expand(40, 16), values.to(torch.float8_e4m3fn), torch.zeros(()),
        torch.zeros(0), values.bool(), [values], {"a": values}, None, 5, "text", torch.nn.Parameter(values),
    ]  # fmt: skip


def change_torch(folder: Path, draw: random.Random) -> None:
    """Put a tensor of another kind, or no tensor, into a torch file."""
    file = folder / "pytorch_model.bin"
    if not file.is_file():
        return change_json(folder, draw)
    import torch

    try:
        state = dict(torch.load(file, weights_only=True))
    except Exception:  # an earlier fault has damaged this file
        return damage_text(folder, draw)
    name = draw.choice([*sorted(map(str, state)), 7, ("a", 1)])
    state[name] = draw.choice(odd_tensors(torch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(draw.choice([state, state, state, list(state.values()), {"state_dict": state}]), file)
    return None


def change_files(folder: Path, draw: random.Random) -> None:
    """Remove a file, put a folder in its place, or add a file of another checkpoint."""
    file = draw.choice(sorted(folder.iterdir()))
    match draw.randrange(4):
        case 0 | 1:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        case 2 if file.is_file():
            file.unlink()
            file.mkdir()
        case _:
            name = draw.choice(["model.safetensors.index.json", "pytorch_model.bin", "adapter_config.json", "a.gguf"])
            (folder / name).write_text('{"weight_map": {"a": "b.safetensors"}}')


Fault = Callable[[Path, random.Random], None]
FAULTS: list[Fault] = [change_json] * 4 + [damage_bytes] * 2 + [change_header] * 2
FAULTS += [damage_text, change_values, change_torch, change_files]


# ---- what came of it


def damaged(original: Path, folder: Path, case: int) -> None:
    """Write a copy of a checkpoint with one to three faults."""
    draw = random.Random(case)
    shutil.copytree(original, folder)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        try:
            draw.choice(FAULTS)(folder, draw)
        except Exception:  # any class: an earlier fault has left nothing for this fault
            continue


def outcome(folder: Path) -> str:
    """Load everything in a folder; return "loaded", "told" (a warning), "refused", or what is wrong with the error."""
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            load_all(folder)
            found = "told" if told else "loaded"
        except REFUSALS as error:
            found = fault_of_error(error, folder)
        except BaseException as error:  # catches panics of tokenizers too
            if isinstance(error, KeyboardInterrupt):
                raise
            found = f"{type(error).__name__}: {str(error)[:300]}"
    return found if time.perf_counter() - begin < SECONDS else f"took {time.perf_counter() - begin:.0f} s"


def load_all(folder: Path) -> None:
    auto.load_checkpoint(folder)
    hub.eos_ids(folder)
    if (folder / "generation_config.json").is_file():
        SamplingParams.from_generation_config(folder)
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None:
        tokenizer.encode("hello world")
        tokenizer.token_bytes()


def fault_of_error(error: Exception, folder: Path) -> str:
    """Return "refused" if an error is as promised, else what is wrong with the error."""
    message = str(error)
    if len(message) >= 500:
        return f"message of {len(message)} characters: {message[:200]}"
    if str(folder) not in message and not message.startswith("SamplingParams."):
        return f"no folder in: {type(error).__name__}: {message}"
    return "refused" if isinstance(error, CheckpointError) else f"refused as {type(error).__name__}"


def run(originals: list[Path], work: Path, cases: range) -> Counter[str]:
    """Count the outcomes of cases; fail with number and error of each case that neither loads nor is refused."""
    counts: Counter[str] = Counter()
    wrong = []
    for case in cases:
        folder = work / str(case)
        original = originals[case % len(originals)]
        damaged(original, folder, case)
        found = outcome(folder)
        counts[found.split(":")[0]] += 1
        if not found.startswith(("loaded", "told", "refused")):
            wrong.append(f"case {case} ({original.name}): {found}")
        shutil.rmtree(folder)
    print(f"{cases}: {dict(counts.most_common())}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    return counts


def test_load_undamaged_checkpoints_gives_neither_errors_nor_warnings(originals: list[Path]) -> None:
    """Control of the tests below: without a fault, everything loads."""
    assert {folder.name: outcome(folder) for folder in originals} == {folder.name: "loaded" for folder in originals}


def test_load_damaged_checkpoint_loads_or_raises_a_short_error_naming_the_folder(
    originals: list[Path], tmp_path: Path
) -> None:
    counts = run(originals, tmp_path, range(QUICK))
    assert counts["refused"] > QUICK // 3


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(PARTS))
def test_load_any_of_thousands_of_damaged_checkpoints_loads_or_raises_a_short_error(
    originals: list[Path], tmp_path: Path, part: int
) -> None:
    size = MANY // PARTS
    run(originals, tmp_path, range(part * size, (part + 1) * size))
