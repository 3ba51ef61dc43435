"""A collective costs one class and one function: here is one from outside the package.

It uses the planner of another. A planner of its own would be a C++ file beside that,
``ffi/planners/<name>.cc``, with two lines in ``collectives.h``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.primitives.call import call_of
from jaxcomm.primitives.collective import COLLECTIVES, Collective, bound, define
from jaxcomm.primitives.request import Request, as_arrays
from jaxcomm.primitives.split_phase import define_pair


class Mirror(Collective):
    """Rank r gets the operand of rank size - 1 - r."""

    name = "toy_mirror"
    planner = "permute"  # its parameters: the source of each rank

    def planner_params(self, avals, size, **_):
        return list(range(size))[::-1]

    def emulate(self, x, i):
        return x[::-1]

    def transposed(self, call):
        return bound("toy_mirror", call)


@pytest.fixture(scope="module", autouse=True)
def toy():
    define(Mirror())
    define_pair(COLLECTIVES["toy_mirror"])
    yield
    del COLLECTIVES["toy_mirror"]


def request(x, axis_name, name="mirror", **options):
    call = call_of(name, axis_name, **options)
    return Request(COLLECTIVES[f"toy_{name}"], as_arrays(x, call), call)


def mirror(x, axis_name, **options):
    return request(x, axis_name, **options).run()


def halves(x):
    handle = request(x, "i").start()
    return handle.done(after=jnp.sin(handle.then(x)))


def test_values_leaves_groups_batches_and_gradients(
    mesh, stacked, x, identical, near, default_backend
):
    def program(x):
        return {
            "leaves": mirror([x, x.astype(jnp.int8)], "i"),
            "groups": mirror(x, "i", axis_index_groups=[[0, 2], [1, 3]]),
            "vmap": jax.vmap(lambda x: mirror(x, "i"), 1, 1)(x),
            "own axis": jax.vmap(lambda x: mirror(x, ("v", "i")), axis_name="v")(x),
            "halves": halves(x),
            "gradient": jax.grad(lambda x: jnp.sin(mirror(x, "i") * (x + 1)).sum())(x),
        }

    turned = x[::-1]
    for backend in (None, "xla") if default_backend == "host" else (None,):
        with jaxcomm.using(backend=backend):
            found = stacked(mesh, program, x)
        identical(found["leaves"], [turned, turned.astype(np.int8)])
        identical(found["groups"], x[[2, 3, 0, 1]])
        identical((found["vmap"], found["halves"]), (turned, turned))
        # The mapped axis is the first of x, and the slower one of the two.
        identical(found["own axis"], turned[:, ::-1])
        expected = np.cos(turned * (x + 1)) * turned
        expected += (np.cos(turned * (x + 1)) * (x + 1))[::-1]
        near(found["gradient"], expected, 1e-5, atol=1e-5)


@pytest.mark.host_only(reason="it is of the trace")
def test_one_custom_call_a_name_taken_and_a_transpose_missing(trace, monkeypatch):
    lowered = trace(lambda x: mirror([x, x * 2], "i")[1]).lower()
    assert jaxcomm.collectives_of(lowered.compile()).ours == {"permute": 1}
    with pytest.raises(ValueError, match="a collective named 'toy_mirror' already"):
        define(Mirror())

    class OneWay(Collective):
        name = "toy_one_way"
        planner = "barrier"

        def emulate(self, x, i):
            return x

    monkeypatch.setitem(COLLECTIVES, "toy_one_way", None)
    del COLLECTIVES["toy_one_way"]  # And again when the test is over.
    define(OneWay())
    with pytest.raises(NotImplementedError, match="one_way has no transpose"):
        trace(jax.grad(lambda x: request(x, "i", "one_way").run().sum()))
