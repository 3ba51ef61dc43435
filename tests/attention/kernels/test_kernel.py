"""A kernel from outside of the package: it runs in every strategy, or is refused."""

import dataclasses
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import split
from dense import Options
from hops import Case, both, hop_of

from jaxcomm import attention
from jaxcomm.attention.kernels import Grads, Kernel
from jaxcomm.attention.strategies.ulysses import Usp

ROOT = Path(__file__).parents[3]
Plain = runpy.run_path(str(ROOT / "examples/recipes/attention_kernel.py"))["Plain"]
DOCUMENTS = np.array([[0] * 7 + [1] * 11 + [2] * 3 + [-1] * 2])
WINDOW = Options(window=(6, 3), query_ids=DOCUMENTS)
PACKED = np.array([[-1] * 2 + [0] * 4 + [1] * 7 + [2] * 11])
RING = {"strategy": "ring"}
CONTIGUOUS = {"schedule": "contiguous"}
CAUSAL = Options(is_causal=True, query_ids=DOCUMENTS)


@pytest.mark.parametrize(
    ("strategy", "schedule", "options"),
    [
        ("ring", "zigzag", CAUSAL),
        ("ring", "striped", WINDOW),
        ("all_gather", "zigzag", CAUSAL),
        ("ulysses", "contiguous", WINDOW),
        (Usp(2), "zigzag", CAUSAL),
        ("halo", "contiguous", WINDOW),
    ],
)
def test_it_runs_in_every_strategy(strategy, schedule, options):
    """With padding, documents, two query heads to a key head, a residual."""
    with jax.enable_x64(True):
        shapes = (1, 23, 8, 4), (1, 23, 4, 4)
        *arrays, grads = split.inputs(*shapes, dtype=jnp.float64, value_size=6)
        how = {"strategy": strategy, "schedule": schedule, "implementation": Plain()}
        split.compare(*arrays, options, grads, 1e-13, size=4, **how)


@dataclasses.dataclass(frozen=True)
class Told(Plain):
    """Keeps what it was asked, and refuses what it is told to."""

    refused: str | None = None
    name = "told"
    asked = []  # noqa: RUF012

    def why_not(self, hop):
        self.asked.append(hop)
        is_refused = hop.platform == self.refused
        return f"{self.refused} is not its own" if is_refused else None

    def backward(self, hop, *others):
        assert hop.is_backward
        return super().backward(hop, *others)


def test_it_is_asked_with_shapes_before_and_for_each_platform(lowered):
    Told.asked.clear()
    for strategy in ("ring", "all_gather", "ulysses"):
        with pytest.raises(
            ValueError, match=r"asked for, but None is not its own\. Pa"
        ):
            lowered(implementation=Told(), strategy=strategy)
    with pytest.raises(ValueError, match="'told' was asked for, but cuda is not its"):
        lowered("cuda", implementation=Told(refused="cuda"))
    Told.asked.clear()
    lowered("tpu", "cpu", implementation=Told(refused="cuda"), grads=True)
    asked = {(hop.platform, hop.is_backward) for hop in Told.asked}
    assert asked == {(None, False), *((p, b) for p in ("tpu", "cpu") for b in (0, 1))}
    hop = Told.asked[-1]
    assert hop.query.shape == (2, 6, 4, 64)
    assert hop.query.dtype == jnp.bfloat16
    assert hop.pairs.mask.is_causal


def test_its_bias_is_of_the_keys_of_a_hop(lowered):
    @dataclasses.dataclass(frozen=True)
    class Biased(Told):
        options = frozenset({"bias"})

    Told.asked.clear()
    lowered("cpu", implementation=Biased(refused="tpu"), bias=jnp.ones((1, 1, 1, 24)))
    shapes = {
        (hop.platform, hop.key.shape[1], hop.scores.bias.shape) for hop in Told.asked
    }
    assert shapes == {(of, 6, (1, 1, 1, 6)) for of in (None, "cpu")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bias": jnp.ones((1, 1, 1, 24))}, "a bias or mask"),
        ({"mask": jnp.ones((1, 1, 1, 24), bool)}, "a bias or mask"),
        ({"alibi_slopes": jnp.ones(4)}, "alibi_slopes"),
        ({"dropout": (0.1, jax.random.key(0))}, "dropout"),
        ({"logits_soft_cap": 2.0}, "logits_soft_cap"),
    ],
)
def test_what_it_does_not_name_is_refused(lowered, options, words):
    with pytest.raises(ValueError, match=f"but it is used without {words}. Pass impl"):
        lowered("cpu", implementation=Plain(), **options)


class ByBlocks(Plain):
    """Gives NaN where a hop's rectangle is not what its positions see."""

    name = "by_blocks"
    by_blocks = True

    def _scores(self, hop):
        scores, *arrays = super()._scores(hop)
        pairs = hop.pairs
        queries, keys = (
            attention.kernels.Coordinates(x.positions)
            for x in (pairs.queries, pairs.keys)
        )
        (seen,) = attention.kernels.Pairs(pairs.mask, queries, keys).allowed()
        told = jnp.stack([_seen_in(block, seen.shape) for block in pairs.blocks])
        is_right = (seen == told[0 if pairs.block is None else pairs.block]).all()
        return jnp.where(is_right, scores, jnp.nan), *arrays


def _seen_in(block, shape):
    at = np.indices(shape)
    starts = block.queries[0], block.keys[0]
    row, column = (x - start for x, start in zip(at, starts, strict=True))
    seen = (row >= 0) & (column >= 0)
    seen &= (row < block.shape[0]) & (column < block.shape[1])
    if block.left is not None:
        seen &= row - column <= block.left
    if block.right is not None:
        seen &= column - row <= block.right
    return seen


@pytest.mark.parametrize(
    ("size", "how", "options"),
    [
        (4, RING, Options(is_causal=True)),
        # A ring that documents may end, in a loop and in one turn.
        (4, RING, Options(is_causal=True, query_ids=PACKED)),
        (3, RING | CONTIGUOUS, Options(is_causal=True, query_ids=PACKED)),
        # In the natural order of tokens, which zigzag has not.
        (4, {"strategy": "ulysses"}, Options(window=(5, 2), query_ids=PACKED)),
        (1, RING, Options(window=(3, 3))),
        (2, {"strategy": "all_gather"}, split.PLAIN),
    ],
)
def test_it_may_go_by_blocks(size, how, options):
    with jax.enable_x64(True):
        *arrays, grads = split.inputs((1, 24, 4, 8), dtype=jnp.float64)
        grads = grads[0], jnp.zeros_like(grads[1])
        how = how | {"implementation": ByBlocks(), "size": size}
        split.compare(*arrays, options, grads, 1e-13, **how)


class Mutable(Plain):
    __hash__ = None


class Nameless(Plain):
    name = "a name"


class Usurper(Plain):
    name = "xla"


class Boastful(Plain):
    options = frozenset({"speed"})


class Half:
    name = "half"

    def forward(self, hop): ...


@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [
        (Half(), TypeError, "is no kernel: it lacks why_not, backward. Pass"),
        (Mutable(), TypeError, "unhashable type: 'Mutable'.*make Mutable a frozen"),
        (Nameless(), ValueError, "has name='a name'. Give Nameless a name"),
        (Usurper(), ValueError, "has the name of a kernel of jaxcomm"),
        (Boastful(), ValueError, r"has options \['speed'\]. Name some of"),
    ],
)  # fmt: skip
def test_what_is_no_kernel_is_refused(lowered, kernel, error, words):
    with pytest.raises(error, match=words):
        lowered("cpu", implementation=kernel)


def test_a_class_that_lacks_a_method_makes_no_kernel():
    class Unfinished(Kernel):
        name = "unfinished"
        why_not = forward = Plain.forward

    with pytest.raises(TypeError, match=r"abstract method '?backward"):
        Unfinished()


class Wrong(Kernel):
    """Does something else in one of its methods."""

    name = "wrong"
    why_not = forward = backward = None
    __abstractmethods__ = frozenset()

    def __init__(self, method, function):
        for name in ("why_not", "forward", "backward"):
            setattr(self, name, getattr(Plain(), name))
        setattr(self, method, function)


def _forward(change):
    return "forward", lambda hop: change(*Plain().forward(hop))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (_forward(lambda out, lse: (out, lse.astype("bfloat16"))),
         r"Wrong.forward returned lse of shape \(1, 48, 2\) and dtype bfloat16"),
        (_forward(lambda out, lse: (out[:, 1:], lse)), r"out of shape \(1, 47"),
        (_forward(lambda out, lse: (out, lse, lse)), "out, lse of 3 results"),
        (_forward(lambda out, lse: (out,)), "returned out of 1 results. Expected out,"),
        (("backward", lambda hop, saved: Grads(hop.query, hop.key, None)),
         "Wrong.backward returned query, key of 5 results. Expected query, key, v"),
        (("why_not", lambda hop: False), "Wrong.why_not returned False. Give the"),
    ],
)  # fmt: skip
def test_results_of_another_kind_are_refused(changed, words):
    hop, grad = hop_of(Case(right=0))
    with pytest.raises(TypeError, match=words):
        both.lower(hop.replace(kernels=(Wrong(*changed),)), grad)
