"""The rivals of ring attention, as programs for CUDA, which no GPU is needed for."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxcomm.bench.gpu import attention


@pytest.mark.parametrize(
    ("transform", "kernels"),
    [
        (lambda f: f, ["__cudnn$fmhaSoftmax"]),
        (
            attention.forward_and_backward,
            ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"],
        ),
    ],
    ids=["forward", "backward"],
)
def test_gathered_attention_is_one_kernel(transform, kernels, timer, monkeypatch):
    """Not one that XLA is left to split over the devices."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    split = jax.P(None, "i")
    program = transform(timer.program(attention.gathered("cudnn"), split))
    sharding = jax.NamedSharding(timer.mesh, split)
    block = [
        jax.ShapeDtypeStruct((1, 1024, heads, 128), jnp.bfloat16, sharding=sharding)
        for heads in (32, 8, 8)
    ]
    with jax.numpy_dtype_promotion("standard"):
        lowered = program.trace(*block).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert sorted(re.findall(r"custom_call @(\S+?)\(", text)) == kernels
    # The queries of a rank, and all keys.
    assert "tensor<1x512x32x128xbf16>, tensor<1x1024x8x128xbf16>" in text
