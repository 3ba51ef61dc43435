"""An error on every process, and the end of the coordinator."""

import jax
import numpy as np
import pytest

import jaxcomm

pytestmark = pytest.mark.multiprocess


def sizes_that_do_not_fit(here, mesh):
    size = mesh.size
    ones = np.ones((size, size), np.int32)
    base = np.tile(np.arange(size, dtype=np.int32), (size, 1))
    wrong = ones.copy()
    wrong[3, 0] = 2
    x = np.arange(size * size, dtype=np.float32).reshape(size, size)

    def program(*operands):
        return jaxcomm.ragged_all_to_all(*operands, axis_name="i")

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        here.run(mesh, program, x, 0 * x, base, ones, base.T.copy(), wrong)
    found = here.run(mesh, program, x, 0 * x, base, ones, base.T.copy(), ones)
    here.identical(mesh, found, x.T)
    return str(caught.value)


def test_sizes_that_do_not_fit_raise_on_every_process_and_harm_nothing(team):
    texts = team.call(sizes_that_do_not_fit, at=(2, 2))
    for text in texts[:2]:
        assert "ragged_all_to_all" in text
        assert "rank 0 sends 1 rows to rank 3, which expects 2" in text
