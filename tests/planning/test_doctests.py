"""The examples in the docstrings of planning run as printed."""

import dataclasses
import doctest
import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jaxcomm

PACKAGE = pathlib.Path(jaxcomm.__file__).parent
FILES = [PACKAGE / "machine.py", *sorted((PACKAGE / "planning").rglob("*.py"))]
MODULES = [
    ".".join(("jaxcomm", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in FILES
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name, make_mesh):
    module = importlib.import_module(name)
    known = {"jax": jax, "jnp": jnp, "jaxcomm": jaxcomm, "dataclasses": dataclasses}
    known["mesh"] = make_mesh(data=2, context=4)
    found = doctest.DocTestFinder().find(module, globs=vars(module) | known)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test)
        jaxcomm.finalize()
    assert runner.failures == 0
    assert runner.tries > 0


def test_no_example_is_skipped():
    assert [p.name for p in FILES if "doctest: +SKIP" in p.read_text()] == []
