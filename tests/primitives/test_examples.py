"""Every example in the docstrings of collectives runs, and gives what it says."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
import jaxcomm.collectives
import jaxcomm.primitives

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (jaxcomm.collectives, jaxcomm.primitives)
    for module in pkgutil.iter_modules(package.__path__)
]
MODULES += ["jaxcomm.diagnostics.compiled", "jaxcomm.communicator.replica_groups"]
# Public functions without an example: the same as their twins' in jax.lax.
WITHOUT = {"ragged_all_to_all"}


def examples_of(name):
    names = {"jax": jax, "jnp": jnp, "jaxcomm": jaxcomm}
    module = importlib.import_module(name)
    return doctest.DocTestFinder().find(module, extraglobs=names)


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(make_mesh, name):
    wrong: list[str] = []
    with jax.set_mesh(make_mesh(i=4)):
        for example in examples_of(name):
            assert not any(line.options for line in example.examples), "none is skipped"
            doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
                example, out=wrong.append
            )
    assert not wrong, "".join(wrong)


def test_every_public_collective_has_an_example():
    public = {
        name
        for name in jaxcomm.__all__
        if getattr(getattr(jaxcomm, name), "__module__", "").startswith(
            "jaxcomm.collectives"
        )
    }
    assert len(public) > 20
    found = {
        example.name.rpartition(".")[2]
        for name in MODULES
        for example in examples_of(name)
        if example.examples
    }
    assert public - found == WITHOUT
