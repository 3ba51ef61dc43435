"""What of NCCL every collective becomes; tests/collectives runs over NCCL, too."""

import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest

import jaxcomm
from jaxcomm.primitives import nccl_rewrites

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.mark.parametrize("elements", [600_001, 1])
def test_sums_of_16_bit_floats_are_rounded_once(stand_in, make_mesh, elements):
    """Above 1 MiB in two phases, so that the wide sums do not travel."""
    mesh = make_mesh(i=4)
    x = np.ones((4, elements), jnp.bfloat16)
    # In bfloat16, 256 + 1 is 256; the sum is 259, and 260 is next to it.
    x[0] = 256
    stand_in.clear()
    found = models.run_stacked(mesh, lambda x: jaxcomm.psum(x, "i"), x)
    models.assert_identical(found, np.full_like(x, 260))
    used = stand_in.trace("ncclAllReduce", "ncclAlltoAll", "ncclAllGather")
    used = [call for call in used if call["count"] > 4]
    if elements > 1:
        assert {call["name"] for call in used} == {"ncclAlltoAll", "ncclAllGather"}
    else:
        assert not used


def test_what_nccl_cannot_reduce_is_gathered_alone(stand_in, make_mesh):
    mesh = make_mesh(i=3)
    x = {
        name: models.random_values(jnp.dtype(name), (3, 5), 0)
        for name in ("complex64", "float32", "int16")
    }
    jaxcomm.init(mesh, "i")
    stand_in.clear()
    found = models.run_stacked(mesh, lambda x: jaxcomm.pprod(x, "i"), x)
    for name, stack in x.items():
        exact = models.apply_by_group(mesh, ("i",), models.all_reduce("prod"), stack)
        models.assert_near(found[name], exact, 1e-5, name, 1e-5)
    gathered = stand_in.trace("ncclAllGather")
    assert [call["count"] for call in gathered] == [5 * 8] * 3
    reduced = stand_in.trace("ncclAllReduce")
    assert [call["count"] for call in reduced] == [5] * 6


def _exchanges(lib, options):
    """Every tiled exchange of arrays of odd shapes, batched, and its transpose."""
    axes = [(2, 1), (1, 2), (1, 0), (2, 2)]

    def every(x):
        outs = [lib.all_to_all(x, "i", *at, tiled=True, **options) for at in axes]
        batched = jax.vmap(
            lambda x: lib.all_to_all(x, "i", 1, 0, tiled=True, **options),
            in_axes=2,
            out_axes=1,
        )
        return outs, batched(x)

    def local(xs):
        outs = jax.tree.map(every, xs)
        _, back = jax.vjp(every, xs["float32"])
        return outs, back(outs["float32"])

    return local


@pytest.mark.parametrize(("size", "groups"), [(2, None), (4, [[2, 0], [1, 3]])])
def test_rows_of_an_exchange_travel_as_they_lie(
    stand_in, make_mesh, monkeypatch, size, groups
):
    for name in ("ROW_BYTES", "STRIDED_BYTES", "BYTES_OF_COPY"):
        monkeypatch.setattr(nccl_rewrites, f"_LEAST_{name}", 0)
    mesh, options = make_mesh(i=size), {"axis_index_groups": groups}
    x = {
        name: models.random_values(jnp.dtype(name), (size, 3, 8, 4, 5), 0)
        for name in ("bool", "int8", "bfloat16", "float32", "complex128")
    }
    found = jax.block_until_ready(
        models.run_stacked(mesh, _exchanges(jaxcomm, options), x)
    )
    # Rows of 5 elements are packed before they are sent, and where they arrive.
    assert stand_in.trace("cuMemcpy2DAsync_v2")
    options["backend"] = "host"
    expected = models.run_stacked(mesh, _exchanges(jaxcomm, options), x)
    models.assert_identical(found, expected)
    if groups is None:
        lax = models.run_stacked(mesh, _exchanges(jax.lax, {}), x, check_vma=False)
        models.assert_identical(found, lax)


def test_ulysses_exchange_has_no_transposes(stand_in, make_mesh, monkeypatch):
    """Of long rows, both ways, by copies; log-sum-exps, whose rows are short, have."""
    monkeypatch.setattr(nccl_rewrites, "_LEAST_STRIDED_BYTES", 4 << 20)
    mesh = make_mesh(i=2)
    tree = [
        models.random_values(jnp.dtype("bfloat16"), (2, 1, 8192, 8, 128), 0),
        models.random_values(jnp.dtype("bfloat16"), (2, 1, 8192, 4, 128), 1),
        models.random_values(jnp.dtype("float32"), (2, 1, 8192, 8), 2),
    ]

    def there_and_back(lib):
        def local(xs):
            there = lib.all_to_all(xs, "i", 2, 1, tiled=True)
            return there, lib.all_to_all(there, "i", 1, 2, tiled=True)

        return local

    def program(x):
        return models.over(mesh, lambda x: jax.tree.map(
            lambda x: x[None], there_and_back(jaxcomm)([x[0] for x in x])
        ))(x)  # fmt: skip

    lowered = jax.jit(program).lower(tree)
    moved = re.findall(r"stablehlo.transpose.*: \(tensor<([^>]*)>", lowered.as_text())
    assert {shape.rpartition("x")[2] for shape in moved} == {"f32"}
    stand_in.clear()
    there, back = jax.block_until_ready(program(tree))
    assert len(stand_in.trace("cuMemcpy2DAsync_v2")) == 2 * 2 * (2 + 2)
    assert not stand_in.trace("ncclSend")
    # What a rank keeps goes on a stream of its own: an event ends it, too.
    names = "cuMemcpy2DAsync_v2", "cuEventRecord"
    last = {call["stream"]: call["name"] for call in stand_in.trace(*names)}
    assert {*last.values()} == {"cuEventRecord"}
    models.assert_identical(back, tree)
    lax = models.run_stacked(mesh, there_and_back(jax.lax), tree, check_vma=False)
    models.assert_identical((there, back), lax)
    (member,) = jaxcomm.communicators()
    assert member.stats()["copied_calls"] == 2


@pytest.mark.parametrize(
    ("size", "policy", "transposes"),
    [
        (2, {}, 0),
        (2, {"command_buffers": True}, 2),
    ],
)
def test_rows_that_nccl_would_send_are_transposed(make_mesh, size, policy, transposes):
    """In place of a copy on the GPU that packs them: XLA's transposes are faster."""
    mesh = make_mesh(i=size)
    jaxcomm.init(mesh, "i", policy=jaxcomm.CommPolicy(**policy))
    rows = jax.ShapeDtypeStruct((1, 32768, 32, 128), jnp.bfloat16)
    program = models.over(
        mesh,
        lambda x: jaxcomm.all_to_all(x, "i", 2, 1, tiled=True),
        specs=jax.P(None, "i"),
        out=jax.P(None, "i"),
    )
    lowered = program.lower(rows).as_text()
    assert lowered.count("stablehlo.transpose") == transposes
    # Room to pack rows in is a second result.
    (call,) = re.findall(r"%\S+ = stablehlo.custom_call @\S*all_to_all", lowered)
    assert (":2 =" in call) == (transposes == 0)


def test_means_of_wide_floats_are_ncclavg(stand_in, make_mesh):
    mesh = make_mesh(i=3)
    x = jax.random.normal(jax.random.key(0), (6, 5))

    def means(x):
        return jaxcomm.pmean(x, "i"), jaxcomm.pmean(x.astype(jnp.bfloat16), "i")

    wide, narrow = models.over(mesh, means, out=jax.P())(x)
    exact = np.asarray(x, np.float64).reshape(3, 2, 5).mean(0)
    np.testing.assert_allclose(wide, exact, rtol=1e-6, atol=1e-7)
    narrow = narrow.astype(jnp.float32)
    np.testing.assert_allclose(narrow, exact, rtol=2e-2, atol=1e-2)
    # kSum and kAvg.
    assert {call["op"] for call in stand_in.trace("ncclAllReduce")} == {0, 4}


def test_what_is_gathered_instead_stays_within_its_groups(make_mesh):
    mesh, groups = make_mesh(i=4), [[2, 0], [1, 3]]
    x = models.random_values(jnp.dtype("complex64"), (4, 5), 0)
    found = models.run_stacked(
        mesh, lambda x: jaxcomm.pmax(x, "i", axis_index_groups=groups), x
    )
    models.assert_identical(
        found, models.apply_by_group(mesh, ("i",), models.all_reduce("max"), x, groups)
    )
    assert {m.backend for m in jaxcomm.communicators()} == {"nccl"}
