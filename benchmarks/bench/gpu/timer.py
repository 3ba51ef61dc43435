"""Programs, arrays and times on a mesh, in one process or in all of several."""

import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from bench.gpu.rows import Figure, Finding
from bench.gpu.sizes import Sizes
from jaxcomm.communicator import rendezvous
from jaxcomm.communicator.backends.backend import processes_of


@dataclasses.dataclass(frozen=True)
class Timer:
    """Makes and times programs on a mesh with one axis, ``"i"``.

    All processes of the mesh must call the methods alike.

    Attributes:
      mesh: the devices, one rank each.
      sizes: how much to do.
      shares_gpu: whether all ranks run on one GPU.
    """

    mesh: jax.sharding.Mesh
    sizes: Sizes
    shares_gpu: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size

    @property
    def ring(self) -> list[tuple[int, int]]:
        """Pairs that send everything one rank on."""
        return [(rank, (rank + 1) % self.size) for rank in range(self.size)]

    def program(self, function, spec=None):
        """Returns the jitted function of what each device holds."""
        spec = jax.P("i") if spec is None else spec
        out = spec[0] if isinstance(spec, tuple) else spec
        return jax.jit(
            jax.shard_map(
                function, mesh=self.mesh, in_specs=spec, out_specs=out, check_vma=False
            )
        )

    def random(self, shape, dtype="float32", spec=None):
        """Returns random numbers, made on the devices and split over them."""
        spec = jax.P("i") if spec is None else spec
        return _random(shape, dtype, jax.NamedSharding(self.mesh, spec))

    def random_alone(self, shape, dtype="float32"):
        """Returns random numbers on one device of this process."""
        first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return _random(shape, dtype, first)

    def spread(self, values: np.ndarray):
        """Returns numbers that all processes have, split over the devices."""
        sharding = jax.NamedSharding(self.mesh, jax.P("i"))
        return jax.make_array_from_callback(
            values.shape, sharding, lambda where: values[where]
        )

    def agree(self, value, what="bench") -> list:
        """Returns what each process gave, of JSON's types, once all have come."""
        processes = processes_of(self.mesh)
        if len(processes) == 1:
            return [value]
        found = rendezvous.exchange(processes, jax.process_index(), what, value)
        return [found[process] for process in processes]

    def finding(self, name, found, is_right=None, **values) -> Finding:
        """Returns what all processes found: what is wrong on one is wrong."""
        for process, (text, right) in enumerate(self.agree([found, is_right])):
            if right is False:
                where = "" if process == 0 else f"process {process}: "
                return Finding(name, where + text, False, values)
        return Finding(name, found, is_right, values)

    def compare(
        self,
        name,
        ours,
        peer,
        theirs,
        *,
        calls=None,
        least=None,
        alone=False,
        share: float = 1,
    ) -> Figure:
        """Times two thunks in turns.

        Args:
          name, peer: what they are.
          ours, theirs: the thunks.
          calls: of each, in a round; if None, those of the sizes.
          least: what is demanded of the ratio of theirs to ours.
          alone: whether theirs is for the first process alone; others wait.
          share: the part of their time to compare with.
        """
        waiting = (1,) if alone else ()
        mine, other = self._samples((ours, theirs), calls, waiting)
        other = [share * x for x in other]
        return Figure(
            name, statistics.median(mine), peer, statistics.median(other),
            timing.median_ratio(other, mine), least,
        )  # fmt: skip

    def by_turns(self, thunks, calls=None, *, alone=()) -> dict[str, float]:
        """Returns the median seconds of each thunk, by name; timed in turns.

        Args:
          thunks: by name.
          calls: as in :meth:`compare`.
          alone: the names of those that are for the first process alone.
        """
        names = list(thunks)
        waiting = tuple(map(names.index, alone))
        found = self._samples(tuple(thunks.values()), calls, waiting)
        return dict(zip(names, map(statistics.median, found), strict=True))

    def _samples(self, thunks, calls, alone) -> list[list[float]]:
        """Returns seconds of each thunk in each round; ``alone`` are numbers."""
        calls = min(calls or self.sizes.calls, self.sizes.calls)

        def seconds(call, waits):
            self.agree(None)
            if waits:
                return 1.0
            # Processes that come from their meeting are not in step yet.
            out = jax.block_until_ready(call())
            begun = time.perf_counter()
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
            return (time.perf_counter() - begun) / calls

        found = [[] for _ in thunks]
        for turn in range(-1, self.sizes.rounds):
            for i, call in enumerate(thunks):
                sample = seconds(call, i in alone and jax.process_index() != 0)
                # The first compiles and warms up.
                if turn >= 0:
                    found[i].append(sample)
        # Nobody begins something else while the first process is at it.
        self.agree(None)
        return found


def _random(shape, dtype, sharding):
    def make(key):
        return jax.random.normal(key, shape, jnp.dtype(dtype))

    return jax.jit(make, out_shardings=sharding)(jax.random.key(0))


def local(array) -> np.ndarray:
    """Returns what this process holds of an array, one shard after the other."""
    return np.stack([np.asarray(shard.data) for shard in array.addressable_shards])


def thunk(program, *operands):
    """Returns a call that takes nothing."""
    return functools.partial(program, *operands)
