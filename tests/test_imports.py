"""Test the import rule on the sources: a file imports only its own room and rooms on lower floors."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("jspec", "pallas_kernels", "convert")

FLOORS = (  # from the lowest floor up; rooms on one floor do not import each other
    ("pallas_kernels",),
    ("jspec.core", "jspec.distributed", "convert"),
    ("jspec.models", "jspec.sampling"),
    ("jspec.draft", "jspec.verify"),
    ("jspec.step",),
    ("jspec.engine",),
    ("jspec.server", "jspec.train"),
    ("jspec.rollouts",),
    ("jspec.tools",),
)
SUB_FLOORS = {  # of packages that are divided, from the lowest floor up
    "jspec.server": (
        ("http", "reading", "prefix_router"),
        ("tool_calls",),
        ("ask",),
        ("routes",),
        ("app",),
        ("run", "ray_app"),
    ),
    "jspec.engine": (("text", "grammar"), ("request",), ("schedule", "reading"), ("input",), ("run",), ("callers",)),
    "jspec.draft": (
        ("base", "best_nodes", "head_config", "published"),
        ("draft_vocab", "elsewhere", "expand_tree", "head_pair", "matches", "match_rates"),
        ("prediction",),
        ("lookup", "eagle_head", "dflash_head", "gemma4_assistant_head", "expand_block", "pretrained"),
        ("dspark_head", "dflash2_head", "newest_state"),
        ("formats",),
        ("ngram", "suffix", "draft_model", "medusa", "uno", "eagle", "dflash", "gemma4_assistant"),
        ("mtp", "peagle", "dspark", "dflash2", "beside"),
        ("auto",),
        ("named", "verifier", "choice"),
    ),
    "jspec.models": (
        ("parts",),
        ("mixers", "mlps"),
        ("config",),
        ("weights",),
        ("families",),
        ("load", "block", "kv_cache", "adapter_files"),
        ("decoder",),
        ("deterministic", "exchange", "adapters"),
    ),
    "pallas_kernels": (("dispatch",), ("layers",), ("attention", "recurrent", "sampling", "state")),
    "pallas_kernels.layers": (
        ("shard", "adapted", "row_by_row", "hopper"),
        ("weights",),
        ("quantize_rows", "partial_sums"),
        ("packed", "residual_norm"),
        ("dense", "norm_columns"),
        ("experts", "low_rank"),
        ("products", "formats"),
        ("split_matmul", "gated_matmul"),
    ),
}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FRONT = "jspec.tools"  # the room of the public names and of the command lines: jspec/*.py and convert/__main__.py
JAX = {"jax", "flax", "orbax"}
HOST = "jspec.engine"  # only one file of this room imports jax
HOST_JAX = "jspec.engine.run.model_runner"
ALONE = "jspec.engine.grammar.regex_dfa"  # runs as a script in a process of its own
KERNEL_LIBRARIES = {"jax", "numpy", "jaxtyping"}


def room_of(module: str) -> str:
    """Return the room of a module of this repository, or "" for other modules."""
    top, *inner = module.split(".")
    if top == "jspec":
        room = f"jspec.{inner[0]}" if inner else FRONT
        return room if room in FLOOR_OF else FRONT
    if top == "convert":
        return FRONT if inner == ["__main__"] else "convert"
    return top if top in PACKAGES else ""


def part_of(module: str, package: str) -> str:
    """Return the part of a divided package to which a module belongs, or "" for other modules."""
    return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else ""


def is_upward(module: str, name: str, package: str) -> bool:
    """Return whether two modules are in different parts of a divided package, of which the second is not below."""
    parts = part_of(module, package), part_of(name, package)
    floors = [floor for part in parts for floor, names in enumerate(SUB_FLOORS[package]) if part in names]
    return parts[0] != parts[1] and len(floors) == 2 and floors[0] <= floors[1]


def imported(source: str) -> set[str]:
    """Return the modules imported anywhere in a source; a name imported from a package counts as a module."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "relative imports hide the room: write the whole name"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def is_wrong(module: str, name: str) -> bool:
    """Return whether the rule forbids a module of this repository to import a name."""
    room, other, top = room_of(module), room_of(name), name.split(".")[0]
    if module == ALONE and other:
        return True
    if other and other != room:
        return FLOOR_OF[other] >= FLOOR_OF[room]
    if other:
        return any(is_upward(module, name, package) for package in SUB_FLOORS)
    if room == "pallas_kernels":
        return top not in KERNEL_LIBRARIES and top not in sys.stdlib_module_names
    return room == HOST and top in JAX and module != HOST_JAX


def violations(module: str, source: str) -> list[str]:
    """Return a sentence for each import of a module that the rule forbids."""
    names = sorted(imported(source))
    return [f"{module} imports {name}" for name in names if is_wrong(module, name)]


def sources() -> dict[str, str]:
    files = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    modules = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in files]
    return {m.removesuffix(".__init__"): path.read_text() for m, path in zip(modules, files, strict=True)}


def test_imports_of_every_file_are_from_its_own_room_or_lower_floors() -> None:
    files = sources()
    assert "jspec.engine.text.tokenizer" in files
    assert [line for module, source in files.items() for line in violations(module, source)] == []


@pytest.mark.parametrize("package", SUB_FLOORS)
def test_each_part_of_a_divided_package_has_one_floor(package: str) -> None:
    listed = [part for parts in SUB_FLOORS[package] for part in parts]
    assert sorted(listed) == sorted({part for module in sources() if (part := part_of(module, package))})


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.attention.paged_attention", "import jspec"),
        ("pallas_kernels.attention.paged_attention", "import torch"),
        ("convert.huggingface", "from jspec.models import decoder"),
        ("jspec.core.records", "from jspec import engine"),
        ("jspec.models.config.decoder_config", "from jspec.sampling import sampler"),
        ("jspec.draft.eagle", "from jspec.engine.callers.api import Engine"),
        ("jspec.draft.eagle", "from jspec.verify import rules"),
        ("jspec.step.decode", "def late():\n    from jspec.engine import scheduler"),
        ("jspec.models.mixers.gqa", "from jspec.models.config.layer_config import LayerConfig"),
        ("jspec.draft.formats.eagle_formats", "from jspec.draft.eagle import Eagle3"),
        ("jspec.engine.schedule.page_pool", "def late():\n    import jax.numpy as jnp"),
        ("jspec.engine.schedule.scheduler", "import jspec"),
        ("jspec.engine.run.core", "from jspec.tools.bench import results"),
        ("jspec.engine.grammar.regex_dfa", "from jspec.engine.grammar import json_schema"),
        ("jspec.engine.schedule.scheduler", "from jspec.engine.run import core"),
        ("jspec.engine.text.tokenizer", "from jspec.engine.grammar.json_schema import parse"),
        ("pallas_kernels.layers.weights", "from pallas_kernels.layers.packed import int4"),
        ("pallas_kernels.layers.packed.int4_kernel", "from pallas_kernels.layers import products"),
        (
            "pallas_kernels.layers.dense.split_kernel",
            "def late():\n    from pallas_kernels.layers.experts import mxfp4",
        ),
        ("pallas_kernels.layers.products", "from pallas_kernels.layers.formats import quantize"),
        ("pallas_kernels.layers.shard", "from pallas_kernels.attention import ptx"),
    ],
)
def test_import_violations_of_a_forbidden_import_are_not_empty(module: str, source: str) -> None:
    """Negative controls of the import rule."""
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("jspec.engine.run.model_runner", "import jax"),
        ("jspec.engine.run.core", "from jspec.engine.grammar import json_schema"),
        ("jspec.step.decode", "from jspec.verify import rules"),
        ("jspec.testing", "from jspec.tools import testing"),
        ("convert.__main__", "from jspec.tools import convert"),
        ("pallas_kernels.layers.experts.expert_cta", "from pallas_kernels.layers.packed import packed_cta"),
    ],
)
def test_import_violations_of_an_allowed_import_are_empty(module: str, source: str) -> None:
    assert violations(module, source) == []


def repeated_classes(files: dict[str, str]) -> list[str]:
    """Return the class names that stand in several places, with the files."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def test_class_names_stand_once_in_the_repository() -> None:
    tests = {str(path): path.read_text() for path in (REPOSITORY / "tests").rglob("*.py")}
    assert repeated_classes(sources() | tests) == []
    assert repeated_classes({"a": "class Tiles: ...", "b": "def f():\n    class Tiles: ..."}) == ["Tiles: a, b"]
