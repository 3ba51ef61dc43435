"""The notebook that needs a GPU: it keeps its outputs, and calls what exists."""

import functools
import re
from pathlib import Path

import nbformat

import jaxcomm

PATH = Path(__file__).parents[2] / "docs" / "gpu.ipynb"


def test_what_it_calls_is_there():
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    source = "\n".join(cells)
    names = set(re.findall(r"\bjaxcomm((?:\.\w+)+)\(", source))
    assert len(names) > 5
    for name in names:
        functools.reduce(getattr, name.strip(".").split("."), jaxcomm)
