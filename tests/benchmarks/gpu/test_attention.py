"""The rivals of ring attention, as programs for CUDA, which no GPU is needed for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import jaxcomm
from bench.gpu import attention
from bench.gpu.standstill import standstill
from jaxcomm.communicator.backends import BACKENDS


def test_gathered_attention_is_one_kernel(timer, monkeypatch):
    """And one backward. Not one that XLA is left to split over the devices."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    split = jax.P(None, "i")
    program = timer.program(attention.gathered("cudnn"), split)
    program = attention.forward_and_backward(program)
    sharding = jax.NamedSharding(timer.mesh, split)
    block = [
        jax.ShapeDtypeStruct((1, 1024, heads, 128), jnp.bfloat16, sharding=sharding)
        for heads in (32, 8, 8)
    ]
    with jax.numpy_dtype_promotion("standard"):
        lowered = program.trace(*block).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    kernels = sorted(re.findall(r"custom_call @(\S+?)\(", text))
    assert kernels == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    # The queries of a rank, and all keys.
    assert "tensor<1x512x32x128xbf16>, tensor<1x1024x8x128xbf16>" in text


def test_the_limit_is_of_a_ring_that_sends_nothing_and_leaves_nothing(timer):
    names, counted = set(BACKENDS), jaxcomm.counters().live
    with standstill() as backend:

        def attend(q, k, v):
            size = jax.lax.axis_size("i")
            layout = jaxcomm.Layout("zigzag", size, size * q.shape[1])
            held = layout.positions_of(jax.lax.axis_index("i"))
            return jaxcomm.ring_attention(
                q, k, v, axis_name="i", layout=layout, positions=held, is_causal=True,
                backend=backend,
            )  # fmt: skip

        split = jax.P(None, "i")
        x = jnp.ones((1, 32, 2, 8))
        program = attention.forward_and_backward(timer.program(attend, split))
        compiled = program.lower(x, x, x).compile()
        assert not re.search(r"collective|custom_call_target", compiled.as_text())
        # Of values that are all alike every mean is one of them.
        np.testing.assert_allclose(compiled(x, x, x)[0], x.size, rtol=1e-6)
        assert BACKENDS[backend].name == "standstill"
    assert (set(BACKENDS), jaxcomm.counters().live) == (names, counted)
