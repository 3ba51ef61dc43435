"""The way of a call is short: how many files it passes from user to custom call."""

import pathlib
import sys

import jax
import pytest

import jaxcomm

PACKAGE = pathlib.Path(jaxcomm.__file__).parent
MOST_FILES = 8


@pytest.fixture
def files_of():
    """Returns ``files_of(function)``: the package's files whose functions it calls."""

    def run(function):
        found = set()

        def on_call(frame, event, argument):
            path = frame.f_code.co_filename
            if event == "call" and path.startswith(f"{PACKAGE}/"):
                found.add(str(pathlib.Path(path).relative_to(PACKAGE)))

        outer = sys.getprofile()
        sys.setprofile(on_call)
        try:
            function()
        finally:
            sys.setprofile(outer)
        return found

    return run


def test_psum_is_lowered_by_few_files(make_mesh, psum_over, files_of):
    mesh = make_mesh(i=4)
    jaxcomm.init(mesh)
    program, x = psum_over(mesh), jax.numpy.arange(4.0)
    files = files_of(lambda: program.lower(x))
    assert {"collectives/all_reduce.py", "primitives/lowering.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)
