"""FlashAttention-3 with a stand-in for its targets on the CPU."""

import flash_double
import jax
import pytest

from jaxcomm.attention.kernels.flash import kernel as flash
from jaxcomm.attention.kernels.flash import library
from jaxcomm.attention.kernels.pallas.kernel import Pallas
from jaxcomm.attention.strategies import packing
from jaxcomm.compat import gpus


@pytest.fixture
def called(monkeypatch):
    """Have CPU programs call the stand-in; and count the calls of each target."""
    flash_double.register()
    # What is patched here is not part of what a program is traced from.
    jax.clear_caches()
    targets = []

    def counted(function):
        def call(*args, **options):
            targets.append(function.__name__)
            return function(*args, **options)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(library, name, counted(getattr(library, name)))
    monkeypatch.setattr(gpus, "why_not_compiled", lambda hop: None)
    monkeypatch.setattr(gpus, "local", lambda: ["a GPU"])
    monkeypatch.setattr(Pallas, "why_not", lambda self, hop: "there is no GPU")
    monkeypatch.setattr(flash, "why_not_on", lambda found: None)
    monkeypatch.setattr(gpus, "are_of_mesh", lambda: True)
    # As many pieces as a rank has tokens here: all pairs of them are compared.
    for name, pieces in ("_FEW", 12), ("_MIDDLE", 16), ("_MANY", 24):
        monkeypatch.setattr(packing, name, pieces)
    yield targets
    jax.clear_caches()


@pytest.fixture(params=["one call", "ring"])
def many_are(request, monkeypatch):
    """How many keys are computed: gathered, or around a ring if they are too many."""
    if request.param == "ring":
        monkeypatch.setattr(packing, "_GATHERED", 0)
    return request.param
