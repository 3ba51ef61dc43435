"""The extension that Bazel built loads and moves bytes between two devices."""

import unittest

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxcomm


class PsumTest(unittest.TestCase):
    def test_sums_over_two_devices(self):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        x = np.arange(6, dtype=np.float32).reshape(2, 3)

        psum = jax.jit(
            jax.shard_map(
                lambda shard: jaxcomm.psum(shard, "x"),
                mesh=mesh,
                in_specs=P("x"),
                out_specs=P(),
            )
        )

        assert "jaxcomm." in psum.lower(x).as_text()
        np.testing.assert_array_equal(psum(x), x.sum(axis=0, keepdims=True))


if __name__ == "__main__":
    unittest.main()
