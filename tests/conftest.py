"""Set up every test run: the platform, runtime checks of array types, and the folder of shared data."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
NO_SYMBOLS = "Failed to materialize symbols"
MOST_KEPT = 2 << 30  # bytes
UNFINISHED = "unfinished"  # file that exists while a run fills the folder of compiled programs
OPTIONAL = {  # packages of extras that test files import
    *("anthropic", "beartype", "httpx", "hypothesis", "llguidance", "matplotlib", "nbclient", "nbformat", "openai"),
    *("optax", "outlines_core", "scipy", "starlette", "torch", "uvicorn", "websockets"),
}
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
    if any(mark in wanted for mark in DEVICE_MARKS):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers share the GPU
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        flags += cpu_flags(is_timed="timing" in wanted)
    gc.set_threshold(
        100_000, 20, 50
    )  # garbage collection visits all that jax has traced, which takes a twentieth of the run's time
    # Hypothesis tries the same examples in every run; --hypothesis-profile=default draws others.
    hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("repeatable")
    if "XDG_CACHE_HOME" not in os.environ:  # workers, and runs within tests, inherit it
        folder = kept_programs()
        os.environ["XDG_CACHE_HOME"] = str(folder)
        config.add_cleanup(lambda: (folder / UNFINISHED).unlink(missing_ok=True))
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
    register_costs(config)
    if config.getoption("--typecheck"):
        from jaxtyping import install_import_hook

        from tests.support import typecheck

        # A conftest.py of a folder on the command line is imported before this.
        early = {name.split(".")[0] for name in sys.modules} & set(PACKAGES)
        if early:
            raise pytest.UsageError(f"--typecheck: expected no conftest.py to import {', '.join(early)}: not checked")
        install_import_hook(PACKAGES, f"{typecheck.__name__}.arrays")


def register_costs(config: pytest.Config) -> None:
    """Count what each test file costs; only the default run has budgets."""
    from tests.support.budgets import BUDGETS, USUAL
    from tests.support.costs import Costs

    options = config.getini("addopts")
    is_default = "-m" in options and config.getoption("-m") == options[options.index("-m") + 1]
    file = REPOSITORY / ".pytest_cache" / "costs.txt"
    config.pluginmanager.register(Costs(file, BUDGETS if is_default else None, USUAL))


def kept_programs() -> Path:
    """Return the folder that keeps compiled programs between runs; workers share it.

    A program is found by its text, the version of jaxlib, XLA's flags and the processor. The folder is emptied first if
    it is large, or if a run did not come to its end: jax does not replace a file of which only a part was written.
    """
    folder = REPOSITORY / ".pytest_cache" / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    files = list((folder / "jspec").rglob("*-cache"))
    if (folder / UNFINISHED).exists() or sum(file.stat().st_size for file in files) > MOST_KEPT:
        for file in files:
            file.unlink(missing_ok=True)
    (folder / UNFINISHED).touch()
    return folder


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return OptionalModule.from_parent(parent, path=module_path)


class OptionalModule(pytest.Module):
    """A test file, which is one skipped test if it imports a package of an extra that is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            _ = self.obj  # imports the file
        except self.CollectError as error:
            package = missing_package(error)
            if package is None:
                raise
            reason = f'needs the package {package}: pip install -e ".[test]"'
            return [pytest.Function.from_parent(self, name=f"needs_{package}", callobj=lambda: pytest.skip(reason))]
        return super().collect()


def missing_package(error: BaseException | None) -> str | None:
    """Return the package of `OPTIONAL` whose absence caused an error; None: it has another cause."""
    while error is not None:
        package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in OPTIONAL:
            return package
        error = error.__cause__ or error.__context__
    return None


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip a test that failed because XLA cannot compile float16 for this processor, which float8 needs too."""
    report: Any = yield
    if report.failed and call.excinfo and NO_SYMBOLS in str(call.excinfo.value) and not compiles_float16():
        file, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (file, line, "Skipped: XLA compiles no float16 and float8 for a processor without F16C")
    return report


def compiles_float16() -> bool:
    """Return whether XLA can convert to float16; for an x86 processor without F16C it has no function that rounds."""
    if "xla_cpu_max_isa=SSE4_2" in os.environ.get("XLA_FLAGS", ""):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return flags is None or "f16c" in flags.group(1).split()


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

        if engines := sys.modules.get("tests.support.engines"):
            engines.forget_programs()
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
