import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def standard_promotion():
    """Lets optax add integers to floats, which the tests of jaxcomm itself refuse."""
    # Counts jax's devices now: the demo sets their number where jax has not started.
    assert len(jax.devices()) == 8
    with jax.numpy_dtype_promotion("standard"):
        yield
