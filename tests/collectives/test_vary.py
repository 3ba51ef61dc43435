"""Where the transpose of being typed as varying goes."""

import jax
import numpy as np
import pytest

import jaxcomm

X = np.ones((16, 4), np.float32)


@pytest.mark.parametrize("backend", ["host", "xla"])
def test_gradients_of_replicated_inputs_go_where_their_call_went(make_mesh, backend):
    """The transpose of being typed as varying is a sum: in that lane, that backend."""

    def local(w, x):
        def loss(w):
            total = jaxcomm.pscan(w, "i", lane="grads", backend=backend)
            return (total * x[0]).sum()

        return jax.grad(loss)(w)

    program = jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh(i=4),
            in_specs=(jax.P(), jax.P("i")),
            out_specs=jax.P(),
        )
    )
    jax.block_until_ready(program(X[0], X))
    assert {(c.lane, c.backend) for c in jaxcomm.communicators()} == {
        ("grads", backend)
    }


@pytest.mark.parametrize("backend", ["host", "xla"])
def test_integers_typed_along_with_a_float_have_no_gradient(make_mesh, backend):
    """A custom_vjp gives integers cotangents of float0, which nothing can sum."""

    @jax.custom_vjp
    def scaled(x, i):
        return x * i.astype(x.dtype)

    def forward(x, i):
        return scaled(x, i), i

    scaled.defvjp(forward, lambda i, ct: (ct * i.astype(ct.dtype), None))

    def local(x, i):
        return jaxcomm.psum(scaled(*jaxcomm.pcast((x, i), "i", to="varying")), "i")

    program = jax.shard_map(
        local, mesh=make_mesh(i=2), in_specs=(jax.P(), jax.P()), out_specs=jax.P()
    )
    i = np.arange(4, dtype=np.int32)
    with jaxcomm.using(backend=backend):
        gradient = jax.jit(jax.grad(lambda x: program(x, i).sum()))(X[0])
    np.testing.assert_array_equal(gradient, 2 * i)
