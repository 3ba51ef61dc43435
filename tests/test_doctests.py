"""Every example in the docstrings of jaxcomm runs, and gives what it says."""

import dataclasses
import doctest
import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jaxcomm

PACKAGE = pathlib.Path(jaxcomm.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]
# They need a GPU, files of runs or of several processes, or print times.
SKIPPED = {
    "jaxcomm.communicator.symmetric_pool",
    "jaxcomm.diagnostics.checksums",
    "jaxcomm.diagnostics.compare_runs",
    "jaxcomm.diagnostics.flight_record",
    "jaxcomm.diagnostics.files",
}


def examples_of(name, **known):
    module = importlib.import_module(name)
    names = {"jax": jax, "jnp": jnp, "jaxcomm": jaxcomm, "dataclasses": dataclasses}
    return doctest.DocTestFinder().find(module, globs=vars(module) | names | known)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(make_mesh, name):
    wrong: list[str] = []
    ran = 0
    one_axis = "jaxcomm.collectives", "jaxcomm.primitives"
    one = name.startswith(one_axis)
    mesh = make_mesh(i=4) if one else make_mesh(data=2, context=4)
    for example in examples_of(name, mesh=mesh):
        skipped = any(doctest.SKIP in line.options for line in example.examples)
        assert not skipped or name in SKIPPED
        # Else it takes pytest's -v for its own, and writes into what is wrong.
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        with jax.set_mesh(mesh):
            runner.run(example, out=wrong.append)
        ran += runner.tries
        jaxcomm.finalize()
    assert not wrong, "".join(wrong)
    assert ran or name in SKIPPED
