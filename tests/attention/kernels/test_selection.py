"""Which kernel a program for CUDA has, and what is said where it has none."""

import contextlib
import importlib
import logging
import types
import warnings

import jax
import jax.numpy as jnp
import pytest
from hops import CASES, both, hop_of
from split import over_ring

import jaxcomm
from jaxcomm.attention.kernels import cudnn, kernels_of, selection
from jaxcomm.attention.kernels.flash import library
from jaxcomm.attention.kernels.pallas.kernel import PALLAS
from jaxcomm.compat import gpus

AUTO = jax.sharding.AxisType.Auto
WINDOW = {"local_window_size": (8, 0)}
ULYSSES = {"strategy": "ulysses", "key_heads": 4} | WINDOW
LATENT = {"shape": (2, 24, 4, 192), "value_size": 128}
ALL = {"forward", "grad_queries", "grad_keys"}


@pytest.fixture
def hopper(monkeypatch, gpu):
    """A machine with one GPU and a cuDNN that serves it; no warning was given yet."""
    found = gpu("9.0")
    monkeypatch.setattr(gpus, "local", lambda: [found])
    monkeypatch.setattr(gpus, "cudnn_version", lambda: 91300)
    with contextlib.suppress(ImportError):  # JAX 0.12 asks the GPU as well.
        info = importlib.import_module("jax._src.pallas.triton.gpu_info")
        capability = types.SimpleNamespace(compute_capability=90)
        monkeypatch.setattr(info, "get_gpu_info", lambda: capability)
    selection._warn_of_tiles.cache_clear()
    yield found
    selection._warn_of_tiles.cache_clear()


def kernels_in(text):
    return {name for name in ALL if f"jaxcomm_attention_{name}" in text}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("platform", "options", "name"),
    [
        ("cuda", {}, "cudnn"),
        ("cuda", {"grads": True, **WINDOW}, "pallas"),
        ("cuda", {"grads": True, "implementation": "xla"}, "xla"),
        ("cpu", WINDOW, "xla"),
        # By name.
        ("cuda", {"implementation": "pallas"}, "pallas"),
        ("cuda", {"implementation": "xla", **WINDOW}, "xla"),
        ("cuda", {"implementation": "cudnn", "grads": True, **ULYSSES}, "cudnn"),
        # Of each strategy, what cuDNN cannot do.
        ("cuda", {"strategy": "all_gather", **WINDOW}, "pallas"),
        ("cuda", {"strategy": "halo", **WINDOW}, "pallas"),
        ("cuda", ULYSSES, "pallas"),
        ("cuda", {"grads": True, "logits_soft_cap": 5.0}, "pallas"),
        ("cuda", {"alibi_slopes": jnp.ones(4)}, "pallas"),
        ("cuda", {"ids": True}, "pallas"),
        ("cuda", {"dtype": jnp.float32}, "pallas"),
        # Of latent attention.
        ("cuda", {"grads": True, **LATENT}, "cudnn"),
        ("cuda", {"ids": True, **LATENT}, "pallas"),
        ("cuda", {"grads": True, "shape": (2, 24, 4, 512)}, "pallas"),
    ],
)
def test_a_program_says_what_computes_it(lowered, platform, options, name):
    program = lowered(platform, **options)
    text = program.as_text(debug_info=True)
    assert kernels_of(program) == kernels_of(text) == {name}
    assert ("__cudnn" in text) == (name == "cudnn")
    ours = ALL if options.get("grads") else {"forward"}
    assert kernels_in(program.as_text()) == (ours if name == "pallas" else set())


@pytest.mark.usefixtures("hopper")
def test_a_faster_kernel_that_is_not_installed_is_told_once(lowered, monkeypatch):
    monkeypatch.setattr(library, "install_line", lambda: "pip install it")
    lack = library._Lack("it is missing", is_package=True)
    monkeypatch.setattr(library, "_lack", lambda: lack)
    with pytest.warns(UserWarning, match="would serve this GPU.*: pip install it"):
        lowered("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered("cuda", grads=True)


@pytest.mark.usefixtures("hopper")
def test_in_plain_jit_a_mesh_of_three_axes_has_a_kernel():
    """All axes are manual, so that a GPU's kernel is not XLA's to split."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "context"), (AUTO,) * 3)
    x = jax.ShapeDtypeStruct((4, 32, 4, 64), jnp.bfloat16)

    def loss(x):
        with jaxcomm.using(backend="xla"):
            out = jaxcomm.dot_product_attention(
                x, x, x, is_causal=True, strategy="ring",
                sharding=jax.NamedSharding(mesh, jax.P("data", "context", "model")),
            )  # fmt: skip
        return out.astype(jnp.float32).sum()

    for program in (loss, jax.grad(loss)):
        lowered = jax.jit(program).trace(x).lower(lowering_platforms=("cuda",))
        assert kernels_of(lowered) == {"cudnn"}


def test_a_compiled_program_says_it_too():
    x = jnp.ones((1, 16, 2, 8))
    other = jax.jit(jnp.sin).lower(x)
    attend = jax.jit(
        lambda x: jaxcomm.dot_product_attention(x, x, x, sharding=over_ring(2))
    )
    assert kernels_of(attend.lower(x).compile()) == {"xla"}
    assert kernels_of(other) == kernels_of(other.compile()) == set()
    with pytest.raises(TypeError, match="expected a lowered or compiled program"):
        kernels_of(attend)


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
    hop, grad = hop_of(case)
    traced = both.trace(hop.replace(kernels=(PALLAS,)), grad)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert kernels_in(text) == ALL
    assert ("jaxcomm_attention_grad_bias" in text) == (case.bias is not None)


@pytest.mark.usefixtures("hopper")
def test_a_large_causal_window_over_whole_sequences_is_cudnns(
    request, lower, monkeypatch
):
    monkeypatch.setattr(cudnn, "_LEAST_WINDOW", 8)
    # A trace knows which kernels may serve it, and JAX keeps traces.
    request.addfinalizer(jax.clear_caches)
    jax.clear_caches()
    assert "cudnn" in lower(grads=True, **ULYSSES)
    assert kernels_in(lower(strategy="ring", **WINDOW))


@pytest.mark.usefixtures("hopper")
def test_a_program_that_uses_tiles_says_why_once(lower):
    why = "Not 'cudnn': it computes in bfloat16 and float16, and query is float64."
    wide = {"dtype": jnp.float64}
    with jax.enable_x64(True):
        with pytest.warns(RuntimeWarning, match=why):
            lower(**wide)
        lower(**wide)  # Once: a second warning would be an error here.
        selection._warn_of_tiles.cache_clear()
        lower("cpu", **wide)
        lower(implementation="xla", **wide)
    why = r"many times slower.*Not 'pallas': the head size is 520, and it takes 512"
    with pytest.warns(RuntimeWarning, match=why):
        lower(shape=(2, 24, 4, 520))


@pytest.mark.usefixtures("hopper")
def test_a_program_logs_why_a_faster_kernel_does_not_compute_it(
    lowered, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "jaxcomm.attention")
    monkeypatch.setattr(gpus, "cudnn_version", lambda: 90900)
    selection._log_choice.cache_clear()
    for _ in range(2):
        assert kernels_of(lowered(**LATENT)) == {"pallas"}
    (line,) = caplog.messages
    assert line.startswith("ring_attention: 'pallas' computes this. Not 'flash': ")
    assert "Not 'cudnn': heads of keys have size 192 and those of values 128, " in line
    caplog.clear()
    lowered(implementation="pallas", **LATENT)
    lowered("cpu", **LATENT)
    assert not caplog.messages


def test_a_kernel_asked_for_by_name_is_had_or_refused(lower):
    if not gpus.local():
        with pytest.raises(ValueError, match="JAX finds no NVIDIA GPU"):
            lower(implementation="pallas")
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=r"'pallas' was asked for.*query is float64"),
    ):
        lower(dtype=jnp.float64, implementation="pallas")
    with pytest.raises(ValueError, match="for a platform that is not CUDA"):
        lower("cpu", implementation="pallas")


def test_a_gpu_that_is_too_old_is_left_alone(gpu):
    assert gpus.why_none_serves([gpu("8.0")]) is None
    reason = gpus.why_none_serves([gpu("7.5")])
    assert reason.startswith("a GPU has compute capability 7.5")


def test_large_heads_are_for_gpus_with_room(monkeypatch, gpu, lower):
    monkeypatch.setattr(gpus, "local", lambda: [gpu("9.0"), gpu("8.9")])
    wide = {"shape": (2, 24, 4, 512), "implementation": "pallas"}
    with pytest.raises(ValueError, match=r"512, and on a GPU of compute cap\w+ 8\.9"):
        lower(**wide)


def test_a_gpu_that_jax_has_no_kernels_for_is_left_alone(hopper, lower):
    pytest.importorskip("jax._src.pallas.triton.gpu_info")
    hopper.device_kind = "a GPU"
    with pytest.raises(ValueError, match="makes no kernels for 'a GPU'"):
        lower(implementation="pallas")


def test_reasons_of_shapes():
    of, large, none = (
        jax.ShapeDtypeStruct((1, tokens, 2, size), jnp.bfloat16)
        for tokens, size in ((8, 16), (8, 520), (0, 16))
    )

    def reason(query, key, value):
        return PALLAS.why_not(
            hop_of(CASES[0])[0].replace(query=query, key=key, value=value)
        )

    assert reason(of, of, of) is None
    assert "520" in (reason(of, of, large) or "")
    wide, single = (
        jax.ShapeDtypeStruct((1, 8, 2, 512), dtype) for dtype in ("bfloat16", "float32")
    )
    assert reason(wide, wide, wide) is None
    assert "takes 256 at most" in (reason(single, single, single) or "")
    assert "nothing to compute" in (reason(none, of, of) or "")


def test_a_jax_without_triton_is_left_alone(request, monkeypatch, lower):
    def gone():
        raise ImportError("No module")

    request.addfinalizer(gpus.triton_mismatch.cache_clear)
    gpus.triton_mismatch.cache_clear()
    monkeypatch.setattr(gpus, "_triton_parameters", gone)
    with pytest.raises(ValueError, match="makes no kernels with Triton"):
        lower(implementation="pallas")
