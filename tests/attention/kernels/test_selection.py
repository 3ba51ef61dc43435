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

WINDOW = {"local_window_size": (8, 0)}


@pytest.fixture
def hopper(monkeypatch, gpu):
    """A machine with one GPU and a cuDNN that serves it; no warning was given yet."""
    found = gpu("9.0")
    monkeypatch.setattr(gpus, "local", lambda: [found])
    monkeypatch.setattr(compat, "cudnn_version", lambda: 91300)
    with contextlib.suppress(ImportError):  # JAX 0.12 asks the GPU as well.
        info = importlib.import_module("jax._src.pallas.triton.gpu_info")
        capability = types.SimpleNamespace(compute_capability=90)
        monkeypatch.setattr(info, "get_gpu_info", lambda: capability)
    selection._warn_once.cache_clear()
    yield found
    selection._warn_once.cache_clear()


@pytest.fixture
def enable_x64():
    with jax.enable_x64(True):
        yield


def kernels_in(text):
    names = ("forward", "grad_queries", "grad_keys")
    return {name for name in names if f"jaxcomm_attention_{name}" in text}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("platform", "options", "names"),
    [
        ("cuda", {}, {"cudnn"}),
        ("cuda", {"grads": True, **WINDOW}, {"pallas"}),
        ("cuda", {"grads": True, "implementation": "xla"}, {"xla"}),
        ("cpu", WINDOW, {"xla"}),
        # By name.
        ("cuda", {"implementation": "pallas"}, {"pallas"}),
        ("cuda", {"implementation": "xla", **WINDOW}, {"xla"}),
        # Of each strategy, what cuDNN cannot do.
        ("cuda", {"strategy": "all_gather", **WINDOW}, {"pallas"}),
        ("cuda", {"strategy": "halo", **WINDOW}, {"pallas"}),
        ("cuda", {"strategy": "ulysses", "key_heads": 4, **WINDOW}, {"pallas"}),
    ],
)
def test_a_program_says_what_computes_it(lowered, platform, options, names):
    program = lowered(platform, **options)
    assert attention.kernels_of(program) == names
    assert attention.kernels_of(program.as_text(debug_info=True)) == names
    assert ("cudnn" in program.as_text()) == (names == {"cudnn"})
    assert bool(kernels_in(program.as_text())) == (names == {"pallas"})


def test_a_compiled_program_says_it_too(mesh_of):
    x = jnp.ones((1, 16, 2, 8))
    other = jax.jit(jnp.sin).lower(x)
    attend = jax.jit(
        lambda x: jaxcomm.dot_product_attention(
            x, x, x, axis_name="context", mesh=mesh_of(2)
        )
    )
    assert attention.kernels_of(attend.lower(x).compile()) == {"xla"}
    assert attention.kernels_of(other) == attention.kernels_of(other.compile()) == set()
    with pytest.raises(TypeError, match="expected a lowered or compiled program"):
        attention.kernels_of(attend)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 5.0},
        {"alibi_slopes": jnp.ones(4)},
        {"ids": True},
        {"dtype": jnp.float32},
    ],
    ids=str,
)
def test_what_cudnn_cannot_do_our_kernels_do(lower, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lower(grads=True, **options)
    assert kernels_in(text) == {"forward", "grad_queries", "grad_keys"}
    assert "cudnn" not in text


@pytest.mark.usefixtures("hopper")
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(i), marks=() if i % 3 == 2 else pytest.mark.thorough)
        for i, case in enumerate(CASES)
    ],
)
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
def test_a_causal_window_over_whole_sequences_is_cudnns_if_large_or_asked(
    lower, monkeypatch
):
    options = {"strategy": "ulysses", "key_heads": 4, "grads": True, **WINDOW}
    assert "cudnn" in lower(implementation="cudnn", **options)
    monkeypatch.setattr(cudnn_support, "_LEAST_WINDOW", 8)
    jax.clear_caches()
    assert "cudnn" in lower(**options)
    assert kernels_in(lower(strategy="ring", **WINDOW))


@pytest.mark.usefixtures("hopper")
def test_a_program_that_uses_tiles_says_why_once(lower, enable_x64):
    why = "Not cuDNN: it computes in bfloat16 and float16, and query is float64."
    with pytest.warns(RuntimeWarning, match=why):
        lower(dtype=jnp.float64)
    lower(dtype=jnp.float64)  # Once: a second warning would be an error here.
    selection._warn_once.cache_clear()
    lower("cpu", dtype=jnp.float64)
    lower(dtype=jnp.float64, implementation="xla")


def test_a_kernel_asked_for_by_name_is_had_or_refused(lower, enable_x64):
    if not gpus.local():
        with pytest.raises(ValueError, match="JAX finds no NVIDIA GPU"):
            lower(implementation="pallas")
    with pytest.raises(ValueError, match=r"'pallas' was asked for.*query is float64"):
        lower(dtype=jnp.float64, implementation="pallas")
    with pytest.raises(ValueError, match="for a platform that is not CUDA"):
        lower("cpu", implementation="pallas")
    with pytest.raises(ValueError, match="was asked for, but it takes a window where"):
        lower(implementation="cudnn", **WINDOW)


def test_a_gpu_that_is_too_old_is_left_alone(gpu):
    assert gpus.why_none_serves([gpu("8.0")]) is None
    reason = gpus.why_none_serves([gpu("7.5")])
    assert reason.startswith("a GPU has compute capability 7.5")


def test_a_gpu_that_jax_has_no_kernels_for_is_left_alone(hopper, lower):
    pytest.importorskip("jax._src.pallas.triton.gpu_info")
    hopper.device_kind = "a GPU"
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
