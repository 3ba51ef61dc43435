"""One kernel over a whole sequence on one GPU: the best that anybody can install."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu.timer import Timer
from jaxcomm.attention.kernels.flash import kernel as flash
from jaxcomm.attention.kernels.flash import library
from jaxcomm.attention.kernels.flash.pieces import Starts

# A document sees none of another's keys, in attention by jax.nn.
_MASKED = "xla"


def best_kernel(timer: Timer, needs_documents: bool = False) -> str:
    """Returns "flash" where FlashAttention-3 serves, else "cudnn", or "xla".

    Args:
      timer: of which devices.
      needs_documents: whether tokens see their document alone. JAX gives cuDNN's
        packed sequences no backward pass that fits.
    """
    if timer.mesh.devices.flat[0].platform == "cpu":
        return _MASKED
    if flash.why_not_on(jax.local_devices()) is None:
        return "flash"
    return _MASKED if needs_documents else "cudnn"


def one_kernel(kernel: str, lengths: tuple[int, ...] = (), window: int | None = None):
    """Returns causal attention as one kernel, with its gradients.

    Args:
      kernel: "flash", "cudnn" or "xla".
      lengths: of the documents, or () for none.
      window: how many tokens a token sees, itself among them; or None.

    Returns:
      Function of query, key and value, (1, T, N, D), (1, T, K, D) and (1, T, K, D).
    """
    if kernel == "flash":
        return jax.jit(_by_flash(lengths, window))
    ids = np.repeat(np.arange(len(lengths)), lengths)
    mask = jnp.asarray(ids[:, None] == ids)[None, None] if lengths else None
    options: dict[str, Any] = {"is_causal": True, "implementation": kernel}
    if window is not None:
        options["local_window_size"] = (window - 1, 0)
    return jax.jit(
        functools.partial(jax.nn.dot_product_attention, mask=mask, **options)
    )


def _by_flash(lengths, window):
    starts = None
    if lengths:
        at = jnp.asarray([0, *np.cumsum(lengths)], jnp.int32)
        starts = Starts(at, at)
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"is_causal": True, "window": (left, 0)}
    options["longest"] = (max(lengths, default=0),) * 2

    def packed(x):
        return x if starts is None else x[0]

    def unpacked(x):
        return x if starts is None else x[None]

    def run(query, key, value):
        return library.forward(
            packed(query), packed(key), packed(value), starts,
            scale=query.shape[-1] ** -0.5, **options,
        )  # fmt: skip

    @jax.custom_vjp
    def attend(query, key, value):
        return unpacked(run(query, key, value)[0])

    def forward(query, key, value):
        out, lse = run(query, key, value)
        return unpacked(out), (query, key, value, out, lse)

    def backward(kept, grad):
        query, key, value, out, lse = kept
        grads = library.backward(
            packed(query), packed(key), packed(value), lse, out, packed(grad), starts,
            scale=query.shape[-1] ** -0.5, **options,
        )  # fmt: skip
        return tuple(map(unpacked, grads))

    attend.defvjp(forward, backward)
    return attend
