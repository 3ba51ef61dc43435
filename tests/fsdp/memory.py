"""Temporary memory of three FSDP programs, in layers' parameters; JSON, as a script."""

import json

import jax
import jax.numpy as jnp

import jaxcomm

LAYERS, WIDTH = 8, 64
SHAPES = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
SPLIT = jax.P(None, "i")


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def gathering(x, w):
    return layer(x, jaxcomm.all_gather(w, "i", tiled=True))


def fsdp_scan(_, x, params):
    return jaxcomm.fsdp_scan(layer, x, params, "i", specs=SPLIT)


def temporaries(scan, body, **options):
    """Return the temporaries of a gradient, in sizes of one layer's parameters."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(params, x):
        return (scan(body, x, params)[0] ** 2).sum()

    f = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(SPLIT, jax.P("i")), out_specs=SPLIT
    )
    params = {k: jnp.zeros((LAYERS, *shape)) for k, shape in SHAPES.items()}
    compiled = jax.jit(f).lower(params, jnp.zeros((16, WIDTH))).compile(options)
    one_layer = sum(4 * a * b for a, b in SHAPES.values())
    return compiled.memory_analysis().temp_size_in_bytes / one_layer


def measure(**options):
    return {
        "kept": temporaries(jax.lax.scan, gathering, **options),
        "plain": temporaries(jax.lax.scan, jax.checkpoint(gathering), **options),
        "ours": temporaries(fsdp_scan, None, **options),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
