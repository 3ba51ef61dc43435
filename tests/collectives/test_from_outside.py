"""A collective costs one class and one function: here is one from outside the package.

It uses the planner of another. A planner of its own would be a C++ file beside that,
``ffi/planners/<name>.cc``, with two lines in ``collectives.h``.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.primitives import lowering
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


class Spread(Collective):
    """Rank r gets the sum less its own operand; no backend does it as it is."""

    name = "toy_spread"

    def emulate(self, x, i):
        return x.sum(0, x.dtype, keepdims=True) - x

    def transposed(self, call):
        return bound("toy_spread", call)


def _by_sum(collective, avals, size):
    def rewritten(bind, xs):
        totals = bind("all_reduce", xs, op="sum")
        return [total - x for total, x in zip(totals, xs, strict=True)]

    return rewritten


@pytest.fixture(scope="module", autouse=True)
def toys():
    found = {}
    for toy in (Mirror(), Spread()):
        define(toy)
        define_pair(toy)
        found[toy.name] = toy
    for backend in ("host", "nccl"):
        lowering.REWRITES[backend, "toy_spread"] = _by_sum
    yield found
    for name in found:
        del COLLECTIVES[name]
    for backend in ("host", "nccl"):
        del lowering.REWRITES[backend, "toy_spread"]


def request(name, x, axis_name, **options):
    call = call_of(name, axis_name, **options)
    return Request(COLLECTIVES[f"toy_{name}"], as_arrays(x, call), call)


def mirror(x, axis_name, **options):
    return request("mirror", x, axis_name, **options).run()


def spread(x, axis_name, **options):
    return request("spread", x, axis_name, **options).run()


TOYS = {
    "mirror": (mirror, lambda s: s[::-1]),
    "spread": (spread, lambda s: s.sum(0, keepdims=True) - s),
}


@pytest.mark.parametrize("backend", [None, "xla"])
@pytest.mark.parametrize("name", TOYS)
def test_values_leaves_groups_and_batches(
    mesh, stacked, by_group, x, name, backend, identical
):
    call, model = TOYS[name]
    x = np.round(x * 8)  # sums are exact, also in int8
    groups = [[0, 3], [1, 2]]

    def program(x):
        own = jax.vmap(lambda x: call(x, ("v", "i"), backend=backend), axis_name="v")
        return {
            "leaves": call([x, x.astype(jnp.int8)], "i", backend=backend),
            "groups": call(x, "i", axis_index_groups=groups, backend=backend),
            "vmap": jax.vmap(lambda x: call(x, "i", backend=backend), 1, 1)(x),
            "own axis": own(x),
        }

    found = stacked(mesh, program, x)
    identical(found["leaves"], [model(x), model(x.astype(np.int8)).astype(np.int8)])
    identical(found["groups"], by_group(mesh, ("i",), model, x, groups))
    identical(found["vmap"], model(x))
    # The mapped axis is the first of x, and the slower one of the two.
    ranks = np.swapaxes(x, 0, 1)
    expected = model(ranks.reshape(-1, *x.shape[2:])).reshape(ranks.shape)
    identical(found["own axis"], np.swapaxes(expected, 0, 1))


@pytest.mark.parametrize("name", TOYS)
def test_gradients_are_those_of_the_model(mesh, stacked, x, name, near):
    call, model = TOYS[name]

    def local(x):
        return jax.grad(lambda x: jnp.sin(call(x, "i")).sum())(x)

    found = stacked(mesh, local, x)
    expected = jax.grad(lambda s: jnp.sin(model(s)).sum())(jnp.asarray(x))
    near(found, expected, 1e-5, atol=1e-5)  # sums of 4 in two orders


def test_split_phase(mesh, stacked, x, identical):
    def local(x):
        handle = request("mirror", x, "i").start()
        out = jnp.sin(handle.then(x))
        return handle.done(after=out), out

    found, _ = stacked(mesh, local, x)
    identical(found, x[::-1])


def test_one_custom_call_of_the_planner_or_of_what_it_is_rewritten_to(mesh):
    for call, target in ((mirror, "permute"), (spread, "all_reduce")):
        split = jax.P("i")
        program = jax.shard_map(
            lambda x, c=call: c([x, x * 2], "i"),
            mesh=mesh,
            in_specs=split,
            out_specs=split,
        )
        compiled = jax.jit(program).lower(np.ones((4, 8), np.float32)).compile()
        assert jaxcomm.collectives_of(compiled).ours == {target: 1}


def test_a_name_is_one_collective_s():
    with pytest.raises(ValueError, match="a collective named 'toy_mirror' already"):
        define(Mirror())


def test_a_collective_without_a_transpose_says_so(trace):
    class OneWay(Collective):
        name = "toy_one_way"
        planner = "barrier"

        def emulate(self, x, i):
            return x

    toy = OneWay()
    define(toy)
    try:
        with pytest.raises(NotImplementedError, match="one_way has no transpose"):
            trace(
                lambda x: jax.grad(lambda x: request("one_way", x, "i").run().sum())(x)
            )
    finally:
        del COLLECTIVES["toy_one_way"]
