"""What programs for CUDA call, and what is said where cuDNN cannot be had."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import waiting

from jaxcomm import compat
from jaxcomm.attention.kernels import cudnn_support, gpus
from jaxcomm.attention.schedules.zigzag import Zigzag
from jaxcomm.attention.strategies.ring import Ring


def _cudnn_calls(text):
    """Return the name and operand types of each call of cuDNN, as a set."""
    calls = re.findall(r"@(__cudnn\$\w+)\(.*: \(([^)]*)\) ->", text)
    return {(name, types.replace("tensor", "")) for name, types in calls}


def test_programs_for_cuda_call_cudnn_with_blocks_and_grouped_heads(lower):
    options = {"implementation": "cudnn", "shape": (2, 20, 4, 64)}
    found = _cudnn_calls(lower(**options))
    query, back = "<2x5x4x64xbf16>", "<2x2x4x64xbf16>"
    key, front_key = "<2x5x2x64xbf16>", "<2x3x2x64xbf16>"
    assert found == {
        ("__cudnn$fmhaSoftmax", ", ".join(types))
        for types in (
            (query, key, key),
            (query, front_key, front_key),
            (back, key, key),
        )
    }


def test_zigzag_of_an_even_length_has_no_branch_for_a_gpu_to_wait_at(lower):
    text = lower(implementation="cudnn")
    assert "stablehlo.case" not in text
    assert {types for _, types in _cudnn_calls(text)} == {
        "<2x6x4x64xbf16>, <2x6x2x64xbf16>, <2x6x2x64xbf16>",
        # A tile.
        "<2x3x4x64xbf16>, <2x3x2x64xbf16>, <2x3x2x64xbf16>",
    }
    striped = lower(implementation="cudnn", schedule="striped")
    assert "stablehlo.case" in striped


@pytest.mark.parametrize("options", [{"is_causal": False}, {"schedule": "striped"}])
def test_small_rings_are_no_loop_on_a_mesh_of_gpus(lower, options):
    def has_loop(platform, **more):
        """On a mesh of devices that need not be here."""
        device = platform and jax.sharding.AbstractDevice("a GPU", None, platform)
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.sharding.AbstractMesh(
            (4,), ("context",), auto, abstract_device=device
        )
        more |= {"implementation": "cudnn", "mesh": mesh, **options}
        return "stablehlo.while" in lower(**more)

    assert has_loop(None)
    assert has_loop("cpu", grads=True)
    # Whatever devices this process has, and whoever has asked for them.
    assert not has_loop("gpu", grads=True)
    assert has_loop("gpu", strategy=Ring(unrolled_ranks=3))


def test_tracing_starts_no_backends():
    """Of the program of another machine, before jax.distributed.initialize."""
    program = """
import jax, jax.numpy as jnp
from jax._src import xla_bridge
import jaxcomm

kind = (jax.sharding.AxisType.Auto,)
mesh = jax.sharding.AbstractMesh((2,), ("context",), kind)
split = jax.P(None, "context")
layout = jaxcomm.Layout("zigzag", 2, 8)
ring = jax.shard_map(
    lambda *x: jaxcomm.ring_attention(
        *x, axis_name="context", is_causal=True, layout=layout,
        positions=layout.positions_of(jax.lax.axis_index("context"))),
    mesh=mesh, in_specs=split, out_specs=split)
x = jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.bfloat16)
assert jax.eval_shape(ring, x, x, x).shape == x.shape
assert not xla_bridge.backends_are_initialized()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        timeout=waiting.HANG_SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_their_gradients_take_the_global_residual_and_output(lower):
    text = lower(implementation="cudnn", grads=True, schedule="striped")
    found = {call for call in _cudnn_calls(text) if "Backward" in call[0]}
    query, key, lse = "<2x{}x4x64xbf16>", "<2x{}x2x64xbf16>", "<2x4x{}xf32>"
    types = ", ".join((query, key, key, lse, query, query))
    assert found == {
        ("__cudnn$fmhaSoftmaxBackward", types.format(*[tokens] * 6))
        for tokens in (6, 5)
    }
    assert set(re.findall(r"mask_type\\22: \\22(\w+)\\22", text)) == {"CAUSAL"}


def test_the_gradient_of_the_residual_takes_wider_heads(lower):
    options = {"implementation": "cudnn", "grads": True, "return_residual": True}
    text = lower(**options)
    found = _cudnn_calls(text)
    forward = [types for name, types in found if "Backward" not in name]
    backward = [types for name, types in found if "Backward" in name]
    assert (len(forward), len(backward)) == (2, 3)
    assert all(types.count("x64xbf16") == 3 for types in forward)
    assert all(types.count("x72xbf16") == 5 for types in backward)


def test_programs_for_other_platforms_call_no_cudnn(lower):
    assert "cudnn" not in lower("cpu", "tpu", grads=True)


def test_without_a_gpu_to_ask_cudnn_is_used_only_by_name(lower):
    assert "cudnn" not in lower()
    assert "cudnn" not in lower(implementation="xla")


def test_one_program_serves_two_platforms(monkeypatch, lower):
    monkeypatch.setattr(cudnn_support, "_why_not_on", lambda gpus, head_size: None)
    text = lower("cpu", "cuda")
    assert _cudnn_calls(text)
    # The other branch is XLA's.
    assert "stablehlo.exponential" in text
    assert not _cudnn_calls(lower("cpu", "cuda", implementation="xla"))


class Nameless(Zigzag):
    name = "mine"

    def blocks(self, length):
        return None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"dtype": jnp.float32},
            "it computes in bfloat16 and float16, and query is fl",
        ),
        ({"shape": (2, 24, 4, 60)}, "the head size is 60, and it takes multiples of 8"),
        ({"shape": (2, 24, 4, 264)}, "the head size is 264, and it takes multiples"),
        ({"shape": (0, 24, 4, 64)}, r"there is nothing to compute \(query \(0, 6"),
        ({"length": 23}, "hold 24 queries and 24 keys, of which 23 and 23 are no pad"),
        ({"schedule": Nameless()}, "the schedule 'mine' does not say which bl"),
    ],
)
def test_what_cudnn_cannot_compute_is_refused_by_name_only(lower, options, reason):
    assert "cudnn" not in lower(**options)
    with pytest.raises(ValueError, match=f"'cudnn' was asked for, but .*{reason}"):
        lower(implementation="cudnn", **options)


def test_a_residual_whose_gradient_needs_too_wide_heads_is_refused(lower):
    options = {"shape": (2, 24, 4, 256), "return_residual": True}
    assert _cudnn_calls(lower(implementation="cudnn", **options))
    with pytest.raises(ValueError, match="makes the head size 264 in the backward"):
        lower(implementation="cudnn", grads=True, **options)


def test_what_cudnn_is_not_for_is_refused(lower):
    with pytest.raises(ValueError, match="platform that is not CUDA"):
        lower("cpu", implementation="cudnn")
    with pytest.raises(ValueError, match="implementation='flash' is not known"):
        lower("cpu", implementation="flash")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "context"), auto)
    options = {"mesh": mesh, "axis_names": {"context"}, "implementation": "cudnn"}
    with pytest.raises(ValueError, match=r"leaves the mesh axes \('data',\) to XLA"):
        lower(**options)


@pytest.mark.parametrize(
    ("capabilities", "version", "head_size", "reason"),
    [
        ([], 91300, 64, "JAX finds no NVIDIA GPU"),
        (["9.0"], None, 64, "JAX finds no cuDNN"),
        (["9.0", "7.5"], 91300, 64, "a GPU has compute capability 7.5, and it needs"),
        (["9.0"], 8907, 64, "the cuDNN found has version 8907, and 90000 is needed"),
        (["10.3"], 91000, 64, "the cuDNN found has version 91000, and 91100"),
        (["8.6"], 91300, 136, "the head size is 136, and on a GPU of compute cap"),
        (["8.6"], 91300, 128, None),
        (["9.0", "12.0"], 91300, 256, None),
        (["10.3"], 91100, 256, None),
    ],
)
def test_reasons_of_a_machine(
    monkeypatch, gpu, capabilities, version, head_size, reason
):
    found = [gpu(capability) for capability in capabilities]
    monkeypatch.setattr(gpus, "local", lambda: found)
    monkeypatch.setattr(compat, "cudnn_version", lambda: version)
    found = cudnn_support.fused_attention_reason(head_size)
    assert (found or "").startswith(reason or "")
    assert bool(found) == bool(reason)


@pytest.fixture
def unlike_any_known(monkeypatch):
    """A JAX that is not as jaxcomm knows it; forget afterwards what it said."""
    compat.cudnn_attention_mismatch.cache_clear()
    yield monkeypatch
    compat.cudnn_attention_mismatch.cache_clear()


def _moved(error):
    def found():
        raise error

    return found


@pytest.mark.parametrize(
    ("name", "found", "reason"),
    [
        (
            "_cudnn_signatures_found",
            lambda: (("query",), ("query", "key")),
            "calls cuDNN's attention in a way that this jaxcomm does not know",
        ),
        ("_cudnn", _moved(ImportError()), "keeps cuDNN's attention elsewhere"),
        ("_cudnn", _moved(AttributeError()), "keeps cuDNN's attention elsewhere"),
    ],
)
def test_a_jax_that_has_another_cudnn_is_left_alone(
    unlike_any_known, lower, name, found, reason
):
    unlike_any_known.setattr(compat, name, found)
    assert reason in (cudnn_support.fused_attention_reason() or "")
    assert "cudnn" not in lower()
    with pytest.raises(ValueError, match=reason):
        lower(implementation="cudnn")


def test_this_jax_is_as_jaxcomm_knows_it():
    assert compat.cudnn_attention_mismatch() is None


def test_ulysses_calls_cudnn_with_the_whole_sequence_in_its_order(lower):
    options = {"strategy": "ulysses", "key_heads": 4, "implementation": "cudnn"}
    text = lower(grads=True, **options)
    assert {types.count("<2x24x1x64xbf16>") for _, types in _cudnn_calls(text)} == {
        3,
        5,
    }
    assert set(re.findall(r"mask_type\\22: \\22(\w+)\\22", text)) == {"CAUSAL"}


def test_all_gather_calls_cudnn_without_a_mask(lower):
    options = {"strategy": "all_gather", "implementation": "cudnn"}
    with pytest.raises(ValueError, match="'all_gather' masks by positions"):
        lower(**options)
    assert _cudnn_calls(lower(is_causal=False, **options))
