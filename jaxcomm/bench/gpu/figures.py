"""What is timed on GPUs: ours against XLA's own, taking turns in one run."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from jaxcomm.bench import timing
from jaxcomm.bench.targets import KIB, MIB

_ROUNDS = 9
_CHAIN = 50
# Keys and values of a hop, and as long a computation beside it.
_SENT = 128 * MIB
_MATRIX = 6144


@dataclasses.dataclass(frozen=True)
class Figure:
    """One comparison.

    Attributes:
      name: what was done.
      ours: seconds a call, the median.
      peer: what it is compared with.
      theirs: its seconds.
      ratio: of theirs to ours, the median over rounds.
      least: what is demanded of the ratio, None if nothing.
    """

    name: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    least: float | None = None


class Timer:
    """Times programs on a mesh with one axis, ``"i"``."""

    def __init__(self, mesh):
        """Keeps the mesh."""
        self.mesh = mesh
        self.ring = [(rank, (rank + 1) % mesh.size) for rank in range(mesh.size)]

    def program(self, function, spec=None):
        """Returns the jitted function of what each device holds."""
        spec = jax.P("i") if spec is None else spec
        return jax.jit(
            jax.shard_map(
                function, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )

    def random(self, shape, dtype="float32", spec=None):
        """Returns random numbers, split over the devices."""
        values = np.random.default_rng(0).normal(size=shape).astype("float32")
        sharding = jax.NamedSharding(self.mesh, jax.P("i") if spec is None else spec)
        return jax.device_put(jnp.asarray(values, dtype), sharding)

    def compare(self, name, ours, peer, theirs, *, calls=30, least=None) -> Figure:
        """Times two thunks in turns; each round is ``calls`` of both."""

        def seconds(call):
            out = None
            begun = time.perf_counter()
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
            return (time.perf_counter() - begun) / calls

        for call in (ours, theirs) * 2:
            jax.block_until_ready(call())
        samples = [(seconds(ours), seconds(theirs)) for _ in range(_ROUNDS)]
        mine, other = zip(*samples, strict=True)
        return Figure(
            name, statistics.median(mine), peer, statistics.median(other),
            timing.median_ratio(other, mine), least,
        )  # fmt: skip


def collectives(timer: Timer) -> Iterator[Figure]:
    """Yields latency at 1 KiB and bandwidth at 256 MiB, and a chain of small sums."""
    ops: dict[str, Callable] = {
        "psum": lambda m: lambda x: m.psum(x, "i"),
        "ppermute": lambda m: lambda x: m.ppermute(x, "i", timer.ring),
        "all_gather": lambda m: lambda x: m.all_gather(x, "i"),
        "psum_scatter": lambda m: (
            lambda x: m.psum_scatter(x, "i", scatter_dimension=1, tiled=True)
        ),
    }
    for size, text in ((KIB, "1 KiB"), (256 * MIB, "256 MiB")):
        x = timer.random((timer.mesh.size, size // 4))
        for name, of in ops.items():
            ours, theirs = timer.program(of(jaxcomm)), timer.program(of(jax.lax))
            yield timer.compare(
                f"{name} {text}", functools.partial(ours, x), "jax.lax",
                functools.partial(theirs, x), least=1.0,
            )  # fmt: skip

    def chain(module, **at):
        def sums(x):
            for _ in range(_CHAIN):
                x = module.psum(x, "i", **at) * 0.5
            return x

        return timer.program(sums)

    x = timer.random((timer.mesh.size, 64))
    lax = chain(jax.lax)
    for text, lane, least in (
        ("", None, 1.0), (", command buffers", "captured", 1.2)
    ):  # fmt: skip
        ours = chain(jaxcomm, lane=lane)
        yield timer.compare(
            f"chain of {_CHAIN}{text}", lambda f=ours: f(x), "jax.lax",
            lambda: lax(x), calls=10, least=least,
        )  # fmt: skip


def overlap(timer: Timer) -> Iterator[Figure]:
    """Yields a send in halves around matrix products, against doing both in turn."""
    size = timer.mesh.size
    sent = timer.random((size, _SENT // 2), "bfloat16")
    y = timer.random((size * _MATRIX, _MATRIX), "bfloat16")
    weights = timer.random((_MATRIX, _MATRIX), "bfloat16", jax.P())

    def compute(y):
        for _ in range(4):
            y = (y @ weights) * 0.01
        return y

    def halves(x, y):
        arriving = jaxcomm.ppermute_start(x, "i", timer.ring, lane="side")
        y = compute(arriving.then(y))
        return jaxcomm.ppermute_done(arriving, after=y), y

    def whole(module):
        return timer.program(
            lambda x, y: (module.ppermute(x, "i", timer.ring), compute(y))
        )

    ours = timer.program(halves)
    for peer, theirs in (
        ("in turn", whole(jaxcomm)),
        ("jax.lax", whole(jax.lax)),
    ):
        yield timer.compare(
            "send beside 4 products", lambda: ours(sent, y), peer,
            lambda f=theirs: f(sent, y), calls=5,
        )  # fmt: skip


def attention(timer: Timer, tokens: int) -> Iterator[Figure]:
    """Yields causal ring attention, against its rivals; bf16, H 32, K 8, D 128."""
    split = jax.P(None, "i")
    shapes = ((1, tokens, 32, 128), (1, tokens, 8, 128), (1, tokens, 8, 128))
    block = [timer.random(shape, "bfloat16", split) for shape in shapes]
    first = jax.devices()[0]
    alone = [jax.device_put(x, first) for x in block]

    def ring(backend):
        def attend(q, k, v):
            return jaxcomm.ring_attention(
                q, k, v, axis_name="i", is_causal=True, backend=backend
            )

        return timer.program(attend, split)

    def dense(q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )

    def forward_and_back(function):
        def loss(*x):
            return function(*x).astype("float32").sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

    for what, transform in (
        ("forward", lambda f: f),
        ("forward and backward", forward_and_back),
    ):
        ours, xla = transform(ring(None)), transform(ring("xla"))
        one = transform(jax.jit(dense))
        name = f"ring attention {tokens // 1024}k, {what}"
        yield timer.compare(
            name, lambda f=ours: f(*block), "the ring over XLA's sends",
            lambda f=xla: f(*block), calls=3,
        )  # fmt: skip
        yield timer.compare(
            name, lambda f=ours: f(*block), "one GPU, the whole sequence",
            lambda f=one: f(*alone), calls=3,
        )  # fmt: skip
