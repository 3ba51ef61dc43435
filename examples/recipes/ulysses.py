"""Ulysses attention by hand: heads travel to tokens by two all-to-alls."""

import jax
import jax.numpy as jnp

import jaxcomm

BATCH, LENGTH, HEADS, KEY_HEADS, HEAD_SIZE = 2, 64, 16, 8, 16


def ulysses(query, key, value):
    """Attend over a sequence that the axis ``context`` splits in natural order.

    Args:
      query: (batch, local tokens, heads, head size).
      key, value: (batch, local tokens, key heads, head size). Both numbers of heads are
        multiples of the axis size.
    """
    # All tokens of some heads, for some tokens of all heads. One call for all three.
    query, key, value = jaxcomm.all_to_all(
        (query, key, value), "context", split_axis=2, concat_axis=1, tiled=True
    )
    out = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return jaxcomm.all_to_all(out, "context", split_axis=1, concat_axis=2, tiled=True)


def built_in(query, key, value):
    """Do the same by ``ring_attention``, which also takes other layouts and masks."""
    size = jax.lax.axis_size("context")
    layout = jaxcomm.Layout("contiguous", size, size * query.shape[1])
    return jaxcomm.ring_attention(
        query, key, value, "context", layout, is_causal=True, strategy="ulysses"
    )


def on_one_device(query, key, value):
    """Attend over the whole sequence."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def main():
    """Compare results and gradients of the three."""
    size = len(jax.devices())
    mesh = jax.make_mesh(
        (size,), ("context",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    inputs = [
        jax.random.normal(key, (BATCH, LENGTH, n, HEAD_SIZE))
        for key, n in zip(keys, heads, strict=False)
    ]
    cotangent = jax.random.normal(keys[3], (BATCH, LENGTH, HEADS, HEAD_SIZE))

    def with_gradients(attend):
        def both(query, key, value, cotangent):
            out, pullback = jax.vjp(attend, query, key, value)
            return out, pullback(cotangent)

        return both

    expected = jax.jit(with_gradients(on_one_device))(*inputs, cotangent)
    split = jax.P(None, "context")
    for name, attend in (("by hand", ulysses), ("built in", built_in)):
        program = jax.jit(
            jax.shard_map(
                with_gradients(attend), mesh=mesh, in_specs=split, out_specs=split
            )
        )
        out, gradients = program(*inputs, cotangent)
        errors = [
            max(float(jnp.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
            for found, wanted in (
                ([out], [expected[0]]),
                (gradients, expected[1]),
            )
        ]
        assert max(errors) < 1e-4, errors  # float32, sums in another order
        compiled = program.lower(*inputs, cotangent).compile()
        print(f"{name}: equal to one device within {1e-4:.0e}, with gradients")
        print(f"  {jaxcomm.collectives_of(compiled)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
