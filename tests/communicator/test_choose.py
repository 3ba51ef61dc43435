"""Which backend serves a partition, what is said where it cannot, and a new one."""

import types

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator import backends, replica_groups
from jaxcomm.communicator.backends import BACKENDS, Backend, Choice
from jaxcomm.communicator.backends.nccl import library

THERE = library.Library("libnccl.so.2", "2.28.9", 22809, "13.0", (), False)


def mesh_of(platform):
    """Two devices as JAX shows them, as far as the choice of a backend looks."""
    devices = [
        types.SimpleNamespace(platform=platform, process_index=0, id=i)
        for i in range(2)
    ]
    return types.SimpleNamespace(
        devices=np.array(devices), axis_names=("i",), shape={"i": 2}
    )


@pytest.fixture
def choose(monkeypatch):
    """Gives ``choose(platform, backend)``: what serves two devices beside NCCL."""
    monkeypatch.setattr("jaxcomm.config.BACKEND", None)
    monkeypatch.setattr(library, "load", lambda: THERE)

    def run(platform, backend=None):
        mesh = mesh_of(platform)
        part = replica_groups.partition(replica_groups.grid_of(mesh), ("i",))
        found = backends.choose(mesh, part, "default", backend)
        return found.backend.name, found.transport

    return run


@pytest.mark.parametrize(
    ("platform", "backend", "found"),
    [
        ("cpu", None, ("host", "memory")),
        ("gpu", None, ("nccl", "NCCL 2.28.9")),
        ("tpu", None, ("xla", "xla")),
        ("cpu", "xla", ("xla", "xla")),
        ("gpu", "xla", ("xla", "xla")),
        ("gpu", "nccl", ("nccl", "NCCL 2.28.9")),
    ],
)
def test_the_platform_chooses_unless_somebody_does(choose, platform, backend, found):
    assert choose(platform, backend) == found


def test_the_variable_chooses_where_the_call_does_not(choose, monkeypatch):
    monkeypatch.setattr("jaxcomm.config.BACKEND", "xla")
    assert choose("cpu") == ("xla", "xla")
    assert choose("cpu", "host") == ("host", "memory")


def test_what_cannot_serve_says_why_and_where_nobody_insists_xla_does(
    choose, monkeypatch
):
    monkeypatch.setattr(library, "load", lambda: "it is gone")
    assert choose("gpu") == ("xla", "xla: it is gone")
    with pytest.raises(
        jaxcomm.CommunicatorError,
        match=r"backend 'nccl' cannot join the groups of axes \('i',\) \(lane "
        r"'default'\): it is gone\. Use backend='xla', or None to let",
    ):
        choose("gpu", "nccl")


def test_host_serves_cpu_devices_alone(choose):
    with pytest.raises(
        jaxcomm.CommunicatorError,
        match=r"'host' cannot join .* it moves bytes of CPU devices, and these are gpu",
    ):
        choose("gpu", "host")


class Lent(Backend):
    """A backend in a test: operations are XLA's, and it remembers what it made."""

    name = "lent"
    is_ours = False

    def __init__(self):
        self.live = []

    def choice(self, mesh, part):
        """Serves groups of two."""
        return Choice(self, "lent") if part.sizes == (2, 2) else "groups are not of two"

    def make(self, member, mesh, part, choice, live):
        """Remembers it, and how many there were."""
        self.live.append(member)
        return {"borrowed": 1}

    def end(self, member):
        """Forgets it."""
        self.live.remove(member)

    def memory(self, member, live):
        """Says that it is made of as many bytes as there are communicators."""
        return {"pinned_bytes": len(live), "shared": True}


def test_a_new_backend_is_a_class_and_an_entry(make_mesh, monkeypatch):
    lent = Lent()
    monkeypatch.setitem(BACKENDS, "lent", lent)
    mesh = make_mesh(i=2, j=2)
    before = jaxcomm.counters()
    (member,) = jaxcomm.init(mesh, "j", backend="lent")
    assert lent.live == [member]
    assert (member.backend, member.transport, member.policy) == ("lent", "lent", None)
    x = jax.numpy.arange(8.0).reshape(2, 4)
    total = jax.jit(
        jax.shard_map(
            lambda x: jaxcomm.psum(x, "j"), mesh=mesh, in_specs=jax.P("i", "j"),
            out_specs=jax.P("i"),
        )
    )  # fmt: skip
    np.testing.assert_array_equal(total(x), x[:, :2] + x[:, 2:])
    assert jaxcomm.counters().borrowed == before.borrowed + 1
    (row,) = jaxcomm.memory_report()
    assert (row.pinned_bytes, row.shared, row.host_bytes) == (1, True, 0)
    with pytest.raises(jaxcomm.CommunicatorError, match="groups are not of two"):
        jaxcomm.init(mesh, ("i", "j"), backend="lent")
    jaxcomm.finalize()
    assert lent.live == []
