"""What programs for CUDA call, and what is said where cuDNN cannot be had."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import starts

from jaxcomm.attention.kernels import blocks, cudnn
from jaxcomm.attention.kernels.flash import kernel as flash
from jaxcomm.attention.kernels.flash import library
from jaxcomm.attention.kernels.selection import kernels_of
from jaxcomm.attention.pairs import Block
from jaxcomm.attention.schedules import Zigzag
from jaxcomm.attention.strategies import loop
from jaxcomm.compat import gpus

CUDNN = {"implementation": "cudnn"}


def _cudnn_calls(text):
    calls = re.findall(r"@__cudnn\$fmhaSoftmax(\w*)\(.*: \(([^)]*)\) ->", text)
    forward, backward = set(), set()
    for name, types in calls:
        found = backward if name == "Backward" else forward
        found.add(" ".join(re.findall(r"tensor<2x([^>]*)xb?f", types)))
    return forward, backward


GRADS = {"grads": True}


@pytest.mark.parametrize(
    ("options", "heads", "forward", "backward"),
    [
        # Blocks and grouped heads.
        ({"shape": (2, 20, 4, 64)}, (4, 2), {(5, 5), (5, 3), (2, 5)}, set()),
        # Its own block and a tile.
        ({}, (4, 2), {(6, 6), (3, 3)}, set()),
        ({"schedule": "striped"} | GRADS, (4, 2), {(6, 6), (5, 5)}, {6, 5}),
        # The whole sequence in its order.
        ({"strategy": "ulysses", "key_heads": 4} | GRADS, (1, 1), {(24, 24)}, {24}),
    ],
)
def test_programs_for_cuda_call_cudnn(lower, options, heads, forward, backward):
    text = lower(**CUDNN, **options)
    found, of_gradients = _cudnn_calls(text)
    key = f"x{heads[1]}x64"
    assert found == {f"{t}x{heads[0]}x64 {s}{key} {s}{key}" for t, s in forward}
    assert {int(types.split("x")[0]) for types in of_gradients} == backward
    # Zigzag of an even length has no branch for a GPU to wait at.
    if options == {} or "schedule" in options:
        assert ("stablehlo.case" in text) == ("schedule" in options)
    if backward:
        kinds = re.findall(r"mask_type\\22: \\22(\w+)\\22", text)
        assert set(kinds) == {"CAUSAL"}


def test_the_gradient_of_the_residual_takes_wider_heads(lower):
    text = lower(grads=True, return_residual=True, **CUDNN)
    forward, backward = _cudnn_calls(text)
    assert (len(forward), len(backward)) == (2, 3)
    assert all(types.count("x64") == 3 for types in forward)
    assert all(types.count("x72") == 5 for types in backward)
    options = {"shape": (2, 24, 4, 256)} | CUDNN
    assert all(_cudnn_calls(lower(grads=True, **options)))
    options["return_residual"] = True
    assert any(_cudnn_calls(lower(**options)))
    with pytest.raises(ValueError, match="makes the head size 264 in the backward"):
        lower(grads=True, **options)


LATENT = {"shape": (2, 24, 4, 192), "value_size": 128}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "striped"},
        {"strategy": "all_gather", "is_causal": False},
        {"strategy": "ulysses", "key_heads": 4, "local_window_size": (5, 0)},
        {"strategy": "halo", "local_window_size": (5, 0), "schedule": "contiguous"},
    ],
)
def test_values_have_heads_of_their_own_size(lower, options):
    if options.get("strategy") == "halo":  # Two hops on GPUs, and else one.
        options = options | {"mesh": _on_gpus(4)}
    forward, backward = _cudnn_calls(lower(**CUDNN, **LATENT, **options, **GRADS))
    assert forward
    assert backward
    for call in (*forward, *backward):
        sizes = [int(x.rpartition("x")[2]) for x in call.split()]
        # Log-sum-exps; and then the output's gradient, and the output.
        del sizes[3:4]
        assert sizes == [192, 192, 128] + [128, 128] * (call in backward)


def test_flash_pads_values_where_cudnn_cannot_serve(lowered, monkeypatch, gpu):
    monkeypatch.setattr(flash, "why_not_on", lambda found: None)
    monkeypatch.setattr(gpus, "local", lambda: [gpu("9.0")])
    monkeypatch.setattr(gpus, "cudnn_version", lambda: 91300)
    how = {"mesh": _on_gpus(4), **GRADS, **LATENT}
    assert kernels_of(lowered(**how)) == {"cudnn"}
    # The other way is for documents in any order.
    beside = {"mesh": _on_gpus(4, data=2), "schedule": "contiguous"}
    for more in ({}, beside):
        found = kernels_of(lowered(ids=True, **how | more))
        assert found == {"flash", "pallas"}
    monkeypatch.setattr(gpus, "cudnn_version", lambda: 90900)
    assert kernels_of(lowered(**how)) == {"flash"}
    text = lowered(**how).as_text()
    calls = re.findall(r"@dew_flash3_mha_(\w*)\(.*: \(([^)]*)\) ->", text)
    assert {name.rpartition("_")[2] for name, _ in calls} == {"fwd", "bwd"}
    assert not any("x128xbf16" in types for _, types in calls)


@pytest.mark.parametrize("schedule", ["zigzag", "striped", "contiguous"])
def test_a_causal_ring_of_four_starts_few_kernels(lowered, monkeypatch, schedule):
    monkeypatch.setattr(flash, "why_not_on", lambda found: None)

    how = {"implementation": "flash", "mesh": _on_gpus(4), "schedule": schedule}

    def count(**more):
        program = lowered(shape=(1, 4096, 8, 64), **how, **more)
        # The keys of a rank are as many elements.
        return starts.of(program, 1024 * 2 * 64)

    # An attention for each block of keys; keys and values that arrive three times.
    once = {"dew_flash3_mha_fwd": 1, "dew_flash3_mha_varlen_fwd": 3}
    assert count() == once | {"sent arrays": 6}
    both = count(grads=True)
    assert both["waits"] == 0
    kernels = {of: n for of, n in both.items() if "flash" in of}
    backward = {"dew_flash3_mha_bwd": 1, "dew_flash3_mha_varlen_bwd": 3}
    assert kernels == once | backward
    # Three times keys and values; and their gradients, first apart, then as one array.
    assert both["sent arrays"] == 6 + 6 + 4
    assert sum(both.values()) <= 30


def _on_gpus(size, platform="gpu", **others):
    """Return a mesh that need not be here; JAX 0.12 lowers Pallas for known GPUs."""
    kind = "NVIDIA H100 80GB HBM3"
    device = platform and jax.sharding.AbstractDevice(kind, None, platform)
    axes = others | {"context": size}
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(
        tuple(axes.values()), tuple(axes), auto, abstract_device=device
    )


def test_auto_is_the_ring_where_a_kernel_serves_no_other(lower):
    """Of so few tokens and heads it gathers keys, by masks that cuDNN does not know."""
    shapes = {"shape": (1, 4096, 6, 128), "key_heads": 2}

    def text(**options):
        return lower(mesh=_on_gpus(4), **shapes, **options)

    auto = {"strategy": "auto"}
    gathered = text(strategy="all_gather")
    assert text(**auto) == gathered
    assert text(**auto, **CUDNN) == text(**CUDNN)
    with pytest.raises(ValueError, match="'all_gather' masks by positions"):
        text(strategy="all_gather", **CUDNN)
    # What the ring cannot do either is said of the ring.
    with pytest.raises(ValueError, match="it computes in bfloat16 and float16"):
        text(dtype=jnp.float32, **auto, **CUDNN)


def test_nobody_looks_at_documents_that_came_with_a_table(lowered, monkeypatch):
    """All ranks know what each sees: nothing is sent before a way is taken."""
    monkeypatch.setattr(flash, "why_not_on", lambda found: None)

    def count(table):
        shapes = {"shape": (1, 4096, 8, 64), "mesh": _on_gpus(4), "ids": True}
        program = lowered(**shapes, implementation="flash", grads=True, table=table)
        return starts.outside_of_branches(program)

    looked, known = count(False), count(True)
    assert looked["all_reduce"] == 1
    assert not any(known[x] for x in ("all_gather", "while", "sort"))
    # Whether a rank holds other tokens.
    assert known["all_reduce"] == 1
    # One each way.
    assert looked["case"] == known["case"] == 2
    # Of the ids that a rank holds.
    assert known["reduce"] <= 2 < looked["reduce"]


@pytest.mark.parametrize(("tokens", "gathers"), [(4096, True), (2**21, False)])
def test_a_document_that_a_border_cuts_is_one_call_more(
    lowered, monkeypatch, tokens, gathers
):
    monkeypatch.setattr(flash, "why_not_on", lambda found: None)
    program = lowered(
        shape=(1, tokens, 8, 64), mesh=_on_gpus(4), ids=True, table=True,
        implementation="flash",
    )  # fmt: skip
    own, fewest, few, many = starts.of_branches(program, 8 * tokens)[:4]
    target = library.TARGETS[2]
    assert own == {target: 1}
    # Keys and values are gathered; and the rows of queries and results are cut out, but
    # where they are all.
    in_one_call = fewest, few, *[many] * gathers
    for each in in_one_call:
        assert (each[target], each["sent arrays"]) == (2, 2)
        assert each.total() <= 18, each
    assert gathers or many[target] == 4


def test_tiles_of_a_rare_branch_do_not_choose_how_arrays_lie(lowered, monkeypatch):
    """Else XLA moves what FlashAttention takes and returns, to their order and back."""
    monkeypatch.setattr(flash, "why_not_on", lambda found: None)

    def orders(platform, ids):
        program = lowered(platform, mesh=_on_gpus(4), ids=ids, grads=True)
        asked = r"LayoutConstraint\(.*result_layouts = \[dense<(.*?)>.*-> tensor<(.*)>"
        found = re.findall(asked, program.as_text())
        return {(order, shape.count("x")) for order, shape in found}

    # Queries, keys and results; numbers of each token and head; of each token.
    descending = {4: "[3, 2, 1, 0]", 3: "[2, 1, 0]", 2: "[1, 0]"}
    assert orders("cuda", True) == {(x, n) for n, x in descending.items()}
    assert not orders("cpu", True)
    assert not orders("cuda", False)


@pytest.mark.parametrize("options", [{"is_causal": False}, {"schedule": "striped"}])
def test_small_rings_are_no_loop_on_a_mesh_of_gpus(lower, options, monkeypatch):
    def has_loop(platform, **more):
        more |= {"mesh": _on_gpus(4, platform), **CUDNN, **options}
        return "stablehlo.while" in lower(**more)

    assert has_loop(None)
    assert has_loop("cpu", grads=True)
    # Whatever devices this process has, and whoever has asked for them.
    assert not has_loop("gpu", grads=True)
    monkeypatch.setattr(loop, "_UNROLLED_RANKS", 3)
    jax.clear_caches()
    assert has_loop("gpu")
    jax.clear_caches()


def test_without_a_gpu_to_ask_cudnn_is_used_only_by_name(lower):
    assert "cudnn" not in lower()
    assert "cudnn" not in lower("cpu", "tpu", grads=True)


def test_one_program_serves_two_platforms(monkeypatch, lower):
    monkeypatch.setattr(cudnn, "_why_not_on", lambda *_, **__: None)
    text = lower("cpu", "cuda")
    assert any(_cudnn_calls(text))
    # The other branch is XLA's.
    assert "stablehlo.exponential" in text


class Nameless(Zigzag):
    name = "mine"

    def blocks(self, length):
        return None


class Oblong(Zigzag):
    def blocks(self, length):
        block = Block((0, length), (0, 3), right=0)
        own, _, later = super().blocks(length)
        return own, block, later


FLOAT32 = {"dtype": jnp.float32}
WHOLE = {"strategy": "ulysses", "key_heads": 4}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (FLOAT32, "it computes in bfloat16 and float16, and query is fl"),
        ({"shape": (2, 24, 4, 60)}, "the head size is 60, and it takes multiples of 8"),
        ({"shape": (2, 24, 4, 264)}, "the head size is 264, and it takes multiples"),
        ({"shape": (0, 24, 4, 64)}, r"there is nothing to compute \(query \(0, 6"),
        ({"length": 23}, "hold 24 queries and 24 keys, of which 23 and 23 are no pad"),
        ({"schedule": Nameless()}, "the schedule 'mine' does not say which bl"),
        ({"schedule": Oblong()}, "a causal block of 6 queries and 3 keys is no square"),
        ({"local_window_size": (5, 0)}, "a window where a rank's keys are its own, wi"),
        (WHOLE | {"is_causal": False, "local_window_size": (5, 2)},
         "its windows end at the query's own key"),
        (WHOLE | {"return_residual": True, "local_window_size": (5, 0)},
         "it is used without a window where return_residual=True"),
        ({"strategy": "all_gather"}, "'all_gather' masks by positions"),
    ],
)  # fmt: skip
def test_what_cudnn_cannot_compute_is_refused_by_name_only(lower, options, reason):
    assert "cudnn" not in lower(**options)
    with pytest.raises(ValueError, match=f"'cudnn' was asked for, but .*{reason}"):
        lower(**CUDNN, **options)
    if options == {"strategy": "all_gather"}:
        assert any(_cudnn_calls(lower(is_causal=False, **CUDNN, **options)))


def test_axes_that_are_left_to_xla_are_refused(lower):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "context"), auto)
    with pytest.raises(ValueError, match=r"leaves the mesh axes \('data',\) to XLA"):
        lower(mesh=mesh, axis_names={"context"}, **CUDNN)


HEADS_OF_192 = "heads of keys have size 192 and those of values 128, "


@pytest.mark.parametrize(
    ("capabilities", "version", "sizes", "reason"),
    [
        ([], 91300, (64, 64), "JAX finds no NVIDIA GPU"),
        (["9.0"], None, (64, 64), "JAX finds no cuDNN"),
        (["9.0", "7.5"], 91300, (64, 64), "a GPU has compute capability 7.5, and it"),
        (["9.0"], 8907, (64, 64), "the cuDNN found has version 8907, and 90000 is"),
        (["9.0"], 91001, (64, 64), "the cuDNN found has version 91001, and 91002 is"),
        (["10.3"], 91000, (64, 64), "the cuDNN found has version 91000, and 91100"),
        (["8.6"], 91300, (136, 136), "the head size is 136, and it takes no such"),
        (["8.6"], 91300, (128, 128), None),
        (["9.0"], 90400, (256, 256), "the head size is 256, for which a GPU of comp"),
        (["9.0"], 91300, (256, 256), None),
        (["9.0", "12.0"], 91300, (256, 256), "the head size is 256, and it takes no"),
        (["10.0"], 92200, (256, 256), "the head size is 256, for which a GPU of comp"),
        (["10.3"], 92300, (256, 256), None),
        # Of latent attention, and of others.
        (["9.0"], 91002, (192, 128), None),
        (["9.0"], 90900, (192, 128), HEADS_OF_192 + "for which a GPU of compute "
         "capability 9.0 needs cuDNN 91002, and 90900 was found"),
        (["8.6"], 91300, (192, 128), HEADS_OF_192 + "and it takes no such heads on a "
         "GPU of compute capability 8.6"),
        (["8.6"], 91300, (64, 32), "heads of keys have size 64 and those of values 32"),
        (["9.0"], 91002, (64, 32), None),
        (["9.0"], 91200, (200, 136), "heads of keys have size 200 and those of values"),
        (["9.0"], 91300, (200, 136), None),
        (["10.0"], 91100, (192, 128), None),
        (["10.0"], 92300, (192, 136), "heads of keys have size 192 and those of"),
    ],
)  # fmt: skip
def test_reasons_of_a_machine(monkeypatch, gpu, capabilities, version, sizes, reason):
    found = [gpu(capability) for capability in capabilities]
    monkeypatch.setattr(gpus, "local", lambda: found)
    monkeypatch.setattr(gpus, "cudnn_version", lambda: version)
    found = cudnn.fused_attention_reason(*sizes)
    assert (found or "").startswith(reason or "")
    assert bool(found) == bool(reason)


def _raises(error):
    def found():
        raise error

    return found


@pytest.mark.parametrize(
    ("name", "found", "reason"),
    [
        ("_cudnn_signatures_found", lambda: ("query",), "in a way that this jaxcomm"),
        ("_cudnn", _raises(ImportError()), "keeps cuDNN's attention elsewhere"),
        ("_cudnn", _raises(AttributeError()), "keeps cuDNN's attention elsewhere"),
    ],
)
def test_a_jax_that_has_another_cudnn_is_left_alone(
    request, monkeypatch, lower, name, found, reason
):
    assert gpus.cudnn_attention_mismatch() is None  # This one is known.
    # A trace knows which kernels may serve it, and JAX keeps traces.
    for clear in (gpus.cudnn_attention_mismatch.cache_clear, jax.clear_caches):
        request.addfinalizer(clear)
        clear()
    monkeypatch.setattr(gpus, name, found)
    assert reason in (cudnn.fused_attention_reason() or "")
    assert "cudnn" not in lower()
    with pytest.raises(ValueError, match=reason):
        lower(**CUDNN)


# Of float32, and of what float16 cannot hold, above or below.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e6])
def test_delta_in_columns_loses_no_bits(dtype, size):
    rng = np.random.default_rng(0)
    delta = jnp.asarray(size * rng.standard_normal((2, 16, 4)), jnp.float32)
    x = jnp.ones((2, 16, 4, 8), dtype)

    @jax.jit
    def product(x, delta):
        query, key, value, out, grad = blocks.with_delta(x, x, x, x, x, delta)
        assert all(y.shape[-1] == 16 and y.dtype == dtype for y in (query, key, out))
        ours = [y[..., 8:].astype(jnp.float32) for y in (query, key, value, grad)]
        return *((a * b).sum(-1) for a, b in zip(ours[::2], ours[1::2], strict=True)), (
            jnp.abs(out).max()
        )

    scores, found, out = product(x, delta)
    # Where a GPU is asked to round and widen, XLA may leave out both.
    assert "reduce_precision" in product.lower(x, delta).as_text()
    assert not scores.any()
    assert not out
    # Two bits above float32's rounding; the smallest part is a float16 times 2 ** -20.
    np.testing.assert_allclose(found, -delta, rtol=2**-22, atol=2**-33)
