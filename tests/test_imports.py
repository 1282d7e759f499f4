"""Who may import whom: the layers of the project, kept by reading the sources."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("jspec", "pallas_kernels", "convert")

BASE = "jax records tree config sharding models.config"
DEVICE = f"{BASE} pallas_kernels cache models sampling automata processors controls verify"
LOADING = "pretrained checkpoint"  # models and drafters read their own weights
STEP = f"{DEVICE} {LOADING} draft logprobs step"
HOST = "grammar matcher two_launch programs memory requests scheduler admission control_input choice recovery quantize"
# What a part may import besides itself, numpy, jaxtyping and the standard library:
# "jax" stands for jax, flax and orbax, "other" for any other library. A part that is not listed may import
# anything but FRONTS and convert.
ALLOWED = {
    "pallas_kernels": "jax",
    "records": "jax tree config",
    "tree": "jax records config",
    "config": "records tree",
    "sharding": "jax",
    "models.config": "",
    **dict.fromkeys(["cache", "sampling", "automata", "processors", "controls", "verify"], DEVICE),
    **dict.fromkeys(["models", "draft"], f"{DEVICE} {LOADING}"),
    "logprobs": f"{DEVICE} limits",
    **dict.fromkeys(["step", "memory"], f"{STEP} grammar"),
    "prefill": STEP,
    **dict.fromkeys(["two_launch", "programs"], f"{STEP} prefill grammar matcher two_launch"),
    "pages": "",
    "adaptive": "",
    "metrics": "",
    "limits": "",
    "stops": "",
    "token_logprobs": "",
    "generation_config": "",
    "json_schema": "",
    "byte_automaton": "other",
    "grammar": "other byte_automaton json_schema",
    "matcher": "other",
    "sampling_params": "generation_config limits",
    "requests": "grammar matcher metrics sampling_params token_logprobs",
    "scheduler": "pages requests metrics",
    "device": f"{STEP} {HOST}",
    "turns": "",
    "recovery": "jax",
    "prometheus": "metrics",
    "tokenizer": "other",
    "plot": "other requests metrics tokenizer",
    "quantize": "jax pallas_kernels",
    "checkpoint": "jax other models.config sharding pallas_kernels",
    "pretrained": "jax other models.config checkpoint convert quantize",
    "convert": "jax other models.config checkpoint quantize",
}
FRONTS = {"serve", "bench", "train"}
COMMAND_LINE = {"__main__", "bench"}  # may start the fronts; __main__ also convert


def part_of(module: str) -> str:
    """The unit that the rules speak of: "jspec.draft.eagle" belongs to "draft"."""
    top, *inner = module.split(".")
    if top in ("jax", "flax", "orbax"):
        return "jax"
    if top in ("pallas_kernels", "convert"):
        return top
    if top != "jspec":
        return "" if top in sys.stdlib_module_names or top in ("numpy", "jaxtyping") else "other"
    if inner[:2] in (["models", "config"], ["models", "fields"]):
        return "models.config"
    return inner[0] if inner else "jspec"


def imported(source: str) -> set[str]:
    """Modules that a source imports, anywhere in it; names imported from jspec count as its modules."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "relative imports hide the layer: write the whole name"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def violations(module: str, source: str) -> list[str]:
    """What the module imports and should not."""
    part, parts = part_of(module), {part_of(name) for name in imported(source)}
    if part in ALLOWED:
        wrong = parts - {"", part} - set(ALLOWED[part].split())
    else:
        fronts = set() if part in COMMAND_LINE else FRONTS
        wrong = parts & (fronts | ({"convert"} if part != "__main__" else set()))
    return [f"{module} ({part}) imports {name}" for name in sorted(wrong)]


def sources() -> dict[str, str]:
    files = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    modules = [".".join(path.relative_to(REPOSITORY).with_suffix("").parts) for path in files]
    return {m.removesuffix(".__init__"): path.read_text() for m, path in zip(modules, files, strict=True)}


def test_every_import_goes_down() -> None:
    files = sources()
    assert "jspec.tokenizer" in files
    assert [line for module, source in files.items() for line in violations(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.paged_attention", "import jspec"),
        ("pallas_kernels.paged_attention", "import flax, torch"),
        ("jspec.records", "from jspec import engine"),
        ("jspec.pages", "def late():\n    import jax.numpy as jnp"),
        ("jspec.scheduler", "from jspec.records import Report"),
        ("jspec.draft.eagle", "from jspec.engine import Engine"),
        ("jspec.models.config", "import jax"),
        ("jspec.device", "from jspec.engine import Engine"),
        ("jspec.engine", "import convert.hf"),
        ("jspec.engine", "from jspec.bench import report"),
        ("jspec.testing", "import jspec.serve"),
        ("convert.hf", "from jspec.models import decoder"),
    ],
)
def test_a_wrong_import_is_reported(module: str, source: str) -> None:
    """Negative controls."""
    assert violations(module, source)
