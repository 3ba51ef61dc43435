"""The closed forms of attention's strategies, beside what their programs send."""

import dataclasses
import math

import jax
import pytest

import jaxcomm
from jaxcomm.attention import compare_strategies, state_scan
from jaxcomm.attention.positions import TRUSTED
from jaxcomm.attention.state import GatedDelta, KimiDelta, Mamba2, causal_halo

WINDOW = {"is_causal": True, "local_window_size": (40, 0)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of attention; every strategy that can compute it is compared."""

    axes: dict[str, int]
    heads: tuple[int, int] = (8, 4)  # of queries, and of keys
    sizes: tuple[int, int] = (64, 32)  # of keys, and of values
    dtype: str = "bfloat16"
    schedule: str = "zigzag"
    keys: int = 64  # of a rank, beside 64 queries
    has_documents: bool = False
    machine: str = "cpu"
    options: dict = dataclasses.field(default_factory=lambda: {"is_causal": True})

    def compared(self):
        return compare_strategies(
            self.layout(64), key_layout=self.layout(self.keys), batch=2,
            heads=self.heads[0], key_heads=self.heads[1], head_size=self.sizes[0],
            value_size=self.sizes[1], dtype=self.dtype, machine=self.machine,
            axis_sizes=tuple(self.axes.values()), has_documents=self.has_documents,
            **self.options,
        )  # fmt: skip

    def layout(self, tokens):
        size = math.prod(self.axes.values())
        return jaxcomm.Layout(self.schedule, size, tokens * size)

    def planned(self, strategy, derive=None):
        """Plan the calls of a rank: of the forward pass, or of both."""
        names = tuple(self.axes)
        is_self = self.keys == 64

        def attend(ids, key_ids, *arrays):
            tokens, key_tokens = (
                jaxcomm.Tokens(
                    self.layout(n), TRUSTED, of if self.has_documents else None
                )
                for n, of in ((64, ids), (self.keys, key_ids))
            )
            return jaxcomm.ring_attention(
                *arrays, names if len(names) > 1 else names[0], tokens,
                key_tokens=None if is_self else key_tokens, strategy=strategy,
                **self.options,
            )  # fmt: skip

        def both(ids, key_ids, *arrays):
            out, transpose = jax.vjp(lambda *xs: attend(ids, key_ids, *xs), *arrays)
            return out, transpose(out)

        def of(tokens, heads, size):
            return jax.ShapeDtypeStruct((2, tokens, heads, size), self.dtype)

        (heads, key_heads), (size, value_size) = self.heads, self.sizes
        arrays = (
            of(64, heads, size),
            of(self.keys, key_heads, size),
            of(self.keys, key_heads, value_size),
        )
        ids = [jax.ShapeDtypeStruct((2, n), "int32") for n in (64, self.keys)]
        program = both if derive else attend
        return jaxcomm.plan(self.axes, program, *ids, *arrays, machine=self.machine)


# Key heads are shared, repeated or as many as queries'; axes of 2, 3 and 8 ranks, and
# two axes; windows that end the ring, and of which a border travels.
CASES = [
    Case({"c": 2}, heads=(8, 1), dtype="float32"),
    Case({"c": 8}, heads=(8, 8), options={}),
    Case({"c": 3}, heads=(12, 4), machine="h100", has_documents=True),
    Case({"c": 3}, heads=(6, 6), schedule="contiguous", options=WINDOW),
    Case({"c": 4}, keys=96, options={}, has_documents=True, machine="h100"),
    Case({"c": 8}, schedule="striped", dtype="float16", machine="h100"),
    Case({"a": 2, "b": 4}, heads=(8, 2), has_documents=True, machine="h100"),
    Case({"a": 3, "b": 2}, heads=(12, 3), dtype="float32", options=WINDOW),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.axes}{case.heads}")
def test_closed_forms_are_the_bytes_of_the_programs(case):
    # What ranks tell each other of documents, before a ring.
    looks = {"all_gather", "pmax", "psum"}
    compared = 0
    for name, row in case.compared().rows.items():
        if row.why_not is not None:
            continue
        forward, both = case.planned(name), case.planned(name, derive=True)
        assert not forward.notes + both.notes
        sent = [
            sum(
                each.times * each.sent_bytes
                for each in made.calls
                if name != "ring" or each.call.name not in looks
            )
            for made in (forward, both)
        ]
        assert sent[0] == pytest.approx(row.forward_bytes, rel=1e-9), name
        assert sent[1] - sent[0] == pytest.approx(row.backward_bytes, rel=1e-9), name
        if name == "ring" and not case.has_documents:
            assert {each.call.name for each in both.calls} == {"ring_shift"}
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize(
    ("machine", "chosen"), [("gpu", "all_gather"), ("cpu", "ring")]
)
def test_auto_is_the_strategy_that_is_compared(machine, chosen):
    case = Case({"context": 4}, heads=(6, 3), sizes=(16, 16), dtype="float32")
    case = dataclasses.replace(case, schedule="contiguous", machine=machine)
    assert case.compared().chosen == chosen
    assert case.planned("auto", derive=True) == case.planned(chosen, derive=True)


@pytest.mark.parametrize(
    ("size", "schedule", "kernel", "dtype", "has_documents"),
    [
        (1, "zigzag", GatedDelta(8), "bfloat16", False),
        (3, "contiguous", KimiDelta(8), "float32", False),
        (4, "zigzag", Mamba2(8), "bfloat16", True),
        # Maps are composed on the way.
        (72, "zigzag", GatedDelta(8), "bfloat16", True),
    ],
)
def test_closed_forms_of_recurrent_layers(size, schedule, kernel, dtype, has_documents):
    layout = jaxcomm.Layout(schedule, size, 16 * size)

    def of(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct((2, 16, *shape), dtype)

    def scan(tokens, query, value, gate):
        beta = gate if kernel.has_beta else None
        return state_scan(
            query, query, value, gate[..., None] * query if of_key else gate, "c",
            tokens, kernel=kernel, beta=beta,
        )  # fmt: skip

    def halo(tokens, query, value, gate):
        return causal_halo(query, "c", tokens, 3)

    def sent(layer, derive):
        def program(ids, *arrays):
            tokens = jaxcomm.Tokens(layout, TRUSTED, ids if has_documents else None)
            if not derive:
                return layer(tokens, *arrays)
            out, transpose = jax.vjp(lambda *xs: layer(tokens, *xs), *arrays)
            return out, transpose(out)

        arrays = of(64, 32), of(64, 16), of(64, dtype="float32")
        made = jaxcomm.plan({"c": size}, program, of(dtype="int32"), *arrays)
        assert not made.notes
        return made.step_bytes, sum(call.times for call in made.calls)

    of_key = kernel.gates == "key"
    found = compare_strategies(
        layout, batch=2, heads=64, head_size=32, value_size=16, dtype=dtype,
        has_documents=has_documents, kernel=kernel, halo_width=3,
    )  # fmt: skip
    for layer, row in zip((scan, halo), found.recurrent.values(), strict=True):
        forward, sends = sent(layer, derive=False)
        both, all_sends = sent(layer, derive=True)
        assert forward == pytest.approx(row.forward_bytes, rel=1e-9)
        assert both - forward == pytest.approx(row.backward_bytes, rel=1e-9)
        assert sends == row.sends or size == 1
        assert (sends > 2) == (size == 72 and layer is scan)
        machine = found.machine
        wire = both / machine.bytes_per_second + all_sends * machine.latency
        assert row.seconds == pytest.approx(wire) or size == 1
    assert str(found).count("causal_halo") == 1
