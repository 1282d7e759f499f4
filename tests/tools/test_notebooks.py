"""Test that notebooks run from top to bottom, define nothing, and contain the outputs of one run."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
GUIDES = {path.stem for path in NOTEBOOKS if path.stem >= "5"}  # these notebooks print tables; the others draw figures
TIMEOUT = 900  # most seconds that a cell may take; a training takes four minutes on two idle cores
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)

nbformat = pytest.importorskip("nbformat", reason='needs nbformat: pip install -e ".[notebooks]"')
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def test_notebooks_in_the_folder_include_guides_and_others() -> None:
    assert 0 < len(GUIDES) < len(NOTEBOOKS)


LONG = (  # the others are the quickest one with figures and the quickest one with tables
    "1_quickstart",
    "3_draft_methods",
    "4_trees_and_acceptance",
    "5_sampling_and_grammars",
    "7_serving",
    "8_train_a_head",
    "9_reinforcement_learning",
)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (path.stem in LONG), id=path.stem) for path in NOTEBOOKS],
)
def test_notebook_run_from_top_to_bottom_raises_nothing(path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason='needs nbclient: pip install -e ".[notebooks]"')
    pytest.importorskip("ipykernel", reason='needs ipykernel: pip install -e ".[notebooks]"')
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute(env=kernel_environment())  # a cell that raises ends the test with its traceback
    check_outputs(notebook, path.stem in GUIDES)


@each_notebook
def test_notebook_in_the_repository_has_the_outputs_of_one_run(path: Path) -> None:
    notebook = read(path)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    check_outputs(notebook, path.stem in GUIDES)
    assert notebook.metadata.kernelspec.name == "python3"


@each_notebook
def test_notebook_in_the_repository_defines_no_function_or_class(path: Path) -> None:
    for cell in code_cells(read(path)):
        found = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, DEFINITIONS)]
        assert not found, f"move this into jspec:\n{cell.source}"


def check_outputs(notebook: Any, is_guide: bool) -> None:
    """Check that outputs have no error, nothing on standard error, and a picture or, in a guide, a printed table."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    if is_guide:
        assert any("---" in output.text for output in outputs if output.get("name") == "stdout")
    else:
        assert any("image/png" in output.get("data", {}) for output in outputs)


def kernel_environment() -> dict[str, str]:
    """Return an environment in which notebooks run on the CPU, import this repository and contain pictures."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return environment | {
        "JAX_PLATFORMS": "cpu",
        "TQDM_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]
