"""A kernel of one's own: it computes the hops of every strategy."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxcomm
from jaxcomm.attention.kernels import Grads, Hop, Kernel, Saved

BATCH, LENGTH, HEADS, KEY_HEADS, HEAD_SIZE = 2, 64, 16, 8, 16


@dataclasses.dataclass(frozen=True)
class Plain(Kernel):
    """Softmax over all scores of a hop at once, with every mask.

    Attributes:
      most_keys: of a hop. A program is compiled for each number.
    """

    most_keys: int = 4096
    name = "plain"
    # With other options jaxcomm refuses the call: a bias, dropout, a soft cap, ALiBi.
    options = frozenset({"segment_ids"})

    def why_not(self, hop: Hop) -> str | None:
        """Say why it cannot compute a hop, of which shapes and dtypes are known."""
        keys = hop.key.shape[1]
        if keys > self.most_keys:
            return f"it holds the scores of {self.most_keys} keys, and a hop has {keys}"
        return None

    def forward(self, hop: Hop):
        """Return the output and the log-sum-exp: 0 and -inf of rows that see no key."""
        scores, _, _, value = self._scores(hop)
        lse = jax.nn.logsumexp(scores, -1)
        top = jnp.where(jnp.isneginf(lse), 0, lse)
        weights = jnp.exp(scores - top[..., None])
        out = jnp.einsum("btkgs,bskv->btkgv", weights, value)
        rows = hop.query.shape[:3]
        return out.reshape(*rows, value.shape[3]), lse.reshape(rows)

    def backward(self, hop: Hop, saved: Saved):
        """Return the gradients by this hop's keys; ``saved`` is of the keys of all."""
        scores, query, key, value = self._scores(hop)
        rows = query.shape[:4]
        lse, delta = (x.reshape(*rows, 1) for x in (saved.lse, saved.delta))
        grad_out = saved.grad_out.reshape(*rows, -1).astype(scores.dtype)
        weights = jnp.exp(scores - lse)
        grad_scores = jnp.einsum("btkgv,bskv->btkgs", grad_out, value) - delta
        grad_scores = hop.scores.scale * weights * grad_scores
        return Grads(
            jnp.einsum("btkgs,bskd->btkgd", grad_scores, key).reshape(hop.query.shape),
            jnp.einsum("btkgs,btkgd->bskd", grad_scores, query),
            jnp.einsum("btkgs,btkgv->bskv", weights, grad_out),
        )

    def _scores(self, hop: Hop):
        """Return (B, T, K, G, S), G query heads for each key head, and the arrays."""
        arrays = (x.astype(hop.sum_dtype) for x in (hop.query, hop.key, hop.value))
        query, key, value = arrays
        query = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
        scores = hop.scores.scale * jnp.einsum("btkgd,bskd->btkgs", query, key)
        seen = hop.pairs.allowed()[:, :, None, None]  # positions and documents
        return jnp.where(seen, scores, -jnp.inf), query, key, value


def main():
    """Compare results and gradients with one device, in a ring and in Ulysses."""
    size = len(jax.devices())
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((size,), ("context",), axis_types=auto)
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    *inputs, cotangent = (
        jax.random.normal(key, (BATCH, LENGTH, n, HEAD_SIZE))
        for key, n in zip(keys, heads, strict=True)
    )

    def with_gradients(attend):
        def both(arrays, cotangent):
            out, pullback = jax.vjp(attend, *arrays)
            return out, *pullback(cotangent)

        return jax.jit(both)

    def on_one_device(*arrays):
        return jax.nn.dot_product_attention(*arrays, is_causal=True)

    expected = with_gradients(on_one_device)(inputs, cotangent)
    layout = jaxcomm.Layout("zigzag", size, LENGTH)
    (inputs, cotangent), tokens = layout.reorder((inputs, cotangent))
    split = jax.P(None, "context")
    for strategy in ("ring", "ulysses"):

        def local(query, key, value, tokens, strategy=strategy):
            return jaxcomm.ring_attention(
                *(query, key, value, "context", tokens),
                is_causal=True,
                strategy=strategy,
                implementation=Plain(),
            )

        whole = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)
        program = with_gradients(lambda *x, whole=whole: whole(*x, tokens))
        found = [tokens.restore(x) for x in program(inputs, cotangent)]
        pairs = zip(found, expected, strict=True)
        error = max(float(jnp.abs(a - b).max()) for a, b in pairs)
        assert error < 1e-4, error  # float32, sums in another order
        names = jaxcomm.attention.kernels.kernels_of(program.lower(inputs, cotangent))
        print(f"{strategy}: equal to one device, with gradients, by {', '.join(names)}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # GPUs are as many as there are
    jax.config.update("jax_default_matmul_precision", "highest")  # to compare
    main()
