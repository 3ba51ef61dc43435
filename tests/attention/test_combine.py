import dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split

from jaxcomm.attention import combine


@pytest.mark.parametrize(
    ("scatter", "check_vma"), [(None, False), (None, True), (0, True), (2, False)]
)
def test_attention_to_parts_of_a_cache_is_attention_to_all_of_it(scatter, check_vma):
    shape, keys = (4, 4, 4, 8), (4, 40, 2, 8)
    query, key, value, (grad_out, grad_lse) = split.inputs(shape, keys)
    sees = np.array([7, 40, 0, 23])  # The cache is filled so far; one is empty.

    def local(query, key, value):
        rank = jax.lax.axis_index("context")
        key, value = (jnp.repeat(x, 2, 2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->btns", query, key) * 8**-0.5
        at = rank * key.shape[1] + jnp.arange(key.shape[1])[None, None, None]
        scores = jnp.where(at < sees[:, None, None, None], scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, -1)
        safe = jnp.where(jnp.isneginf(lse), 0, lse)
        out = jnp.einsum("btns,bsnh->btnh", jnp.exp(scores - safe[..., None]), value)
        # As the softmax of no key is.
        out = jnp.where(jnp.isneginf(lse)[..., None], jnp.nan, out)
        return combine(out, lse, "context", scatter=scatter)

    spec = jax.P() if scatter is None else jax.P(*[None] * scatter, "context")
    in_specs = (jax.P(), split.SPLIT, split.SPLIT)
    whole = split.sharded(local, 4, in_specs, spec, check_vma=check_vma)
    real = jnp.asarray(sees > 0)[:, None, None]

    def loss(*arrays):
        out, lse = whole(*arrays)
        product = (out * grad_out).sum() + jnp.where(real, lse * grad_lse, 0).sum()
        return product, (out, lse)

    differentiate = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    grads, found = differentiate(query, key, value)
    options = dense.Options(key_lengths=sees)
    expected = dense.attention(query, key, value, options, (grad_out, grad_lse))
    split.assert_close((*found, *grads), expected)


def test_the_log_sum_exp_of_narrow_outputs_stays_exact():
    rng = np.random.default_rng(0)
    outs, lses = rng.normal(size=(4, 1, 2, 4, 8)), 40 + rng.normal(size=(4, 1, 2, 4))
    outs = jnp.asarray(outs, jnp.bfloat16)

    def local(out, lse):
        return combine(out[0], lse[0], "context")

    specs = jax.P("context"), jax.P("context")
    whole = split.sharded(local, 4, specs, jax.P())
    out, lse = jax.jit(whole)(outs, jnp.asarray(lses, jnp.float32))
    weights = np.exp(lses - lses.max(0))
    right = (weights[..., None] * np.asarray(outs, np.float64)).sum(0)
    right /= weights.sum(0)[..., None]
    np.testing.assert_allclose(lse, lses.max(0) + np.log(weights.sum(0)), rtol=1e-6)
    # Rounded once.
    np.testing.assert_allclose(np.asarray(out, np.float64), right, rtol=2**-8)
