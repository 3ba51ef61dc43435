"""Mamba 2 by the kernel of another library, mamba2-jax, over documents in zigzag."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from mamba2_jax.modeling import ssd_forward  # pyright: ignore[reportMissingImports]

import jaxcomm
from jaxcomm.attention import segment_ids_of, state_scan
from jaxcomm.attention.state import Mamba2, StateKernel

LENGTH = 93


@dataclasses.dataclass(frozen=True)
class SSD(StateKernel):
    """It computes pieces of the sequence. JAX derives the gradients."""

    name = "mamba2_jax"
    state = "diagonal"
    chunk: int = 8

    def run(self, rows, state, kept=None):
        """Return outputs, and the states behind the pieces."""
        # It knows no documents. A gate of -60 leaves nothing of the state.
        gate = jnp.where(rows.begins[..., None], -60, rows.gate)
        none, step = jnp.zeros(gate.shape[-1]), jnp.ones_like(gate)
        out, state = ssd_forward(
            rows.value, step, gate, rows.key, rows.query, self.chunk, D=none,
            dt_bias=none, dt_min=1, dt_max=1, return_final_states=True,
            initial_states=jnp.swapaxes(state, -1, -2)[:, None],
        )  # fmt: skip
        return rows.scale * out, jnp.swapaxes(jnp.asarray(state), -1, -2)


def gradients(size, kernel, batch, ids):
    """Return the gradients of a loss of the batch on so many devices."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((size,), ("context",), automatic, devices=jax.devices()[:size])
    split = jax.P(None, "context")
    layout = jaxcomm.Layout("zigzag", size, LENGTH)
    batch, tokens = layout.reorder(batch, segment_ids=ids)

    @jax.shard_map(mesh=mesh, in_specs=split, out_specs=split)
    def layer(batch, tokens):
        query, key, value, gate = batch
        return state_scan(query, key, value, gate, "context", tokens, kernel=kernel)

    loss = jax.jit(jax.value_and_grad(lambda x: (layer(x, tokens) ** 2).sum()))
    return jax.tree.map(np.asarray, tokens.restore(loss(batch)[1]))


def main():
    """Compare all devices, by that kernel, with one device by jaxcomm's."""
    draw, ids = np.random.default_rng(0), segment_ids_of([60, 1, 2, 30])
    query, key, value = draw.normal(size=(3, 2, LENGTH, 2, 8)).astype(np.float32)
    gate = -0.2 * np.abs(draw.normal(size=(2, LENGTH, 2))).astype(np.float32)
    batch, names = (query, key, value, gate), ("query", "key", "value", "gate")
    found = gradients(len(jax.devices()), SSD(), batch, ids)
    expected = gradients(1, Mamba2(), batch, ids)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert error < 1e-4, (name, error)  # sums of gates lose digits behind -60
        print(f"gradient of {name}: equal to one device within 1e-04")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
