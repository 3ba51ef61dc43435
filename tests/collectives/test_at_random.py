"""Every operation and dtype on meshes, in groups and transformations drawn at random.

Each round is a mesh and one program, with one call of each operation. In as many rounds
as there are dtypes, every operation meets every dtype. The oracle is jax.lax.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import jaxcomm

MESHES = [(2,), (3,), (5,), (7,), (8,), (2, 4), (4, 2), (3, 2), (2, 3), (2, 2, 2)]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float32", "bfloat16", "float16", "float64"]
DTYPES = [*INTEGERS, *FLOATS, "bool"]
SUMS = ["psum", "pmean", "psum_scatter"]
EXTREMES = ["pmax", "pmin"]
MOVES = ["all_gather", "all_to_all", "ppermute"]
WAYS = ["plain", "vmap", "scan", "grad", "jvp", "vmap grad"]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A call: what it is, of what, and how it is transformed."""

    operation: str
    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    way: str
    options: dict[str, Any]

    def __call__(self, lib, x):
        """Call the operation of a library on the operand of one rank."""
        axes = self.axes if len(self.axes) > 1 else self.axes[0]

        def call(x):
            return getattr(lib, self.operation)(x, axis_name=axes, **self.options)

        def weighted(x):
            y = call(x)
            weights = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 5
            return (y * weights).sum()

        if self.way == "scan":
            return jax.lax.scan(lambda x, _: (x, call(x)), x, length=2)[1][1]
        if self.way == "jvp":
            return jax.jvp(call, (x,), (x + x,))[1]
        function = jax.grad(weighted) if "grad" in self.way else call
        if "vmap" in self.way:
            function = jax.vmap(function, in_axes=1, out_axes=1)
        return function(x)

    def numbers(self, rng, ranks):
        """Draw the operands of all ranks: of the whole range, where sums are exact."""
        shape, dtype = (ranks, *self.shape), jnp.dtype(self.dtype)
        if self.dtype == "bool" or self.dtype in INTEGERS:
            return models.random_values(dtype, shape, rng)
        if self.operation in SUMS or "grad" in self.way:
            # In every order; the largest sum is 16 times the largest number.
            largest = int(jnp.finfo(dtype).maxexp) - 9
            scale = 2.0 ** rng.integers(-largest, largest)
            return (rng.integers(-8, 9, shape) * scale).astype(dtype)
        least, most = (float(of(dtype)) for of in (_least, _most))
        exponents = rng.uniform(np.log2(least), np.log2(most), shape)
        found = np.exp2(exponents) * rng.choice([-1, 1], shape)
        return np.where(rng.random(shape) < 0.01, np.inf, found).astype(dtype)


def _least(dtype):
    return jnp.finfo(dtype).smallest_normal


def _most(dtype):
    return jnp.finfo(dtype).max


def drawn(rng, mesh, operation, dtype):
    """Draw a call of an operation over the axes "a", "b", ... of a mesh."""
    names = "abc"[: len(mesh)]
    count = int(rng.integers(1, len(mesh) + 1))
    axes = tuple(rng.permutation(list(names))[:count].tolist())
    if operation == "ppermute":
        axes = tuple(sorted(axes))  # In another order jax.lax counts as the mesh does.
    size = math.prod(mesh[names.index(axis)] for axis in axes)
    options: dict[str, Any] = {}
    ranks = size
    if operation != "ppermute" and count == 1 and rng.random() < 0.4:
        ranks = int(rng.choice([d for d in range(1, size + 1) if size % d == 0]))
        groups = rng.permutation(size).reshape(-1, ranks).tolist()
        options["axis_index_groups"] = groups
    if operation == "all_gather":
        options |= {"axis": int(rng.integers(2)), "tiled": bool(rng.integers(2))}
    if operation == "psum_scatter":
        options |= {"scatter_dimension": 0, "tiled": True}
    if operation == "all_to_all":
        concat = int(rng.integers(2))
        options |= {"split_axis": 0, "concat_axis": concat, "tiled": True}
    if operation == "ppermute":
        pairs = zip(*(rng.permutation(size).tolist() for _ in range(2)), strict=True)
        options["perm"] = list(pairs)[: int(rng.integers(1, size + 1))]
    ways = WAYS if dtype in FLOATS and operation not in EXTREMES else WAYS[:3]
    if "axis_index_groups" in options:  # jax.lax maps few operations in groups.
        ways = [way for way in ways if "vmap" not in way]
    way = str(rng.choice(ways))
    odd = int(rng.choice([1, 2, 3, 7, 33, 129, 1001]))
    shape = (ranks * int(rng.integers(1, 3)), *[2] * ("vmap" in way), odd)
    return Drawn(operation, dtype, axes, shape, way, options)


def rounds(seed):
    """Yield meshes, calls by their texts, and operands by the same."""
    rng = np.random.default_rng(seed)
    for first in range(len(DTYPES)):
        mesh = MESHES[rng.integers(len(MESHES))]
        calls = {}
        for at, operation in enumerate([*SUMS, *EXTREMES, *MOVES]):
            dtype = DTYPES[(first + 3 * at) % len(DTYPES)]
            if dtype == "bool" and operation in SUMS:
                continue
            call = drawn(rng, mesh, operation, dtype)
            calls[str(call)] = call
        ranks = math.prod(mesh)
        x = {text: call.numbers(rng, ranks) for text, call in calls.items()}
        yield mesh, calls, x


def program(calls, lib):
    """Return the function of a rank that makes all calls of a round."""
    return lambda x: {text: call(lib, x[text]) for text, call in calls.items()}


@pytest.fixture(scope="module")
def by_lax(stacked, mesh_of):
    """Gives what jax.lax makes of a round, once."""
    known = {}

    def give(key, mesh, program, x):
        if key not in known:
            known[key] = stacked(mesh, program, x, check_vma=False)
        return known[key]

    return give


# In `make test` every third round: test_dtypes.py has each collective of each type.
@pytest.mark.parametrize(
    ("seed", "step"),
    [(0, 3), *(pytest.param(n, 1, marks=pytest.mark.thorough) for n in range(9))],
)
def test_calls_at_random_are_those_of_jax_lax(
    stacked, identical, near, mesh_of, by_lax, seed, step
):
    for number, (shape, calls, x) in enumerate(rounds(seed)):
        if number % step:
            continue
        mesh = mesh_of(shape, tuple("abc"[: len(shape)]))

        with jax.enable_x64(True):
            expected = by_lax((seed, number), mesh, program(calls, jax.lax), x)
            found = stacked(mesh, program(calls, jaxcomm), x, check_vma=False)
        for text, call in calls.items():
            what = f"seed {seed}, mesh {shape}: {text}"
            if call.operation == "pmean" and call.dtype not in ("bool", *INTEGERS):
                # NCCL multiplies by one over the number of ranks before it adds.
                rounding = 2 * float(jnp.finfo(call.dtype).eps)
                most = float(np.abs(x[text].astype(np.float64)).max())
                near(found[text], expected[text], rounding, what, rounding * most)
            else:
                identical(found[text], expected[text], what)
        jaxcomm.finalize()
