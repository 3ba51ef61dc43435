"""Everything that attention refuses, as calls: what is asked, and what is raised.

Calls are traced for four ranks of an abstract mesh, so no device is needed.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from jaxcomm.attention import (
    Ranges,
    attention_fn,
    combine,
    compare_strategies,
    document_layout,
    relayout,
    segment_ids_of,
    state_scan,
)
from jaxcomm.attention.kernels import Kernel
from jaxcomm.attention.layout import Layout, Tokens
from jaxcomm.attention.pairs import Block
from jaxcomm.attention.ring_attention import ring_attention
from jaxcomm.attention.state import GatedDelta, causal_halo
from jaxcomm.attention.strategies.strategy import Strategy

SPLIT = jax.P(None, "context")
ZIGZAG = Layout("zigzag", 4, 8)
PLAIN = Layout("contiguous", 4, 8)
KEY = jax.random.key(0)
ROWS = document_layout([[4, 4], [2, 6]], 4)
# What a rank holds.
HELD = Tokens(ZIGZAG, np.arange(2))
WITH_IDS = dataclasses.replace(HELD, segment_ids=np.zeros(2, np.int32))
OF_DOCUMENTS = dataclasses.replace(
    document_layout([8], 4).reorder(np.ones(8), axis=0)[1], positions=np.arange(2)
)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What a function, asked in words or code, refuses by an error of that type."""

    of: str
    asked: str
    call: Callable
    error: type = ValueError

    def __str__(self):
        return f"{self.of}: {self.asked}"

    def raised(self) -> Exception | None:
        try:
            self.call()
        except Exception as error:
            return error
        return None


def x(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def on_four(function, *arrays, specs=None, platform=None):
    auto = (jax.sharding.AxisType.Auto,)
    device = platform and jax.sharding.AbstractDevice("a device", None, platform)
    mesh = jax.sharding.AbstractMesh((4,), ("context",), auto, abstract_device=device)
    specs = specs or tuple(SPLIT if a.ndim != 3 else jax.P("context") for a in arrays)
    whole = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return jax.eval_shape(whole, *arrays)


def attend(query=None, key=None, value=None, axis_name="context", **options):
    query = x(1, 8, 2, 4) if query is None else query
    key = query if key is None else key
    value = key if value is None else value
    options = {"axis_name": axis_name, "tokens": HELD} | options
    return on_four(functools.partial(ring_attention, **options), query, key, value)


def scanned(*shapes, kernel=None, dtype=jnp.float32, gate=None, beta=None, **options):
    """Run a recurrent layer of four ranks, by the shapes of what they hold together."""
    query, value = (*shapes, (1, 8, 2, 4), (1, 8, 2, 4))[:2]
    kernel = GatedDelta() if kernel is None else kernel
    gate = x(*value[:3]) if gate is None else gate
    options = {"tokens": HELD, "axis_name": "context", "kernel": kernel} | options
    of_beta = x(*value[:3]) if beta is None else beta

    def layer(query, value, gate, beta):
        given = None if beta.ndim == 0 else beta
        return state_scan(query, query, value, gate, beta=given, **options)

    arrays = x(*query, dtype=dtype), x(*value), gate, of_beta
    split = tuple(SPLIT if a.ndim else jax.P() for a in arrays)
    return on_four(layer, *arrays, specs=split)


def _of_states():
    striped = Tokens(Layout("striped", 4, 8), np.arange(2))
    return [
        *(("state_scan", *case) for case in (
            ("the schedule `striped`", lambda: scanned(tokens=striped)),
            ("a name in place of a kernel", lambda: scanned(kernel="gdn"), TypeError),
            ("a zigzag layout in place of tokens",
             lambda: scanned(tokens=ZIGZAG), TypeError),
            ("a `document_layout` without segment ids",
             lambda: scanned(tokens=OF_DOCUMENTS)),
            ("a delta rule without `beta`", lambda: scanned(beta=x()), TypeError),
            ("a gate for each channel, of a kernel with one for each head",
             lambda: scanned(gate=x(1, 8, 2, 4))),
            ("a gate of integers",
             lambda: scanned(gate=x(1, 8, 2, dtype=jnp.int32)), TypeError),
            ("queries of another dtype",
             lambda: scanned(dtype=jnp.bfloat16), TypeError),
            ("2 heads of value for 3 of key", lambda: scanned((1, 8, 3, 4))),
            ("values of fewer tokens", lambda: scanned((1, 8, 2, 4), (1, 4, 2, 4))),
            ("`most_fragments=0`", lambda: scanned(
                most_fragments=0,
                tokens=dataclasses.replace(WITH_IDS, layout=OF_DOCUMENTS.layout))),
            ("a chunk of 48 tokens", lambda: GatedDelta(48)),
        )),
        *(("causal_halo", *case) for case in (
            ("`width=0`", lambda: on_four(
                lambda a: causal_halo(a, "context", HELD, 0), x(1, 8))),
            ("one dimension", lambda: on_four(
                lambda a: causal_halo(a, "context", HELD, 2), x(8),
                specs=(jax.P("context"),))),
        )),
        ("Layout.reorder", "`shift=-1`", lambda: ZIGZAG.reorder(x(1, 8), shift=-1)),
        ("Layout.reorder", "`shift` of bools",
         lambda: ZIGZAG.reorder(x(1, 8, dtype=bool), shift=1), TypeError),
    ]  # fmt: skip


def _of_attention():
    values: list[tuple[str, dict | tuple]] = [
        ("query and key of other dimensions", (x(8, 2, 4), x(4, 8, 2, 4))),
        ("a head size of 0", (x(1, 8, 2, 0),)),
        ("values of another shape", (x(1, 8, 2, 4), x(1, 8, 2, 4), x(1, 16, 2, 4))),
        ("query and key of other batches", (x(1, 8, 2, 4), x(2, 8, 2, 4))),
        ("4 query heads for 3 key heads", (x(1, 8, 4, 4), x(1, 8, 3, 4))),
        ("longer keys without `key_tokens`", (x(1, 8, 2, 4), x(1, 16, 2, 4))),
        ("tokens of another length",
         {"tokens": Tokens(Layout("zigzag", 4, 13), np.arange(4))}),
        ("tokens of another ring size",
         {"tokens": Tokens(Layout("zigzag", 8, 16), np.arange(2))}),
        ("tokens of another batch", {"tokens": ROWS.reorder(x(2, 8))[1]}),
        ("`local_window_size=(-1, 2)`", {"local_window_size": (-1, 2)}),
        ("`logits_soft_cap=0`", {"logits_soft_cap": 0}),
        ("`logits_soft_cap=1e38`", {"logits_soft_cap": 1e38}),
        ("`scale=1e39`", {"scale": 1e39}),
        ("an axis twice", {"axis_name": ("context", "context")}),
        ("no axis", {"axis_name": ()}),
        ("a dropout rate of 1", {"dropout": (1.0, KEY)}),
        ("`dropout` without a key", {"dropout": (0.5, None)}),
        ("`dropout` with two keys", {"dropout": (0.5, jax.random.split(KEY))}),
        ("`sinks` of another shape", {"sinks": x(3)}),
        ("`alibi_slopes` of another shape", {"alibi_slopes": x(2, 1)}),
        ("a `bias` with rows of all ranks", {"bias": x(1, 2, 8, 8)}),
        ("`Ranges` of nothing", {"mask": Ranges()}),
        ("`Ranges` of all ranks' tokens",
         {"mask": Ranges(keys=(np.zeros(8, int), np.ones(8, int)))}),
        ("segment ids in `tokens` alone",
         {"tokens": WITH_IDS, "key_tokens": HELD}),
        ("`strategy='star'`", {"strategy": "star"}),
        ("`strategy='halo'` without a window", {"strategy": "halo"}),
        ("`strategy='halo'` for a layout that is data",
         {"strategy": "halo", "tokens": OF_DOCUMENTS, "local_window_size": 2}),
        ("`strategy='ulysses'`, 2 heads on 4 ranks", {"strategy": "ulysses"}),
        ("`Ulysses(3)` on 4 ranks", {"strategy": jaxcomm.attention.Ulysses(3)}),
        ("`implementation='splash'`", {"implementation": "splash"}),
        ("segment ids that int32 does not hold",
         {"tokens": Tokens(ZIGZAG, np.arange(2), np.full(2, 2**31, np.uint32))}),
    ]  # fmt: skip
    types: list[tuple[str, dict | tuple]] = [
        ("integer queries", (x(1, 8, 2, 4, dtype=jnp.int32),)),
        ("keys of another dtype", (x(1, 8, 2, 4), x(1, 8, 2, 4, dtype=jnp.bfloat16))),
        ("a schedule in place of tokens", {"tokens": "zigzag"}),
        ("no tokens", {"tokens": None}),
        ("a layout that is not contiguous in place of tokens", {"tokens": ZIGZAG}),
        ("the same in place of `key_tokens`", {"key_tokens": ZIGZAG}),
        ("tokens of documents without positions",
         {"tokens": dataclasses.replace(OF_DOCUMENTS, positions=None)}),
        ("positions that are no integers", {"tokens": Tokens(ZIGZAG, x(2))}),
        ("`strategy=2`", {"strategy": 2}),
        ("`implementation=2`", {"implementation": 2}),
        ("a class in place of a kernel", {"implementation": Kernel}),
        ("`sinks` that are integers", {"sinks": jnp.ones(2, int)}),
        ("a `bias` of integers", {"bias": jnp.ones((1, 1, 2, 8), int)}),
        ("a `mask` of numbers", {"mask": x(1, 1, 2, 8)}),
        ("`Ranges` of floats", {"mask": Ranges(queries=(x(2), x(2)))}),
        ("`Ranges` of one array", {"mask": Ranges(keys=np.ones(2, int))}),
        ("segment ids that are no integers",
         {"tokens": Tokens(ZIGZAG, np.arange(2), x(1, 2))}),
        ("`local_window_size=True`", {"local_window_size": True}),
        ("`local_window_size=(1, None)`", {"local_window_size": (1, None)}),
        ("`local_window_size=(1, 2, 3)`", {"local_window_size": (1, 2, 3)}),
        ("`is_causal='yes'`", {"is_causal": "yes"}),
        ("`return_residual=2`", {"return_residual": 2}),
        ("`dropout` with a seed", {"dropout": (0.5, 0)}),
        ("`dropout=0.5`", {"dropout": 0.5}),
        ("`scale='large'`", {"scale": "large"}),
        ("a set of axes", {"axis_name": {"context"}}),
    ]  # fmt: skip
    for error, cases in ((ValueError, values), (TypeError, types)):
        for asked, given in cases:
            args, options = ((), given) if isinstance(given, dict) else (given, {})
            yield asked, functools.partial(attend, *args, **options), error

    def over_vmap():
        def one(x):
            tokens = Layout("contiguous", 8, 16)
            return ring_attention(x, x, x, ("rows", "context"), tokens)

        on_four(jax.vmap(one, axis_name="rows"), x(2, 1, 8, 2, 4),
                specs=(jax.P(None, None, "context"),))  # fmt: skip

    def of_arrays_split_further():
        explicit = (jax.sharding.AxisType.Explicit,) * 2
        mesh = jax.sharding.AbstractMesh((2, 4), ("data", "context"), explicit)
        split = jax.NamedSharding(mesh, jax.P("data", "context"))
        program = jax.shard_map(
            lambda x: ring_attention(x, x, x, "context", PLAIN),
            mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, axis_names={"context"},
        )  # fmt: skip
        given = jax.ShapeDtypeStruct((2, 8, 2, 4), jnp.float32, sharding=split)
        jax.jit(program).trace(given)

    def of_keys_on_all_ranks(name):
        def local(query, key):
            keys = {"key": query[:, :2], "value": query[:, :2]} | {name: key}
            return ring_attention(query, **keys, axis_name="context", tokens=PLAIN)

        on_four(local, x(1, 8, 2, 4), x(1, 2, 2, 4), specs=(SPLIT, jax.P()))

    one = x(1, 8, 2, 4)
    yield from (
        *((f"a `{name}` that is equal on all ranks, under `check_vma`",
           functools.partial(of_keys_on_all_ranks, name)) for name in ("key", "value")),
        ("`strategy='usp'` with one key head on one axis",
         lambda: attend(one, x(1, 8, 1, 4), strategy="usp")),
        ("axes of the mesh and of `jax.vmap`, under `check_vma`", over_vmap),
        ("queries that `Explicit` axes beside those of the `shard_map` split",
         of_arrays_split_further),
        ("a call outside of `jax.shard_map`",
         lambda: ring_attention(one, one, one, "context", HELD),
         NameError),
    )  # fmt: skip


class _Silent(Strategy):
    name = "silent"
    forward = backward = None


def _of_others():
    one = x(1, 8, 2, 4)
    dealt, tokens = ZIGZAG.reorder(np.ones((1, 8)))
    held = np.arange(8).reshape(2, 4)
    four = jax.sharding.AbstractMesh((4,), ("context",))
    two = jax.sharding.AbstractMesh((2, 4), ("data", "context"))
    whole = {"query": one, "key": one, "value": one}

    def combined(out, lse, **options):
        return on_four(
            lambda out, lse: combine(out, lse, "context", **options), out, lse,
            specs=(SPLIT, SPLIT),
        )  # fmt: skip

    def asking(**options):
        given = whole | {"sharding": jax.NamedSharding(four, SPLIT)} | options
        return lambda: jaxcomm.dot_product_attention(**given)

    def dealing(**options):
        return lambda: ZIGZAG.reorder(np.ones((2, 8)), **options)

    def of_wide_ids():
        with jax.enable_x64(True):
            jax.eval_shape(
                lambda ids: ZIGZAG.reorder(ids, segment_ids=ids)[1], x(1, 8, dtype=int)
            )

    compare = "compare_strategies"

    def comparing(layout=PLAIN, **options):
        given = {"heads": 4, "head_size": 8} | options
        return lambda: compare_strategies(layout, **given)

    def of_flax(**options):
        return lambda: attention_fn("context", PLAIN)(one, one, one, **options)

    return (
        ("Layout", "no ranks", lambda: Layout("zigzag", 0, 8)),
        ("Layout", "a negative length", lambda: Layout("zigzag", 2, -1)),
        ("Layout", "`'spiral'`", lambda: Layout("spiral", 2, 8)),
        ("Layout", "`2` as a schedule", lambda: Layout(2, 2, 8), TypeError),
        ("Layout", "an `order` for other ranks",
         lambda: Layout("zigzag", 2, 8, held.T)),
        ("Layout", "an `order` that holds a token twice",
         lambda: Layout("zigzag", 2, 8, held % 7)),
        ("Layout", "an `order` of floats",
         lambda: Layout("zigzag", 2, 8, held / 1), TypeError),
        ("Layout.reorder", "an axis that is not there", lambda: ZIGZAG.reorder(x(8))),
        ("Layout.reorder", "another length", lambda: ZIGZAG.reorder(x(5), axis=0)),
        ("Layout.reorder", "no array", lambda: ZIGZAG.reorder({})),
        ("Layout.reorder", "a batch of other rows than the layout",
         lambda: ROWS.reorder(x(3, 8))),
        *(("Layout.reorder", *case) for case in (
            ("the layout of tokens of documents",
             lambda: OF_DOCUMENTS.layout.reorder(x(8), axis=0), TypeError),
            ("segment ids of one of two rows", dealing(segment_ids=[[0] * 8])),
            ("segment ids that are no integers", dealing(segment_ids=x(8)), TypeError),
            ("segment ids that int32 does not hold",
             dealing(segment_ids=np.full(8, 2**31))),
            ("traced segment ids of int64", of_wide_ids, TypeError),
            ("lengths of one of two rows", dealing(lengths=[3])),
            ("lengths that are no integers", dealing(lengths=3.5), TypeError),
        )),
        *(("Tokens.restore", *case) for case in (
            ("tokens of one rank", lambda: HELD.restore(dealt)),
            ("an array of one rank", lambda: tokens.restore(dealt[:, :2])),
            ("positions of another sequence", lambda: Tokens(
                Layout("zigzag", 4, 7), tokens.positions).restore(dealt)),
            ("positions that are no integers",
             lambda: Tokens(ZIGZAG, x(1, 8)).restore(dealt), TypeError),
            ("keys of `jax.random`",
             lambda: tokens.restore(jax.random.split(KEY, (1, 8))), TypeError),
        )),
        ("document_layout", "a negative length", lambda: document_layout([1, -1], 2)),
        ("document_layout", "lengths of floats",
         lambda: document_layout([1.5], 2), TypeError),
        ("document_layout", "rows of different sums",
         lambda: document_layout([[4, 4], [2, 5]], 2)),
        ("document_layout", "positions of its schedule without its order",
         Layout(ROWS.schedule, 2, 8).all_positions, TypeError),
        ("segment_ids_of", "documents beyond the sequence",
         lambda: segment_ids_of([3], 2)),
        ("relayout", "layouts of two sequences",
         lambda: relayout(x(1, 2), PLAIN, Layout("zigzag", 4, 9), "context")),
        ("relayout", "a schedule in place of tokens",
         lambda: relayout(x(1, 2), "zigzag", PLAIN, "context"), TypeError),
        ("relayout", "a layout that is not contiguous in place of tokens",
         lambda: on_four(lambda a: relayout(a, ZIGZAG, PLAIN, "context"), one),
         TypeError),
        ("relayout", "a layout that differs by row",
         lambda: relayout(x(2, 2), PLAIN, ROWS, "context")),
        ("relayout", "an array of another length",
         lambda: on_four(lambda a: relayout(a, PLAIN, HELD, "context"), x(1, 4))),
        ("combine", "integers",
         lambda: combined(x(1, 8, 2, 4, dtype=jnp.int32), x(1, 8, 2)), TypeError),
        ("combine", "shapes that differ", lambda: combined(one, x(1, 8, 3))),
        ("combine", "`scatter` of what 4 does not divide",
         lambda: combined(one, x(1, 8, 2), scatter=2)),
        *(("dot_product_attention", *case) for case in (
            ("an axis that the mesh does not have",
             asking(sharding=jax.P(None, "context"))),
            ("a name in place of a `jax.P`", asking(sharding="context"), TypeError),
            ("`axis_name=`", asking(axis_name="context"), TypeError),
            ("tokens that nothing splits", asking(sharding=jax.P("context"))),
            ("`tokens`", asking(tokens=tokens), TypeError),
            ("an axis of which nothing says what it splits",
             asking(sharding=jax.NamedSharding(two, SPLIT))),
            ("a `mask` of other keys", asking(mask=jnp.ones((8, 5), bool))),
            ("segment ids of the queries alone, for keys of another length",
             asking(key=one[:, :4], value=one[:, :4],
                    segment_ids=jnp.zeros((1, 8), int))),
            ("segment ids that are no pair",
             asking(segment_ids=(jnp.zeros((1, 8), int),) * 3)),
            ("`is_causal='yes'`", asking(is_causal="yes"), TypeError),
            ("a call inside of `jax.shard_map`", lambda: on_four(
                lambda x: jaxcomm.dot_product_attention(x, x, x, sharding=SPLIT),
                one)),
        )),
        ("attention_fn", "`return_residual`",
         lambda: attention_fn("context", PLAIN, return_residual=True), TypeError),
        ("attention_fn", "`precision`", of_flax(precision="highest")),
        *(("attention_fn", f"`{name}` as an option",
           functools.partial(attention_fn, "context", PLAIN, **{name: None}), TypeError)
          for name in ("bias", "dropout")),
        ("Schedule.blocks", "a block that ends before it starts",
         lambda: Block((2, 0), (0, 3))),
        ("Ulysses", "no ranks", lambda: jaxcomm.attention.Ulysses(0)),
        ("Ulysses", "`2.0` ranks", lambda: jaxcomm.attention.Ulysses(2.0), TypeError),  # pyright: ignore
        *((compare, f"`dtype={dtype!r}`", comparing(dtype=dtype), TypeError)
          for dtype in ("float7", None, "int32")),
        (compare, "a schedule in place of a layout", comparing("zigzag"), TypeError),
        (compare, "3 key heads for 4 heads", comparing(key_heads=3)),
        (compare, "no heads", comparing(heads=0)),
        (compare, "`axis_sizes` of other ranks", comparing(axis_sizes=(2, 3))),
        (compare, "`is_causal='yes'`", comparing(is_causal="yes"), TypeError),
        (compare, "a name in place of a kernel", comparing(kernel="gdn"), TypeError),
        (compare, "a `document_layout` of recurrent layers",
         comparing(document_layout([4, 4], 4), halo_width=3)),
        (compare, "a strategy that does not say its cost",
         lambda: _Silent().cost(None), NotImplementedError),
    )  # fmt: skip


REFUSALS = [Refusal("ring_attention", *case) for case in _of_attention()]
REFUSALS += [Refusal(*case) for case in (*_of_others(), *_of_states())]
