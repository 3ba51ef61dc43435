"""Layers of flax and equinox in plain ``jax.jit``, on a mesh of three axes."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen, nnx

import jaxcomm

BATCH, LENGTH, WIDTH, HEADS = 4, 45, 32, 4
# The mesh is that of jax.set_mesh. The arrays stay in their natural order.
attention = functools.partial(
    jaxcomm.dot_product_attention,
    sharding=jax.P("data", "context", "model"),
)


def attention_of_nnx(
    query, key, value, *, mask, is_causal, dropout_rng, dropout_rate, deterministic, **_
):
    """Attend as ``nnx.MultiHeadAttention`` asks, but for ``broadcast_dropout``."""
    drops = dropout_rate > 0 and not deterministic
    return attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=is_causal,
        dropout=(dropout_rate, dropout_rng) if drops else None,
    )


def attention_of_equinox(layer, x):
    """Attend with an ``equinox.nn.MultiheadAttention``: x is (batch, tokens, width).

    The layer itself takes one sequence, and ``data`` splits sequences.
    """

    def of_tokens(linear, x):
        return jax.vmap(jax.vmap(linear))(x)

    query, key, value = (
        of_tokens(linear, x).reshape(*x.shape[:2], layer.num_heads, -1)
        for linear in (layer.query_proj, layer.key_proj, layer.value_proj)
    )
    out = attention(query, key, value, is_causal=True)
    return of_tokens(layer.output_proj, out.reshape(x.shape))


def layers(x):
    """Yield names, parameters, and the layer on the mesh and on one device."""
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)

    def of_nnx(params, x, **function):
        layer = nnx.merge(graph, params)
        layer.set_attributes(**function)
        return layer(x, is_causal=True)

    on_mesh = functools.partial(of_nnx, attention_fn=attention_of_nnx)
    yield "flax nnx", params, on_mesh, of_nnx

    # linen leaves out the options that a function does not have.
    causal = functools.partial(attention, is_causal=True)
    ours = linen.MultiHeadDotProductAttention(HEADS, attention_fn=causal)
    theirs = linen.MultiHeadDotProductAttention(HEADS)
    mask = linen.make_causal_mask(x[..., 0])
    params = theirs.init(jax.random.key(0), x)
    alone = functools.partial(theirs.apply, mask=mask)
    yield "flax linen", params, ours.apply, alone

    layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def of_equinox(layer, x):
        return jax.vmap(lambda x: layer(x, x, x, causal))(x)

    yield "equinox", layer, attention_of_equinox, of_equinox


def gradient_of(layer):
    """Return the loss of a layer and its gradient, compiled."""

    def loss(params, x, target):
        return ((layer(params, x) - target) ** 2).mean()

    return eqx.filter_jit(eqx.filter_value_and_grad(loss))


def main():
    """Compare losses and gradients with those of one device."""
    size = len(jax.devices())
    data, model = (2 if size % of == 0 else 1 for of in (2, 4))
    shape, automatic = (data, model, size // data // model), jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(shape, ("data", "model", "context"), (automatic,) * 3)
    x, target = jax.random.normal(jax.random.key(1), (2, BATCH, LENGTH, WIDTH))
    for name, params, on_mesh, on_one_device in layers(x):
        expected = gradient_of(on_one_device)(params, x, target)
        with jax.set_mesh(mesh):
            found = gradient_of(on_mesh)(params, x, target)
        errors = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), found, expected)
        assert max(jax.tree.leaves(errors)) < 1e-5, errors  # float32
        print(f"{name}: loss {found[0]:.4f}, on one device {expected[0]:.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
