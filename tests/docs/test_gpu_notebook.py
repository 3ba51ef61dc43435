"""The notebook that needs a GPU: it keeps its outputs, and calls what exists."""

import functools
import re
from pathlib import Path

import nbformat
import pytest

import jaxcomm

PATH = Path(__file__).parents[2] / "docs" / "gpu.ipynb"


@pytest.fixture(scope="module")
def code_cells():
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_what_it_calls_is_there(code_cells):
    source = "\n".join(cell.source for cell in code_cells)
    names = set(re.findall(r"\bjaxcomm((?:\.\w+)+)\(", source))
    assert len(names) > 5
    for name in names:
        functools.reduce(getattr, name.strip(".").split("."), jaxcomm)
