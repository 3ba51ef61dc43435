"""The examples in the docstrings of jaxcomm.communicator run as printed."""

import doctest
import importlib
import pathlib

import jax
import pytest

import jaxcomm

PACKAGE = pathlib.Path(jaxcomm.__file__).parent
FILES = [PACKAGE / "config.py", *sorted((PACKAGE / "communicator").rglob("*.py"))]
MODULES = [
    ".".join(("jaxcomm", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in FILES
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name, make_mesh):
    module = importlib.import_module(name)
    found = doctest.DocTestFinder().find(
        module,
        globs=vars(module)
        | {"jax": jax, "jaxcomm": jaxcomm, "mesh": make_mesh(data=2, context=4)},
    )
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test)
        jaxcomm.finalize()
    assert runner.failures == 0
    assert runner.tries > 0


def test_no_example_is_skipped_but_those_that_need_gpus():
    skipped = {path.name for path in FILES if "doctest: +SKIP" in path.read_text()}
    assert skipped <= {"symmetric_pool.py"}
