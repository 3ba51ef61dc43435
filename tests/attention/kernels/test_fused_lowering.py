"""What programs for CUDA call, and what is said where cuDNN cannot be had."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxcomm import compat
from jaxcomm.attention.kernels import cudnn_support, gpus
from jaxcomm.attention.kernels.operands import HopConfig, Operands
from jaxcomm.attention.kernels.primitive import hop_forward
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.mask import Mask, Tokens
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.ring_attention import ring_attention
from jaxcomm.attention.schedules.block import Block, Blocks
from jaxcomm.attention.schedules.registry import SCHEDULES
from jaxcomm.attention.schedules.zigzag import Zigzag
from jaxcomm.attention.strategies.ring import Ring

SPLIT = jax.P(None, "context")
# Theirs lowers for any platform on any machine.
attend = functools.partial(
    ring_attention,
    axis_name="context",
    is_causal=True,
    backend="xla",
    positions=TRUSTED,
)


@pytest.fixture
def lower(mesh_of):
    """Lower the ring of 4, or its gradients, for platforms; return StableHLO."""

    def text_of(
        platforms, *, shape=(2, 24, 4, 64), key_heads=2, grads=False, **options
    ):
        dtype = options.pop("dtype", jnp.bfloat16)
        mesh = options.pop("mesh", None) or mesh_of(4)
        mapping = {"axis_names": options.pop("axis_names", set(mesh.axis_names))}
        length = options.pop("length", shape[1])
        layout = Layout(options.pop("schedule", "zigzag"), 4, length)
        local = functools.partial(attend, layout=layout, **options)
        specs = {"in_specs": SPLIT, "out_specs": SPLIT}
        run = jax.shard_map(local, mesh=mesh, **specs, **mapping)
        if grads:
            run = jax.grad(lambda *x, f=run: _sum(f(*x)), (0, 1, 2))
        query = jax.ShapeDtypeStruct(shape, dtype)
        key = jax.ShapeDtypeStruct((*shape[:2], key_heads, shape[3]), dtype)
        traced = jax.jit(run).trace(query, key, key)
        return traced.lower(lowering_platforms=platforms).as_text()

    return text_of


def _sum(tree):
    return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(tree))


def _cudnn_calls(text):
    """Return the name and operand types of each call of cuDNN, as a set."""
    calls = re.findall(r"@(__cudnn\$\w+)\(.*: \(([^)]*)\) ->", text)
    return {(name, types.replace("tensor", "")) for name, types in calls}


def test_programs_for_cuda_call_cudnn_with_blocks_and_grouped_heads(lower):
    options = {"implementation": "cudnn", "shape": (2, 20, 4, 64)}
    found = _cudnn_calls(lower(("cuda",), **options))
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
    text = lower(("cuda",), implementation="cudnn")
    assert "stablehlo.case" not in text
    assert {types for _, types in _cudnn_calls(text)} == {
        "<2x6x4x64xbf16>, <2x6x2x64xbf16>, <2x6x2x64xbf16>",
        # A tile.
        "<2x3x4x64xbf16>, <2x3x2x64xbf16>, <2x3x2x64xbf16>",
    }
    striped = lower(("cuda",), implementation="cudnn", schedule="striped")
    assert "stablehlo.case" in striped


def _abstract_mesh(platform=None):
    """A mesh of four devices that need not be here."""
    kinds = (jax.sharding.AxisType.Auto,)
    device = platform and jax.sharding.AbstractDevice("a GPU", None, platform)
    return jax.sharding.AbstractMesh((4,), ("context",), kinds, abstract_device=device)


@pytest.mark.parametrize("options", [{"is_causal": False}, {}, {"schedule": "striped"}])
def test_small_rings_are_no_loop_on_a_mesh_of_gpus(lower, options):
    def has_loop(platform, **more):
        mesh = _abstract_mesh(platform)
        more |= {"implementation": "cudnn", "mesh": mesh, **options}
        return "stablehlo.while" in lower(("cuda",), **more)

    assert has_loop(None)
    assert has_loop("cpu", grads=True)
    # Whatever devices this process has, and whoever has asked for them.
    assert not has_loop("gpu")
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
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_their_gradients_take_the_global_residual_and_output(lower):
    text = lower(("cuda",), implementation="cudnn", grads=True, schedule="striped")
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
    text = lower(("cuda",), **options)
    found = _cudnn_calls(text)
    forward = [types for name, types in found if "Backward" not in name]
    backward = [types for name, types in found if "Backward" in name]
    assert (len(forward), len(backward)) == (2, 3)
    assert all(types.count("x64xbf16") == 3 for types in forward)
    assert all(types.count("x72xbf16") == 5 for types in backward)


def test_a_hop_needs_no_mesh_and_no_devices():
    query = jax.ShapeDtypeStruct((2, 8, 4, 64), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((8,), jnp.int32)
    whole = Block((0, 8), (0, 8))
    config = HopConfig(
        scale=1.0,
        mask=Mask(None, None, 8, 8),
        query_segments=(8,),
        key_segments=(8,),
        implementation="cudnn",
        blocks=Blocks(whole, whole, whole),
    )
    tokens = Tokens(positions)
    run = jax.jit(functools.partial(hop_forward, config=config))
    traced = run.trace(Operands(query, query, query, tokens, tokens))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(_cudnn_calls(text)) == 1
    # One kind of block, so no branches, which a GPU waits at.
    assert "stablehlo.case" not in text


def test_an_abstract_mesh_is_enough(lower):
    mesh = _abstract_mesh()
    assert _cudnn_calls(lower(("cuda",), implementation="cudnn", mesh=mesh))


@pytest.mark.parametrize("platforms", [("cpu",), ("tpu",), ("cpu", "tpu")])
def test_programs_for_other_platforms_call_no_cudnn(lower, platforms):
    assert "cudnn" not in lower(platforms, grads=True)


def test_without_a_gpu_to_ask_cudnn_is_used_only_by_name(lower):
    assert "cudnn" not in lower(("cuda",))
    assert "cudnn" not in lower(("cuda",), implementation="xla")


def test_one_program_serves_two_platforms(monkeypatch, lower):
    monkeypatch.setattr(cudnn_support, "_why_not_on", lambda gpus, head_size: None)
    text = lower(("cpu", "cuda"))
    assert _cudnn_calls(text)
    # The other branch is XLA's.
    assert "stablehlo.exponential" in text
    assert not _cudnn_calls(lower(("cpu", "cuda"), implementation="xla"))


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
    ],
)
def test_what_cudnn_cannot_compute_is_refused_by_name_only(lower, options, reason):
    assert "cudnn" not in lower(("cuda",), **options)
    with pytest.raises(ValueError, match=f"'cudnn' was asked for, but .*{reason}"):
        lower(("cuda",), implementation="cudnn", **options)


def test_a_schedule_that_names_no_blocks_is_refused_by_name(lower):
    class Nameless(Zigzag):
        name = "mine"

        def blocks(self, length):
            return None

    with pytest.raises(ValueError, match="the schedule 'mine' does not say which bl"):
        lower(("cuda",), implementation="cudnn", schedule=Nameless())


def test_cudnn_on_another_platform_is_refused(lower):
    with pytest.raises(ValueError, match="platform that is not CUDA"):
        lower(("cpu",), implementation="cudnn")


def test_a_residual_whose_gradient_needs_too_wide_heads_is_refused(lower):
    options = {"shape": (2, 24, 4, 256), "return_residual": True}
    assert _cudnn_calls(lower(("cuda",), implementation="cudnn", **options))
    with pytest.raises(ValueError, match="makes the head size 264 in the backward"):
        lower(("cuda",), implementation="cudnn", grads=True, **options)


def test_mesh_axes_left_to_xla_are_refused(lower):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "context"), auto)
    options = {"mesh": mesh, "axis_names": {"context"}, "implementation": "cudnn"}
    with pytest.raises(ValueError, match=r"leaves the mesh axes \('data',\) to XLA"):
        lower(("cuda",), **options)


def test_other_implementations_are_refused(lower):
    with pytest.raises(ValueError, match="implementation='flash' is not known"):
        lower(("cpu",), implementation="flash")


class Gpu:
    """What is asked of a device."""

    def __init__(self, compute_capability):
        self.compute_capability = compute_capability


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
def test_reasons_of_a_machine(monkeypatch, capabilities, version, head_size, reason):
    found = [Gpu(capability) for capability in capabilities]
    monkeypatch.setattr(gpus, "local", lambda: found)
    monkeypatch.setattr(compat, "cudnn_version", lambda: version)
    found = cudnn_support.fused_attention_reason(head_size)
    assert (found or "").startswith(reason or "")
    assert bool(found) == bool(reason)


def test_this_machine_says_that_it_has_no_gpu():
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    assert cudnn_support.fused_attention_reason() == "JAX finds no NVIDIA GPU"


@pytest.fixture
def unlike_any_known(monkeypatch):
    """A JAX that is not as jaxcomm knows it; forget afterwards what it said."""
    compat.cudnn_attention_mismatch.cache_clear()
    yield monkeypatch
    compat.cudnn_attention_mismatch.cache_clear()


def test_a_jax_that_calls_cudnn_otherwise_is_left_alone(unlike_any_known, lower):
    signatures = (("query",), ("query", "key"))
    unlike_any_known.setattr(compat, "_cudnn_signatures_found", lambda: signatures)
    reason = "calls cuDNN's attention in a way that this jaxcomm does not know"
    assert reason in (cudnn_support.fused_attention_reason() or "")
    assert "cudnn" not in lower(("cuda",))
    with pytest.raises(ValueError, match=reason):
        lower(("cuda",), implementation="cudnn")


@pytest.mark.parametrize(
    "error", [ImportError("No module"), AttributeError("no attribute")]
)
def test_a_jax_that_has_moved_cudnn_is_left_alone(unlike_any_known, lower, error):
    def moved():
        raise error

    unlike_any_known.setattr(compat, "_cudnn", moved)
    assert "keeps cuDNN's attention elsewhere" in (
        cudnn_support.fused_attention_reason() or ""
    )
    assert "cudnn" not in lower(("cuda",))


def test_this_jax_is_as_jaxcomm_knows_it():
    assert compat.cudnn_attention_mismatch() is None
    assert set(SCHEDULES) == {"contiguous", "striped", "zigzag"}


def test_ulysses_calls_cudnn_with_the_whole_sequence_in_its_order(lower):
    options = {"strategy": "ulysses", "key_heads": 4, "implementation": "cudnn"}
    text = lower(("cuda",), grads=True, **options)
    assert {types.count("<2x24x1x64xbf16>") for _, types in _cudnn_calls(text)} == {
        3,
        5,
    }
    assert set(re.findall(r"mask_type\\22: \\22(\w+)\\22", text)) == {"CAUSAL"}
    halo = {"strategy": "all_gather", "implementation": "cudnn"}
    with pytest.raises(ValueError, match="'all_gather' masks by positions"):
        lower(("cuda",), **halo)
    assert _cudnn_calls(lower(("cuda",), is_causal=False, **halo))
