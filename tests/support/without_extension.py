"""Uses a jaxcomm that was installed without its extension, on four CPU devices.

``without_extension.py [FOLDER]``: where jaxcomm is, if not where Python finds it. It
prints a plan and what the doctor says, as JSON, and ends with status 0 if all else is
right. The oracles are ``jax.lax`` and ``jax.nn``.
"""

import contextlib
import io
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    # Some systems that such a jaxcomm is for do not have them.
    for name in ("memfd_create", "pidfd_open", "register_at_fork", "sched_getaffinity"):
        delattr(os, name)

import jaxcomm
from jaxcomm.doctor import __main__ as doctor

WITHOUT = "this jaxcomm has no compiled extension"
SPLIT = jax.P(None, "i")


def over(mesh, function, *, operands=1):
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=(SPLIT,) * operands, out_specs=SPLIT
        )
    )


def a_plan():
    x = jax.ShapeDtypeStruct((1 << 24,), "float32")
    plans = (
        jaxcomm.plan(
            {"data": 2, "i": 8},
            lambda x: (jaxcomm.psum(x[:64], "data"), jaxcomm.all_gather(x, "i")),
            x,
            machine=machine,
            devices_per_process=devices_per_process,
        )
        for machine, devices_per_process in (("h100", 8), ("cpu", 4))
    )
    return "\n".join(map(str, plans))


def check_collectives(mesh):
    ring = [(rank, (rank + 1) % 4) for rank in range(4)]

    def loss(lib):
        def local(x):
            parts = lib.all_gather(jnp.sin(x), "i", axis=1, tiled=True)
            moved = lib.ppermute(x * lib.psum(x, "i"), "i", ring)
            scattered = lib.psum_scatter(
                parts * moved.sum(), "i", scatter_dimension=1, tiled=True
            )
            return scattered + moved

        def of(x):
            out = jax.shard_map(local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)(x)
            return (out**2).sum()

        return jax.jit(jax.value_and_grad(of))

    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    for found, right in zip(loss(jaxcomm)(x), loss(jax.lax)(x), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5)

    def hop(x):
        handle = jaxcomm.ppermute_start(x, "i", ring)
        return handle.done(after=jnp.cos(handle.then(x))) + 1

    found = over(mesh, hop)(x)
    right = over(mesh, lambda x: jax.lax.ppermute(x, "i", ring) + 1)(x)
    np.testing.assert_array_equal(found, right)


def check_attention(mesh):
    """It is that of jax.nn, and tokens out of place give NaN."""
    layout = jaxcomm.Layout("zigzag", size=4, length=32)
    x = jax.random.normal(jax.random.key(0), (3, 1, 32, 2, 8))
    right = jax.nn.dot_product_attention(*x, is_causal=True)
    q, k, v = x

    def attend(q, k, v, tokens):
        return jaxcomm.ring_attention(q, k, v, "i", tokens, is_causal=True)

    program = over(mesh, attend, operands=4)
    batch, tokens = layout.reorder((q, k, v))
    found = tokens.restore(program(*batch, tokens))
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)
    assert np.isnan(program(q, k, v, jax.tree.map(jnp.flip, tokens))).all()

    found = jaxcomm.dot_product_attention(
        q, k, v, sharding=jax.NamedSharding(mesh, jax.P(None, "i")), is_causal=True
    )
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def check_refusals(mesh):
    """What needs the extension says so, and what it is."""
    jaxcomm.finalize()
    last = str(jaxcomm.communicators()).splitlines()[-1]
    assert last.startswith(f"XLA communicates: {WITHOUT} (wheel py3-none-any).")
    x = np.ones((2, 8), np.float32)
    member = jaxcomm.init(mesh)[0]
    assert (member.backend, member.policy) == ("xla", None)
    host = rf"backend 'host' cannot join .*: {WITHOUT}.*\. Use backend='xla'"
    for what, text in (
        (lambda: over(mesh, lambda x: jaxcomm.psum(x, "i", backend="host"))(x), host),
        (lambda: jaxcomm.init(mesh, backend="host"), host),
        (lambda: jaxcomm.SymmetricPool(mesh, 1024), f"SymmetricPool: {WITHOUT}"),
        (jaxcomm.flight_record, f"flight_record: XLA keeps none; .*: {WITHOUT}"),
    ):
        try:
            found = f"it returned {what()}"
        except jaxcomm.CommunicatorError as error:
            found = str(error)
        assert re.search(text, found), (text, found)


def the_doctor():
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(out),
    ):
        status = doctor.main(doctor.options.read([]))
    return status, out.getvalue()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("i",), axis_types=auto)
    for check in (check_collectives, check_attention, check_refusals):
        check(mesh)
    print(json.dumps({"plan": a_plan(), "doctor": the_doctor()}))
