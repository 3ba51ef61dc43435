"""Adapters for MaxText, levanter and EasyDeL, behind doubles of their interfaces.

The doubles have the names and shapes of MaxText's ``AttentionOp`` (2026), of haliax 1.4
and levanter 1.2, and of EasyDeL 0.3's operations. The packages need more than these
tests install, or another JAX.
"""

import dataclasses
import enum
import functools
import runpy
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
B, T, N, K, D = 2, 16, 4, 2, 8
AXES = "data", "context", "model"
IDS = np.repeat([[0, 1, 2]], B, 0).repeat([5, 8, 3], 1)
Kind = enum.Enum(
    "Kind", {"GLOBAL": "global", "LOCAL": "local_sliding", "CHUNK": "chunk"}
)


def adapter(name):
    return runpy.run_path(str(FOLDER / f"{name}_attention.py"))


def meshed():
    auto = (jax.sharding.AxisType.Auto,) * 3
    return jax.make_mesh((2, 2, 2), AXES, axis_types=auto)


def inputs():
    rng = np.random.default_rng(0)
    shapes = (B, T, N, D), (B, T, K, D), (B, T, K, D)
    return [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]


def expected(query, key, value, window=None, ids=None, **options):
    mask = np.tril(np.ones((T, T), bool))
    if window is not None:
        mask &= np.arange(T)[:, None] - np.arange(T) <= window
    mask = mask[None]
    if ids is not None:
        mask = mask & (ids[:, :, None] == ids[:, None])
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask[:, None], **options
    )


def assert_split_and_equal(attend, wanted):
    """It attends over jaxcomm's ring, forward and backward, as one device does."""
    (found, grads), (out, wanted_grads) = map(with_gradients, (attend, wanted))
    np.testing.assert_allclose(found, out, atol=2e-5)
    for one, other in zip(grads, wanted_grads, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    assert [each.axes for each in jaxcomm.communicators()] == [("context",)]


def with_gradients(attend):
    """Return what it gives and the gradients of the sum of squares: one program."""

    @jax.jit
    def both(*arrays):
        out, gradients = jax.vjp(attend, *arrays)
        return out, gradients(2 * out)

    return both(*inputs())


class AttentionOp:
    """What the adapter sees of MaxText's."""

    flash_axis_names_q = "batch", "heads", "length", "kv"
    dropout_rate = 0.0
    attn_logits_soft_cap = None

    def __init__(
        self, mesh, attention_kernel="jaxcomm", kind=Kind.GLOBAL, balance=False
    ):
        self.mesh, self.attention_kernel, self.attention_type = (
            mesh,
            attention_kernel,
            kind,
        )
        self.sliding_window_size = 5
        self.config = types.SimpleNamespace(context_parallel_load_balance=balance)

    def apply_attention(
        self, query, key, value, decoder_segment_ids, lengths, model_mode,
        use_ragged_attention=False, previous_chunk=None, bidirectional_mask=None,
        sinks=None, *, qk_product_einsum, wv_product_einsum,
    ):  # fmt: skip
        return "theirs", None, None


def test_maxtext_chooses_it_by_its_flag():
    linen = pytest.importorskip("flax.linen")
    op_class = type("Op", (AttentionOp,), dict(vars(AttentionOp)))
    adapter("maxtext")["install"](op_class)
    rules = ("batch", "data"), ("heads", "model"), ("length", "context"), ("kv", None)

    def attend(op, *arrays, mode="train", **options):
        with linen.logical_axis_rules(rules):
            return op.apply_attention(
                *arrays, IDS, None, mode, qk_product_einsum=None,
                wv_product_einsum=None, **options,
            )[0]  # fmt: skip

    mesh = meshed()
    for kind, window in ((Kind.GLOBAL, None), (Kind.LOCAL, 4)):
        assert_split_and_equal(
            functools.partial(attend, op_class(mesh, kind=kind)),
            lambda *arrays, w=window: expected(*arrays, w, IDS, scale=1.0),
        )
    assert attend(op_class(mesh, "flash"), *inputs()) == "theirs"
    for op, options in (
        (op_class(mesh), {"bidirectional_mask": np.ones(2)}),
        (op_class(mesh), {"mode": "autoregressive"}),
        (op_class(mesh, kind=Kind.CHUNK), {}),
        (op_class(mesh, balance=True), {}),
    ):
        with pytest.raises(ValueError, match=r"attention=jaxcomm: .* is not served"):
            attend(op, *inputs(), **options)


class Metadata:
    """What the adapter sees of EasyDeL's ``OperationMetadata``."""

    runtime_dtype, dropout_prob = jnp.float32, 0.1

    def __init__(self, mesh):
        self.mesh = mesh

    def get_shardings(self, mode, layout):
        assert (mode, layout) == ("train", "bthd")
        return types.SimpleNamespace(query=jax.P(*AXES, None))


class RingAttn:
    """What the adapter sees of EasyDeL's ring."""

    def __init__(self, metadata):
        self.metadata = metadata

    def get_mode(self, query, BTHD):
        return "train"

    def forward_native(self, **options):
        return "theirs"

    def __call__(self, **options):
        return self.forward_native(**options)


def test_easydel_chooses_it_by_its_flag(monkeypatch):
    known = {}
    registry = types.SimpleNamespace(
        register=lambda made: known.setdefault(made.get_impl_name(), made)
    )
    double = types.ModuleType("easydel.operations")
    double.OperationRegistry, double.RingAttn = registry, RingAttn  # pyright: ignore
    double.AttentionOutput = types.SimpleNamespace  # pyright: ignore
    monkeypatch.setitem(sys.modules, "easydel", types.ModuleType("easydel"))
    monkeypatch.setitem(sys.modules, "easydel.operations", double)
    adapter("easydel")
    op = known["jaxcomm"](Metadata(meshed()))
    info = types.SimpleNamespace(q_segment_ids=IDS, kv_segment_ids=IDS)

    def attend(query, key, value, **options):
        found = op(query=query, key=key, value=value, **options)
        return getattr(found, "attention_outputs", found)

    for options, window, ids in (
        ({}, None, None),
        ({"sliding_window": 4, "mask_info": info, "softmax_scale": 0.5}, 4, IDS),
    ):
        scale = options.get("softmax_scale")
        assert_split_and_equal(
            lambda *arrays, options=options: attend(*arrays, **options),
            lambda *arrays, w=window, i=ids, s=scale: expected(*arrays, w, i, scale=s),
        )
    query, key, value = inputs()
    assert attend(query[:, :1], key, value) == "theirs"
    baked = types.SimpleNamespace(chunked_mask_baked_in=True)
    for options in ({"mask_info": baked}, {"deterministic": False}, {"softmax_aux": 1}):
        with pytest.raises(NotImplementedError, match="attn_mechanism='jaxcomm'"):
            attend(query, key, value, **options)


@dataclasses.dataclass(frozen=True)
class Axis:
    """haliax's."""

    name: str
    size: int


@dataclasses.dataclass
class NamedArray:
    """As much of haliax's as the adapter uses."""

    array: jax.Array
    axes: tuple

    def resolve_axis(self, of):
        return next(axis for axis in self.axes if axis.name == getattr(of, "name", of))

    def rearrange(self, axes):
        order = [self.axes.index(axis) for axis in axes]
        return NamedArray(jnp.transpose(self.array, order), tuple(axes))

    def broadcast_to(self, axes):
        new = tuple(axis for axis in axes if axis not in self.axes)
        shape = [axis.size for axis in (*new, *self.axes)]
        return NamedArray(jnp.broadcast_to(self.array, shape), (*new, *self.axes))

    @property
    def dtype(self):
        return self.array.dtype

    def astype(self, dtype):
        return NamedArray(self.array.astype(dtype), self.axes)


def test_levanter_chooses_it_by_its_flag(monkeypatch):
    haliax, partitioning = map(types.ModuleType, ("haliax", "haliax.partitioning"))
    haliax.NamedArray = haliax.named = NamedArray  # pyright: ignore
    mapping = dict(zip(("batch", "position", "kv_head"), AXES, strict=True))
    partitioning.pspec_for_axis = lambda axes: jax.P(  # pyright: ignore
        *(mapping[axis.name] for axis in axes)
    )
    monkeypatch.setitem(sys.modules, "haliax", haliax)
    monkeypatch.setitem(sys.modules, "haliax.partitioning", partitioning)
    theirs = types.SimpleNamespace()
    adapter("levanter")["install"](theirs, meshed())
    rows, at, to, size = (
        Axis(*each)
        for each in (("batch", B), ("position", T), ("key_position", T), ("h", D))
    )
    heads, group = Axis("kv_head", K), Axis("group", N // K)

    def attend(query, key, value, mask, **options):
        # As levanter's models have them: heads before positions.
        query = NamedArray(
            query.reshape(B, T, K, N // K, D), (rows, at, heads, group, size)
        )
        query = query.rearrange((rows, heads, group, at, size))
        key, value = (
            NamedArray(x, (rows, to, heads, size)).rearrange((rows, heads, to, size))
            for x in (key, value)
        )
        out = theirs.flash_attention(
            "position",
            to,
            size,
            query,
            key,
            value,
            mask=mask,
            inference=True,
            **options,
        )
        return out.rearrange((rows, at, heads, group, size)).array.reshape(B, T, N, D)

    ids = NamedArray(jnp.asarray(IDS), (rows, at))
    masks = (
        (types.SimpleNamespace(is_causal=True), None, None),
        (types.SimpleNamespace(sliding_window=5, segment_ids=(ids, ids)), 4, IDS),
    )
    for mask, window, of in masks:
        assert_split_and_equal(
            lambda *arrays, mask=mask: attend(*arrays, mask, scaling_factor=0.3),
            lambda *arrays, w=window, i=of: expected(*arrays, w, i, scale=0.3),
        )
    sees = NamedArray(jnp.ones((T, T), bool), (at, to))
    for mask in (sees, types.SimpleNamespace(explicit_mask=sees)):
        with pytest.raises(NotImplementedError, match="attn_backend=vanilla"):
            attend(*inputs(), mask)
