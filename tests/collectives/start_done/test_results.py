"""The two halves give what the whole collective gives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue import SPLIT_PHASE as HALVES
from models import over

import jaxcomm

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
# In groups, over a tuple of axes, of a pytree with an empty leaf and integers.
TREES = {
    "ppermute": lambda lib, x: lib.ppermute(x, ("i", "j"), [(0, 3), (3, 1)]),
    "psum": lambda lib, x: lib.psum(x, "i"),
    "psum_groups": lambda lib, x: lib.psum(
        x, ("i", "j"), axis_index_groups=[[0, 3], [1, 2]]
    ),
    "all_gather": lambda lib, x: lib.all_gather(x, ("i", "j")),
    "psum_scatter": lambda lib, x: lib.psum_scatter(
        x, "j", scatter_dimension=1, tiled=True
    ),
    "all_to_all": lambda lib, x: lib.all_to_all(x, "j", 1, 0, tiled=True),
}
DTYPES = ("float32", "bfloat16", "int32", "uint8", "complex64", "bool")
of_jax = pytest.mark.host_only(reason="it is of the trace, or of XLA's control flow")


@pytest.mark.parametrize(
    ("after", "backend"), [(True, None), (False, None), (True, "xla")]
)
def test_gives_what_the_whole_collective_gives(
    stacked, identical, values, mesh_of, after, backend
):
    class Halves:
        def __getattr__(self, name):
            return functools.partial(getattr(HALVES, name), after=after)

    def program(lib):
        return lambda x: {name: call(lib, x) for name, call in TREES.items()}

    arrays = {dtype: values(dtype, (4, 4, 6), 3) for dtype in DTYPES}
    x = {"a": arrays, "b": [arrays["int32"][:, :, :2], arrays["float32"][:, :0]]}
    mesh = mesh_of((2, 2), ("i", "j"))
    with jaxcomm.using(backend=backend):
        found, expected = (
            stacked(mesh, program(lib), x) for lib in (Halves(), jaxcomm)
        )
    identical(found, expected)


def test_eager_and_named_calls_in_two_lanes(stacked, identical, values, mesh):
    x = values("float32", (4, 3))

    def program(x):
        near = jaxcomm.ring_shift_start(x, "i", lane="near")
        far = jaxcomm.ring_shift_start(x, "i", 2, lane="far").done()
        return near.done(after=far), far

    for jit in (True, False):
        found = stacked(mesh, program, x, jit=jit)
        identical(found, (np.roll(x, 1, 0), np.roll(x, 2, 0)))
    near, far = sorted(jaxcomm.communicators(), key=lambda c: c.lane, reverse=True)
    assert (near.lane, far.lane) == ("near", "far")
    assert near.stats()["calls"] == far.stats()["calls"] == {"permute": 2}
    assert "ring_shift_start" in str(jaxcomm.flight_record())


@of_jax
def test_types_say_what_varies(mesh):
    x = jnp.arange(4.0)
    assert over(mesh, lambda x: HALVES.psum(x, "i"), out=jax.P())(x) == 6
    with pytest.raises(ValueError, match="out_specs"):
        over(mesh, lambda x: HALVES.ring_shift(x, "i"), out=jax.P())(x)


@of_jax
def test_after_takes_any_arrays(stacked, identical, values, mesh):
    x = values("float32", (4, 3))

    def program(x):
        after = {
            "key": jax.random.key(0),
            "narrow": jnp.ones(3, "int4"),
            "bool": x > 0,
            "empty": x[:0],
            "number": 1.0,
            "numpy": np.ones(2),
            "none": None,
        }
        return jaxcomm.ppermute_start(x, "i", RING).done(after=after)

    identical(stacked(mesh, program, x), np.roll(x, 1, 0))


def test_a_gpu_sends_and_writes_whole_arrays(mesh, default_backend):
    """Of a slice XLA would hand over the larger array, which may not live so long."""

    def send_a_part(x):
        arriving = jaxcomm.ppermute_start(x[:, 1:], "i", [(0, 1), (1, 0)])
        return jnp.sin(arriving.done(after=x))

    text = over(mesh, send_a_part).lower(jnp.ones((8, 3))).as_text()
    whole = re.findall(r"(%\w+)\S* = stablehlo.optimization_barrier", text)
    (start,) = re.findall(r"@jaxcomm.permute.\w+\(([^)]*)\)", text)
    (done,) = re.findall(r"@jaxcomm.done\(([^,)]*)", text)
    (read,) = re.findall(r"stablehlo.sine (%\w+)", text)
    assert start == done
    assert ({start, read} <= set(whole)) == (default_backend == "nccl"), text
