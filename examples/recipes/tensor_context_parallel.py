"""A transformer on two axes: heads over ``model``, tokens over ``context``."""

import functools

import jax
import jax.numpy as jnp

import jaxcomm

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 2, 32, 4, 64, 61


def rotate(x, positions):
    """Rotate heads (batch, tokens, heads, size) by positions; RoPE."""
    angle = positions[:, :, None, None] * 1e4 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    turned = jax.lax.complex(*jnp.split(x, 2, axis=-1)) * jnp.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def norm(x):
    """Scale each token to a mean square of one."""
    return x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


def loss_of(params, words, labels, tokens, *, attend, enter, leave):
    """Return the sum; ``enter`` and ``leave`` stand around what ``model`` splits."""
    x, positions = params["embedding"][words], tokens.positions
    for w in params["layers"]:
        h = enter(norm(x))
        q, k, v = (jnp.einsum("btd,dnh->btnh", h, w[name]) for name in "qkv")
        q, k = rotate(q, positions), rotate(k, positions)
        x = x + leave(jnp.einsum("btnh,nhd->btd", attend(q, k, v), w["o"]))
        h = jax.nn.gelu(enter(norm(x)) @ w["up"])
        x = x + leave(h @ w["down"])
    scores = jax.nn.log_softmax(norm(x) @ params["embedding"].T)
    found = jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]
    return -jnp.where(tokens.is_padding, 0, found).sum()


def make_loss(mesh, specs):
    """Return the loss on a mesh; both axes' collectives are jaxcomm's."""

    def local(params, words, labels, tokens):
        # Gradients of what all ranks of the ring share are summed over ``context``.
        params = jaxcomm.pcast(params, "context", to="varying")
        between = {
            "attend": jaxcomm.attention.attention_fn("context", tokens, is_causal=True),
            # The gradient of the cast is the sum that the way back needs.
            "enter": lambda x: jaxcomm.pcast(x, "model", to="varying"),
            "leave": lambda x: jaxcomm.psum(x, "model"),
        }
        loss = loss_of(params, words, labels, tokens, **between)
        return jaxcomm.psum(loss, "context") / LENGTH

    split = jax.P(None, "context")
    return jax.shard_map(
        local, mesh=mesh, in_specs=(specs, split, split, split), out_specs=jax.P()
    )


def make_params(key):
    """Draw the parameters, and say which dimension ``model`` splits."""
    size = WIDTH // HEADS
    shapes = dict.fromkeys("qkv", (WIDTH, HEADS, size)) | {
        "o": (HEADS, size, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)
    }  # fmt: skip
    by_column, by_row = jax.P(None, "model"), jax.P("model")
    specs = {name: by_row if name in ("o", "down") else by_column for name in shapes}
    keys = iter(jax.random.split(key, LAYERS * len(shapes) + 1))

    def draw(shape):
        return jax.random.normal(next(keys), shape) / WIDTH**0.5

    params = {
        "embedding": draw((VOCABULARY, WIDTH)),
        "layers": [{n: draw(s) for n, s in shapes.items()} for _ in range(LAYERS)],
    }
    return params, {"embedding": jax.P(), "layers": [specs] * LAYERS}


def main():
    """Train on a mesh and on one device, and compare losses."""
    size = len(jax.devices())
    model = 2 if size % 2 == 0 else 1
    shape, automatic = (model, size // model), (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(shape, ("model", "context"), axis_types=automatic)
    params, specs = make_params(jax.random.key(0))
    words = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, VOCABULARY)
    labels = jnp.roll(words, -1, axis=1)
    layout = jaxcomm.Layout("zigzag", size // model, LENGTH)
    batch, tokens = layout.reorder((words, labels))
    _, natural = jaxcomm.Layout("contiguous", 1, LENGTH).reorder(words)
    causal = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    same = {"attend": causal, "enter": lambda x: x, "leave": lambda x: x}

    def on_one_device(params):
        return loss_of(params, words, labels, natural, **same) / LENGTH

    step = jax.jit(jax.value_and_grad(make_loss(mesh, specs)))
    alone, ours, theirs = jax.jit(jax.value_and_grad(on_one_device)), params, params
    for i in range(10):
        loss, gradients = step(ours, *batch, tokens)
        expected, wanted = alone(theirs)
        ours = jax.tree.map(lambda p, g: p - 0.1 * g, ours, gradients)
        theirs = jax.tree.map(lambda p, g: p - 0.1 * g, theirs, wanted)
        assert abs(float(loss - expected)) < 1e-4, (loss, expected)  # float32
        if i % 3 == 0:
            print(f"step {i + 1}: loss {loss:.4f}, on one device {expected:.4f}")
    compiled = step.lower(ours, *batch, tokens).compile()
    print(f"{dict(mesh.shape)}: {jaxcomm.collectives_of(compiled)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
