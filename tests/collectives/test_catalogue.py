"""The catalogue holds every collective, and says of each what is true."""

import inspect

import catalogue
import jax
import pytest

import jaxcomm

pytestmark = pytest.mark.host_only(reason="looks at signatures alone")


def test_every_public_collective_has_a_case():
    found = catalogue.public_collectives()
    assert {"psum", "pbarrier", "psum_start"} <= found
    listed = set(catalogue.FUNCTIONS)
    starts = {f"{n}_start" for n, case in catalogue.FUNCTIONS.items() if case.starts}
    assert found == listed | starts


@pytest.mark.parametrize("name", catalogue.FUNCTIONS)
def test_twins_are_the_functions_that_jax_lax_has_with_our_arguments(name):
    case = catalogue.FUNCTIONS[name]
    theirs = getattr(jax.lax, name, None)
    # XLA:CPU lacks jax.lax's ragged_all_to_all and pbroadcast. pcast moves nothing.
    if name not in ("ragged_all_to_all", "pbroadcast", "pcast"):
        assert case.twin == (theirs is not None)
    if case.twin:
        ours = inspect.signature(getattr(jaxcomm, name)).parameters
        assert set(inspect.signature(theirs).parameters) <= set(ours)
