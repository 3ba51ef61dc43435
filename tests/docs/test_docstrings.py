"""Every example in a docstring of jaxcomm runs and prints what it says.

Folders that need names of their own have a test of their own: those in `ELSEWHERE`.
"""

import dataclasses
import doctest
import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jaxcomm

PACKAGE = pathlib.Path(jaxcomm.__file__).parent
ELSEWHERE = {
    "collectives": "tests/primitives/test_examples.py",
    "primitives": "tests/primitives/test_examples.py",
    "communicator": "tests/communicator/test_doctests.py",
    "planning": "tests/planning/test_doctests.py",
    "compiled.py": "tests/primitives/test_examples.py",
}
# Its ring is one of eight.
MESHES = {"jaxcomm.attention.ring_attention": {"context": 8}}
# They print what a run left: nothing in a test.
SKIPPED = {"flight_record.py", "merge.py"}
FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
    and not {*path.relative_to(PACKAGE).parts} & ELSEWHERE.keys()
]
MODULES = [
    ".".join(("jaxcomm", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in FILES
    if path.name not in SKIPPED
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name, make_mesh):
    module = importlib.import_module(name)
    known = {"jax": jax, "jnp": jnp, "jaxcomm": jaxcomm, "dataclasses": dataclasses}
    mesh = make_mesh(**MESHES.get(name, {"data": 2, "context": 4}))
    known["mesh"] = mesh
    found = doctest.DocTestFinder().find(module, globs=vars(module) | known)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with jax.set_mesh(mesh):
        for test in found:
            runner.run(test)
    assert runner.failures == 0
    assert runner.tries > 0


def test_no_other_example_is_skipped():
    skipped = {path.name for path in FILES if "doctest: +SKIP" in path.read_text()}
    assert skipped == SKIPPED


def test_other_folders_have_a_test_of_their_own():
    root = pathlib.Path(__file__).parents[2]
    assert [path for path in ELSEWHERE.values() if not (root / path).exists()] == []
