"""Set up every test run: the platform, runtime checks of array types, and the folder of shared data."""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("JSPEC_SHARED", REPOSITORY.parent / "shared"))
PACKAGES = ["jspec", "pallas_kernels", "convert"]
DEVICE_MARKS = ("gpu", "h200")
DEVICES = 4  # of which all tests but those of several devices use the first
MEMORY_MAPS = Path("/proc/self/maps")
MANY_MAPS = 20_000
QUICK_TO_COMPILE = (  # compilation for the CPU takes nearly all of a run's time; these flags make it faster
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--typecheck", action="store_true", help="check array shapes and dtypes at run time")


def pytest_configure(config: pytest.Config) -> None:
    """Set the platform and XLA's flags before anything imports jax or our packages."""
    wanted = re.findall(r"\w+", re.sub(r"\bnot \w+", "", config.getoption("-m") or ""))
    flags: list[str] = []
    if not any(mark in wanted for mark in DEVICE_MARKS):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        flags += cpu_flags(is_timed="timing" in wanted)
    gc.set_threshold(
        100_000, 20, 50
    )  # garbage collection visits all that jax has traced, which takes a twentieth of the run's time
    # Hypothesis tries the same examples in every run; --hypothesis-profile=default draws others.
    hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("repeatable")
    # Compiled programs are kept for this run alone; its workers share them.
    os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="jspec-tests-"))
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
    if config.getoption("--typecheck"):
        from jaxtyping import install_import_hook

        from tests.support import typecheck

        # A conftest.py of a folder on the command line is imported before this.
        early = {name.split(".")[0] for name in sys.modules} & set(PACKAGES)
        if early:
            raise pytest.UsageError(f"--typecheck: expected no conftest.py to import {', '.join(early)}: not checked")
        install_import_hook(PACKAGES, f"{typecheck.__name__}.arrays")


def cpu_flags(*, is_timed: bool) -> list[str]:
    """Return XLA flags that divide the CPU into devices and switch off slow compiler passes.

    In timed runs, only passes that crash the compiler are switched off.
    """
    flags = [] if is_timed else list(QUICK_TO_COMPILE)
    flags.append(f"--xla_force_host_platform_device_count={DEVICES}")
    if metadata.version("jaxlib") == "0.10.2":
        # With these fusions broadcasts of rank 7 and more crash the compiler (jax issue 39257).
        flags.append("--xla_cpu_experimental_ynn_fusion_type=")
        # Fusion emitters take a third of the compiler's time; later versions cannot switch them off.
        flags += [] if is_timed else ["--xla_cpu_use_fusion_emitters=false"]
    return flags


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that two workers that share the files end at about equal times."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_report_header(config: pytest.Config) -> str:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "flax"))
    checked = config.getoption("--typecheck")
    platforms = os.environ.get("JAX_PLATFORMS", "as jax finds")
    return f"{versions}; platforms: {platforms}; array types {'checked' if checked else 'not checked'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped for each reason."""
    reports = terminalreporter.stats.get("skipped", [])
    counts = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marks = {mark.name for mark in item.iter_markers()} & set(DEVICE_MARKS)
    if not marks:
        return
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        pytest.skip(f"needs a GPU, this run has {device.device_kind}: run with -m {min(marks)} where one is")
    if "h200" in marks and "H200" not in device.device_kind:
        pytest.skip(f"holds on an H200, this is {device.device_kind}")


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Free compiled programs after a file of tests if this process has many memory maps."""
    yield
    free_programs(MANY_MAPS)


def free_programs(most_maps: int) -> None:
    """Free the compiled programs that nothing uses any more if this process has more memory maps than `most_maps`.

    A program compiled for the CPU holds dozens. Linux allows a process 65,530; jax crashes when it needs one more.
    """
    if MEMORY_MAPS.exists() and MEMORY_MAPS.read_bytes().count(b"\n") > most_maps:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """Exclude what earlier tests left from garbage collection, which visits all of it at each `gc.collect`."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def runs_long() -> Iterator[None]:
    """Compile with more optimisation than `cpu_flags` allows, where engines run longer than they compile."""
    from jspec.step.program import Program

    options: dict[str, Any] = {"xla_backend_optimization_level": 1}
    if "--xla_cpu_use_fusion_emitters=false" in os.environ["XLA_FLAGS"]:
        options["xla_cpu_use_fusion_emitters"] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "compiler_options", options)
        yield


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Return a list that collects the names of jax's traces, lowerings and compilations while the test runs."""
    import jax

    seen: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if "/compile/" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Return the folder with recordings of the drafting methods' own code."""
    return REPOSITORY / "tests" / "data" / "golden"


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder with small real models, tokenizers, prompts and text."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("needs outside data: see 'Skipped tests' in tests/README.md")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder of a small tokenizer, by its kind in `tokenizer_folders.KINDS`."""
    from tests.support import tokenizer_folders

    parent = tmp_path_factory.mktemp("tokenizers")

    def folder(kind: str) -> Path:
        made = parent / kind
        return made if made.is_dir() else tokenizer_folders.write(made, kind)

    return folder
