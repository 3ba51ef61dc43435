"""Which kernel a program for CUDA has, and what is said where it has none."""

import contextlib
import functools
import importlib
import types
import warnings

import jax
import jax.numpy as jnp
import pytest
from hops import CASES, arrays_of

import jaxcomm
from jaxcomm import attention, compat
from jaxcomm.attention.kernels import (
    cudnn_support,
    gpus,
    pallas,
    pallas_support,
    selection,
)
from jaxcomm.attention.layout import Layout
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.ring_attention import ring_attention

SHAPE = (1, 64, 4, 32)
OPTIONS = {
    "window": {"local_window_size": (8, 0)},
    "cap": {"logits_soft_cap": 5.0},
    "slopes": {"alibi_slopes": jnp.ones(4)},
}


class Gpu:
    compute_capability = "9.0"
    device_kind = "NVIDIA H200"


@pytest.fixture
def hopper(monkeypatch):
    """A machine with one GPU and a cuDNN that serves it; no warning was given yet."""
    monkeypatch.setattr(gpus, "local", lambda: [Gpu()])
    monkeypatch.setattr(compat, "cudnn_version", lambda: 91300)
    with contextlib.suppress(ImportError):  # JAX 0.12 asks the GPU as well.
        info = importlib.import_module("jax._src.pallas.triton.gpu_info")
        found = types.SimpleNamespace(compute_capability=90)
        monkeypatch.setattr(info, "get_gpu_info", lambda: found)
    selection._warn_once.cache_clear()
    yield
    selection._warn_once.cache_clear()


@pytest.fixture
def enable_x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def lower(mesh_of):
    """Lower attention of 2 devices, or its gradients, for CUDA; return StableHLO."""

    def text_of(
        dtype=jnp.bfloat16,
        has_grads=False,
        platform="cuda",
        ids=False,
        as_text=True,
        **more,
    ):
        layout = Layout("zigzag", 2, SHAPE[1])
        attend = functools.partial(
            ring_attention,
            axis_name="context",
            layout=layout,
            is_causal=True,
            backend="xla",
            positions=TRUSTED,
            **more,
        )

        def local(x, segments):
            given = {"query_segment_ids": segments, "key_value_segment_ids": segments}
            return attend(x, x, x, **(given if ids else {}))

        split = jax.P(None, "context")
        run = jax.shard_map(local, mesh=mesh_of(2), in_specs=split, out_specs=split)
        if has_grads:
            run = jax.grad(lambda x, ids, f=run: f(x, ids).astype("float32").sum())
        x = jax.ShapeDtypeStruct(SHAPE, dtype)
        tokens = jax.ShapeDtypeStruct(SHAPE[:2], jnp.int32)
        traced = jax.jit(run).trace(x, tokens)
        program = traced.lower(lowering_platforms=(platform,))
        return program.as_text() if as_text else program

    return text_of


def kernels_in(text):
    names = ("forward", "grad_queries", "grad_keys")
    return {name for name in names if f"jaxcomm_attention_{name}" in text}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("has_grads", [False, True])
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"cudnn"}),
        ({"local_window_size": (8, 0)}, {"pallas"}),
        ({"implementation": "xla"}, {"xla"}),
        ({"platform": "cpu"}, {"xla"}),
    ],
    ids=str,
)
def test_a_program_says_what_computes_it(lower, options, names, has_grads):
    program = lower(as_text=False, has_grads=has_grads, **options)
    assert attention.kernels_of(program) == names
    assert attention.kernels_of(program.as_text(debug_info=True)) == names


def test_a_compiled_program_says_it_too():
    x = jnp.ones((1, 16, 2, 8))
    other = jax.jit(jnp.sin).lower(x)
    attend = jax.jit(
        lambda x: jaxcomm.dot_product_attention(x, x, x, axis_name="context")
    )
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        compiled = attend.lower(x).compile()
    assert attention.kernels_of(compiled) == {"xla"}
    assert attention.kernels_of(other) == attention.kernels_of(other.compile()) == set()
    with pytest.raises(TypeError, match="expected a lowered or compiled program"):
        attention.kernels_of(attend)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "options", [*OPTIONS.values(), {"ids": True}, {"dtype": jnp.float32}], ids=str
)
def test_what_cudnn_cannot_do_our_kernels_do(lower, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lower(has_grads=True, **options)
    assert kernels_in(text) == {"forward", "grad_queries", "grad_keys"}
    assert "cudnn" not in text


@pytest.mark.usefixtures("hopper")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_becomes_a_kernel(case):
    operands, config, grad = arrays_of(case)
    rows = jnp.zeros(operands.query.shape[:3])
    for run, arrays in (
        (pallas.hop_forward, (operands,)),
        (pallas.hop_backward, (operands, grad, rows, rows)),
    ):
        traced = jax.jit(functools.partial(run, config=config)).trace(*arrays)
        assert kernels_in(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("strategy", ["all_gather", "halo", "ulysses", "ring"])
def test_every_strategy_uses_them(lower, strategy):
    options = {"local_window_size": (8, 0), "logits_soft_cap": 5.0}
    assert kernels_in(lower(strategy=strategy, **options))


@pytest.mark.usefixtures("hopper")
def test_a_causal_window_over_whole_sequences_is_cudnns_if_large_or_asked(
    lower, monkeypatch
):
    options = {"strategy": "ulysses", "local_window_size": (8, 0), "has_grads": True}
    assert "cudnn" in lower(implementation="cudnn", **options)
    assert kernels_in(lower(**options))
    monkeypatch.setattr(cudnn_support, "_LEAST_WINDOW", 8)
    jax.clear_caches()
    assert "cudnn" in lower(**options)
    assert kernels_in(lower(strategy="ring", local_window_size=(8, 0)))


@pytest.mark.usefixtures("hopper")
def test_plain_causal_attention_is_cudnns_unless_asked_otherwise(lower):
    assert "cudnn" in lower()
    assert not kernels_in(lower())
    by_name = lower(implementation="pallas")
    assert kernels_in(by_name)
    assert "cudnn" not in by_name
    tiles = lower(implementation="xla", local_window_size=(8, 0))
    assert not kernels_in(tiles)
    assert not kernels_in(lower(platform="cpu", local_window_size=(8, 0)))


@pytest.mark.usefixtures("hopper")
def test_a_program_that_uses_tiles_says_why_once(lower, enable_x64):
    why = "Not cuDNN: it computes in bfloat16 and float16, and query is float64."
    with pytest.warns(RuntimeWarning, match=why):
        lower(jnp.float64)
    lower(jnp.float64)  # Once: a second warning would be an error here.
    selection._warn_once.cache_clear()
    lower(jnp.float64, platform="cpu")
    lower(jnp.float64, implementation="xla")


def test_a_kernel_asked_for_by_name_is_had_or_refused(lower, enable_x64):
    if not gpus.local():
        with pytest.raises(ValueError, match="JAX finds no NVIDIA GPU"):
            lower(implementation="pallas")
    with pytest.raises(ValueError, match=r"'pallas' was asked for.*query is float64"):
        lower(jnp.float64, implementation="pallas")
    with pytest.raises(ValueError, match="for a platform that is not CUDA"):
        lower(implementation="pallas", platform="cpu")
    with pytest.raises(ValueError, match="was asked for, but it takes a window where"):
        lower(implementation="cudnn", local_window_size=(8, 0))


@pytest.mark.parametrize(
    ("capability", "reason"),
    [("7.5", "a GPU has compute capability 7.5"), ("8.0", None)],
)
def test_reasons_of_a_machine(monkeypatch, capability, reason):
    gpu = Gpu()
    gpu.compute_capability = capability
    found = gpus.why_none_serves([gpu])
    assert (found or "").startswith(reason or "")
    assert bool(found) == bool(reason)


def test_a_gpu_that_jax_has_no_kernels_for_is_left_alone(hopper, monkeypatch, lower):
    pytest.importorskip("jax._src.pallas.triton.gpu_info")
    monkeypatch.setattr(Gpu, "device_kind", "a GPU")
    with pytest.raises(ValueError, match="makes no kernels for 'a GPU'"):
        lower(implementation="pallas")


def test_reasons_of_operands():
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.bfloat16)
    large = jax.ShapeDtypeStruct((1, 8, 2, 264), jnp.bfloat16)
    none = jax.ShapeDtypeStruct((1, 0, 2, 16), jnp.bfloat16)
    reason = pallas_support.why_not_traced
    assert reason(x, x, x) is None
    assert "264" in (reason(x, x, large) or "")
    assert "nothing to compute" in (reason(none, x, x) or "")


def test_a_jax_without_triton_is_left_alone(monkeypatch, lower):
    def gone():
        raise ImportError("No module")

    compat.triton_mismatch.cache_clear()
    monkeypatch.setattr(compat, "_triton_parameters", gone)
    with pytest.raises(ValueError, match="makes no kernels with Triton"):
        lower(implementation="pallas")
    compat.triton_mismatch.cache_clear()
