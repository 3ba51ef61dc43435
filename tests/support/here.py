"""What a function that runs in a team's process has at hand: meshes, programs, models.

A stacked array holds the operands, or results, of all devices along axis 0 in the order
of the mesh, as in tests/collectives. Every process knows all of what should come out
and looks at the rows of its own devices.
"""

import functools
import importlib.util
import pathlib
from typing import Any

import catalogue
import jax
import jax.numpy as jnp
import models
import numpy as np
import waiting

import jaxcomm
from jaxcomm import compat


@functools.cache
def load(path) -> Any:
    """Imports a file that is on no path, once."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Here:
    def __init__(self):
        self.process = jax.process_index()
        self.processes = jax.process_count()
        self.model = models
        self.cases = {
            name: case
            for name, case in catalogue.CASES.items()
            if case.kind != "mean" and not case.cuts_columns
        }
        self.by_group = models.apply_by_group
        self.values = models.random_values

    def mesh(self, processes, devices, shape=-1, names=("i",), order=None):
        """Returns a mesh of the first devices of the first processes.

        Args:
          processes: how many.
          devices: how many of each, or a list of as many numbers.
          shape, names: of the mesh; a line by default.
          order: places of the devices in the line that is then reshaped.

        Returns:
          None in a process that has no device in it.
        """
        if isinstance(devices, int):
            devices = [devices] * processes
        line = []
        for process, count in enumerate(devices):
            mine = [d for d in jax.devices() if d.process_index == process]
            line += mine[:count]
        order = range(len(line)) if order is None else order
        grid = np.array([line[i] for i in order]).reshape(shape)
        if all(device.process_index != self.process for device in grid.flat):
            return None
        auto = (jax.sharding.AxisType.Auto,) * len(names)
        return jax.sharding.Mesh(grid, names, axis_types=auto)

    def meet(self, name, processes=None):
        """Returns when some processes, all if None, are here; a name serves once."""
        milliseconds = int(1000 * waiting.HANG_SECONDS)
        compat.key_value_store().wait_at_barrier(name, milliseconds, processes)

    def put(self, mesh, stacked):
        sharding = jax.NamedSharding(mesh, jax.P(tuple(mesh.axis_names)))
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(
                x.shape,
                sharding,
                lambda index: x[index],
                dtype=jax.dtypes.canonicalize_dtype(x.dtype),
            ),
            stacked,
        )

    def program(self, mesh, function):
        """Returns a jitted program that runs ``function`` on every device's row."""
        everywhere = jax.P(tuple(mesh.axis_names))

        def local(*operands):
            results = function(*jax.tree.map(lambda x: x[0], operands))
            return jax.tree.map(lambda x: jnp.asarray(x)[None], results)

        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=everywhere, out_specs=everywhere),
            # XLA would give every device all of a result that has no elements.
            out_shardings=jax.NamedSharding(mesh, everywhere),
        )

    def every(self, x, axes, size, *, by_type=False, **options):
        choice = catalogue.fixed(size)
        return {
            name: case(
                jaxcomm, case.of_types(x) if by_type else x, axes, choice, **options
            )
            for name, case in self.cases.items()
        }

    def models(self, size):
        choice = catalogue.fixed(size)
        return {name: (c, c.model(choice)) for name, c in self.cases.items()}

    def run(self, mesh, function, *stacked):
        """Runs ``function`` on every device's row; returns :meth:`mine` of it."""
        return self.mine(self.program(mesh, function)(*self.put(mesh, stacked)))

    def rows(self, mesh):
        owners = [device.process_index for device in mesh.devices.flat]
        return [row for row, owner in enumerate(owners) if owner == self.process]

    def mine(self, arrays):
        def rows(array):
            shards = sorted(array.addressable_shards, key=lambda s: s.index[0].start)
            return np.concatenate([np.asarray(shard.data) for shard in shards])

        return jax.tree.map(rows, arrays)

    def identical(self, mesh, found, expected, what=""):
        rows = self.rows(mesh)
        expected = jax.tree.map(lambda x: np.asarray(x)[rows], expected)
        self.model.assert_identical(found, expected, what)

    def are_modelled(self, mesh, axes, found, of, x, groups=None):
        for name, (_, model) in of.items():

            def expected(leaf, model=model):
                return self.by_group(mesh, axes, model, leaf, groups)

            self.identical(mesh, found[name], jax.tree.map(expected, x), name)
