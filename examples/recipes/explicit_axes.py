"""Attention and a loss on Explicit axes: the types of arrays say how they are split."""

import jax
import jax.numpy as jnp

import jaxcomm

VOCABULARY, WIDTH, HEADS, BATCH, LENGTH = 64, 32, 4, 4, 64
ROWS = jax.P("data", "context")


def make_params(key):
    """Draw the parameters; heads and hidden units are split over ``model``."""
    keys = iter(jax.random.split(key, 4))

    def draw(*shape, split=None):
        # Without out_sharding the type of what is drawn says that it is not split.
        array = jax.random.normal(next(keys), shape) / WIDTH**0.5
        return array if split is None else jax.reshard(array, split)

    size = WIDTH // HEADS
    return {
        "embedding": draw(VOCABULARY, WIDTH),
        "qkv": draw(3, WIDTH, HEADS, size, split=jax.P(None, None, "model")),
        "out": draw(HEADS, size, WIDTH, split=jax.P("model")),
        "up": draw(WIDTH, WIDTH),
    }


def loss_of(params, words, labels, attend, split):
    """Return the mean loss; ``split`` gives ``out_sharding`` where JAX asks for it."""
    # A gather from what is whole, by indices that are split.
    x = params["embedding"].at[words].get(out_sharding=split(*ROWS))
    # "d" is whole on both sides: nothing to say. The heads of the result are split.
    q, k, v = jnp.einsum("btd,sdnh->sbtnh", x, params["qkv"])
    out = attend(q, k, v)
    # Both sides are split over "model" where they are summed: say what comes of it.
    add = jnp.einsum("btnh,nhd->btd", out, params["out"], out_sharding=split(*ROWS))
    x = x + add
    x = x + jax.nn.gelu(x @ params["up"])
    scores = jax.nn.log_softmax(x @ params["embedding"].T)
    # A one-hot product needs no gather along a dimension that is split.
    hot = jax.nn.one_hot(labels, VOCABULARY)
    return -(scores * hot).sum(-1).mean()


def main():
    """Compare losses and gradients with those of one device."""
    size = len(jax.devices())
    data, model = (2 if size % of == 0 else 1 for of in (2, 4))
    shape = data, model, size // data // model
    mesh = jax.make_mesh(shape, ("data", "model", "context"))  # Explicit, JAX's default
    words = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, VOCABULARY)

    def attend(q, k, v):
        # Their types say how batch and heads are split.
        print("queries:", jax.typeof(q))
        return jaxcomm.dot_product_attention(
            q, k, v, sharding=jax.P(None, "context"), is_causal=True
        )

    def alone(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    with jax.set_mesh(mesh):
        params = make_params(jax.random.key(0))
        batch = jax.reshard((words[:, :-1], words[:, 1:]), ROWS)
        step = jax.jit(
            jax.value_and_grad(lambda p, x, y: loss_of(p, x, y, attend, jax.P))
        )
        loss, gradients = step(params, *batch)
    whole = jax.device_get(params)
    step = jax.jit(
        jax.value_and_grad(lambda p, x, y: loss_of(p, x, y, alone, lambda *_: None))
    )
    expected, wanted = step(whole, words[:, :-1], words[:, 1:])
    errors = jax.tree.map(
        lambda a, b: abs(jax.device_get(a) - b).max(), gradients, wanted
    )
    assert max(jax.tree.leaves(errors)) < 1e-5, errors  # float32
    print(f"loss {loss:.4f}, on one device {expected:.4f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
