"""Programs that nobody wrote: collectives in transforms in transforms, as ``jax.lax``.

Each program is run twice, with the collectives of ``jax.lax`` and with ours. Both give
the same numbers and gradients, or both refuse with errors of one type.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcomm

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.host_only(reason="long; other files have these collectives over NCCL"),
]

# Two programs a step are compiled: few, the same in every run, without a deadline.
FEW = settings(max_examples=40, deadline=None, derandomize=True, database=None)
ROWS = 24  # what every group divides, and its square as well where it is cut twice


def cut_and_joined(calls, x, axes, groups):
    part = calls.psum_scatter(x, axes, scatter_dimension=0, tiled=True, **groups)
    return calls.all_gather(jnp.cos(part), axes, axis=0, tiled=True, **groups)


def turned(calls, x, axes, groups):
    if groups:
        return x
    size = jax.lax.axis_size(axes)
    return calls.ppermute(x, axes, [(i, (i + 1) % size) for i in range(size)])


STEPS = (
    lambda calls, x, axes, groups: x + calls.psum(jnp.sin(x), axes, **groups),
    lambda calls, x, axes, groups: x * calls.pmean(x, axes, **groups),
    lambda calls, x, axes, groups: (
        x + calls.pmax(jax.lax.stop_gradient(x), axes, **groups)
    ),
    lambda calls, x, axes, groups: calls.all_to_all(
        x, axes, split_axis=0, concat_axis=0, tiled=True, **groups
    ),
    cut_and_joined,
    turned,
)


def scanned(function, x):
    def body(carry, _):
        # A carry keeps its type; what varies over fewer axes is not one.
        return carry + 0 * carry + 0.1 * function(carry), None

    return jax.lax.scan(body, x, length=2)[0]


TRANSFORMS = (
    lambda function, x: function(x),
    lambda function, x: jax.checkpoint(function)(x),
    lambda function, x: jax.jit(function)(x),
    lambda function, x: jax.vmap(function, in_axes=1, out_axes=1)(x),
    lambda function, x: jax.jvp(function, (x,), (jnp.cos(x),))[1],
    lambda function, x: jax.grad(lambda x: (function(x) ** 2).sum())(x),
    lambda function, x: jax.lax.cond(
        x.shape[0] > 0, function, lambda x: 2 * function(x), x
    ),
    scanned,
)


@st.composite
def programs(draw):
    """Mesh, and steps of (collective, transform around it, axes, groups)."""
    shape = draw(st.sampled_from([(4,), (2, 2), (2, 3), (8,), (2, 4), (1, 3)]))
    names = ("a", "b")[: len(shape)]
    check_vma = draw(st.booleans())
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        axes = draw(
            st.sampled_from([*names, *([names, names[::-1]] * (len(names) > 1))])
        )
        groups = {}
        if not check_vma and axes == "a" and shape[0] in (4, 8) and draw(st.booleans()):
            order = draw(st.permutations(range(shape[0])))
            groups = {
                "axis_index_groups": [
                    list(order[i : i + 2]) for i in range(0, shape[0], 2)
                ]
            }
        step, around = draw(st.sampled_from(STEPS)), draw(st.sampled_from(TRANSFORMS))
        steps.append((step, around, axes, groups))
    return dict(zip(names, shape, strict=True)), check_vma, steps


def outcome(calls, mesh, check_vma, steps, x):
    """What the program and its gradient give, or an error's type."""

    def local(x):
        for step, around, axes, groups in steps:
            function = functools.partial(step, calls, axes=axes, groups=groups)
            x = around(lambda x, f=function: f(x=x), x)
        return x

    split = jax.P(mesh.axis_names)
    program = jax.shard_map(
        local, mesh=mesh, in_specs=split, out_specs=split, check_vma=check_vma
    )
    try:
        return jax.jit(jax.value_and_grad(lambda x: jnp.sin(program(x)).sum()))(x)
    except (TypeError, ValueError, NotImplementedError, NameError) as error:
        return type(error)
    except RuntimeError as error:
        # jax.lax.ppermute up to 0.11, over axes in another order than the mesh's.
        if "same order as the axis_names" not in str(error):
            raise
        return NotImplementedError


@FEW
@given(drawn=programs(), seed=st.integers(0, 1000))
def test_any_program_is_that_of_jax_lax(mesh_of, drawn, seed):
    sizes, check_vma, steps = drawn
    mesh = mesh_of(tuple(sizes.values()), tuple(sizes))
    rows = ROWS * math.prod(sizes.values())
    # Float64: products of gradients of products make much of a rounding.
    with jax.enable_x64(True):
        x = jnp.asarray(0.5 * np.random.default_rng(seed).normal(size=(rows, 2)))
        found, expected = (
            outcome(calls, mesh, check_vma, steps, x) for calls in (jaxcomm, jax.lax)
        )
    if expected is NotImplementedError:
        return  # JAX cannot do all that we can.
    if isinstance(expected, type) or isinstance(found, type):
        assert found == expected
        return
    for one, other in zip(found, expected, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype == np.float64
        np.testing.assert_allclose(one, other, 1e-9, 1e-9 * (1e-3 + abs(other).max()))
