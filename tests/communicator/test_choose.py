"""Which backend serves a partition, what is said where it cannot, and a new one."""

import types

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm import _ffi
from jaxcomm.communicator import backends, replica_groups
from jaxcomm.communicator.backends import BACKENDS, Backend, Connection
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
        partition = replica_groups.partition(replica_groups.grid_of(mesh), ("i",))
        found, refusal = backends.choose(mesh, partition, "default", backend)
        return found.name, refusal

    return run


@pytest.mark.parametrize(
    ("platform", "backend", "found"),
    [
        ("cpu", None, ("host", "")),
        ("gpu", None, ("nccl", "")),
        ("tpu", None, ("xla", "")),
        ("cpu", "xla", ("xla", "")),
        ("gpu", "xla", ("xla", "")),
        ("gpu", "nccl", ("nccl", "")),
    ],
)
def test_the_platform_chooses_unless_somebody_does(choose, platform, backend, found):
    assert choose(platform, backend) == found


def test_the_variable_chooses_where_the_call_does_not(choose, monkeypatch):
    monkeypatch.setattr("jaxcomm.config.BACKEND", "xla")
    assert choose("cpu") == ("xla", "")
    assert choose("cpu", "host") == ("host", "")


def test_what_cannot_serve_says_why_and_where_nobody_insists_xla_does(
    choose, monkeypatch
):
    monkeypatch.setattr(library, "load", lambda: "it is gone")
    assert choose("gpu") == ("xla", "it is gone")
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

    def refusal(self, mesh, partition):
        """Serve groups of two."""
        return None if partition.sizes == (2, 2) else "groups are not of two"

    def make(self, spec, live):
        """Remember it."""
        self.live.append(spec)
        return Connection("lent", {"borrowed": 1})

    def end(self, spec, connection):
        """Forget it."""
        self.live.remove(spec)

    def memory(self, spec, connection, live):
        """Say that it is made of as many bytes as there are communicators."""
        return {"pinned_bytes": len(live), "shared": True}


def psum_over_j(mesh):
    return jax.jit(
        jax.shard_map(
            lambda x: jaxcomm.psum(x, "j"), mesh=mesh, in_specs=jax.P("i", "j"),
            out_specs=jax.P("i"),
        )
    )  # fmt: skip


X = np.arange(8.0, dtype=np.float32).reshape(2, 4)


def test_a_backend_may_leave_its_operations_to_xla(make_mesh, monkeypatch):
    lent = Lent()
    monkeypatch.setitem(BACKENDS, "lent", lent)
    mesh = make_mesh(i=2, j=2)
    before = jaxcomm.counters()
    (member,) = jaxcomm.init(mesh, "j", backend="lent")
    assert lent.live == [member.spec]
    assert (member.backend, member.transport, member.policy) == ("lent", "lent", None)
    np.testing.assert_array_equal(psum_over_j(mesh)(X), X[:, :2] + X[:, 2:])
    assert jaxcomm.counters().borrowed == before.borrowed + 1
    (row,) = jaxcomm.memory_report()
    assert (row.pinned_bytes, row.shared, row.host_bytes) == (1, True, 0)
    with pytest.raises(jaxcomm.CommunicatorError, match="groups are not of two"):
        jaxcomm.init(mesh, ("i", "j"), backend="lent")
    jaxcomm.finalize()
    assert lent.live == []


class Toy(Backend):
    """A backend from outside the package, whose operations are custom calls."""

    name = "toy"

    def refusal(self, mesh, partition):
        """Serve all."""

    def make(self, spec, live):
        """Have the extension move bytes within the process."""
        _ffi.create_host(
            spec.key, str(spec.partition.axes), spec.lane, spec.platform, spec.timeout,
            [list(group) for group in spec.partition.groups],
        )  # fmt: skip
        return Connection("toy memory", {"created": 1})


@pytest.fixture
def toy():
    """The line by which a program adds a backend."""
    backends.register(Toy())
    yield "toy"
    jaxcomm.finalize()
    del BACKENDS["toy"]


def test_a_new_backend_is_a_class_and_a_line(make_mesh, toy, counted):
    mesh = make_mesh(i=2, j=2)
    jaxcomm.init(mesh, "j", backend=toy)
    np.testing.assert_array_equal(psum_over_j(mesh)(X), X[:, :2] + X[:, 2:])
    (member,) = jaxcomm.communicators()
    assert (member.backend, member.transport) == ("toy", "toy memory")
    assert member.stats()["calls"] == {"all_reduce": 1}
    assert counted() == {"created": 1, "live": 1}
    with pytest.raises(ValueError, match="there is a backend 'toy' already"):
        backends.register(Toy())
    with pytest.raises(ValueError, match=r"unknown; choose one of .*'xla', 'toy'"):
        jaxcomm.init(mesh, backend="smoke")


def test_backends_are_asked_when_nothing_live_serves(make_mesh, monkeypatch):
    mesh = make_mesh(i=4)
    asked = []
    refusal = type(BACKENDS["host"]).refusal

    def ask(self, mesh, partition):
        asked.append(partition.axes)
        return refusal(self, mesh, partition)

    monkeypatch.setattr(type(BACKENDS["host"]), "refusal", ask)
    (member,) = jaxcomm.init(mesh)
    for _ in range(3):
        assert jaxcomm.init(mesh)[0] is member
    assert asked == [("i",)]
    member.close()
    assert jaxcomm.init(mesh)[0] is not member
    assert asked == [("i",)] * 2
