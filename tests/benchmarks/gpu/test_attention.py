"""The rivals of ring attention, as programs for CUDA, which no GPU is needed for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense import Options
from dense import attention as dense_attention
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from bench.gpu import attention, masks, one_kernel

SPLIT = jax.P(None, "i")


def test_gathered_attention_is_one_kernel(timer, monkeypatch):
    """And one backward. Not one that XLA is left to split over the devices."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    program = timer.program(attention.gathered("cudnn"), SPLIT)
    program = attention.forward_and_backward(program)
    of = {"dtype": jnp.bfloat16, "sharding": jax.NamedSharding(timer.mesh, SPLIT)}
    block = [jax.ShapeDtypeStruct((1, 1024, n, 128), **of) for n in (32, 8, 8)]
    with jax.numpy_dtype_promotion("standard"):
        lowered = program.trace(*block).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    kernels = sorted(re.findall(r"custom_call @(\S+?)\(", text))
    assert kernels == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    # The queries of a rank, and all keys.
    assert "tensor<1x512x32x128xbf16>, tensor<1x1024x8x128xbf16>" in text


@pytest.mark.parametrize("options", [{"window": 5}, {"lengths": (20, 7, 5)}])
def test_what_is_timed_with_masks_equals_dense_attention(timer, options):
    """Both of them: ours, and the kernel that it is compared with."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 2, 8)), jnp.float32)
    function = functools.partial(
        masks.attend, schedule="contiguous", strategy="all_gather", **options
    )
    ids = np.repeat(np.arange(3), (20, 7, 5))[None]
    documents = {"query_ids": ids, "key_ids": ids}
    masked = documents if "lengths" in options else {"window": (4, 0)}
    expected, *_ = dense_attention(x, x, x, Options(is_causal=True, **masked))
    for found in (
        timer.program(function, SPLIT)(x, x, x),
        one_kernel.one_kernel("xla", **options)(x, x, x),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
