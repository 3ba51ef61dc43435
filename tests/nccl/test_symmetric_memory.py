"""Symmetric memory: registered once with each communicator, gone before it is freed."""

import contextlib
import gc
import threading
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting
from models import over
from stand_in import StandIn

import jaxcomm
from jaxcomm._built import _ffi
from jaxcomm.communicator import symmetric_pool
from jaxcomm.communicator.backends.nccl import registration

KIB = 1 << 10
SIZE = 256 * KIB
REGISTER = ("ncclCommWindowRegister", "ncclCommRegister")
DEREGISTER = ("ncclCommWindowDeregister", "ncclCommDeregister")
MEMORY = ("ncclMemAlloc", "ncclMemFree")


def rows(mesh, x):
    sharding = jax.NamedSharding(mesh, jax.P(mesh.axis_names[0]))
    return jax.device_put(x, sharding)


def psum_of(mesh):
    return over(mesh, lambda x: jaxcomm.psum(x, "i"), out=jax.P())


def names(stand_in, *wanted):
    return [call["name"] for call in stand_in.trace(*wanted)]


def violations(stand_in):
    return [call["violation"] for call in stand_in.trace() if "violation" in call]


class Patient:
    """A clock that stands still, and lets go of arrays when somebody sleeps."""

    def __init__(self):
        self.held, self.slept = [], 0

    def monotonic(self):
        return 0.0

    def sleep(self, seconds):
        self.slept += 1
        self.held.clear()
        threading.Event().wait(seconds)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    made = Patient()
    monkeypatch.setattr(symmetric_pool, "time", made)
    return made


@pytest.fixture
def pool(stand_in, make_mesh):
    made = jaxcomm.SymmetricPool(make_mesh(i=2), SIZE)
    yield made
    gc.collect(1)
    made.close()
    assert not violations(stand_in)


def test_arrays_lie_in_the_pool_and_hold_what_they_should(pool):
    x = rows(pool.mesh, np.arange(12, dtype=np.float32).reshape(4, 3))
    y = pool.device_put(x)
    z = pool.zeros((4, 3), "bfloat16", jax.P("i"))
    assert y.sharding == x.sharding
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(z, np.zeros((4, 3)))
    # What each device got begins where that of the others does: NCCL's windows are
    # symmetric in offsets, not in addresses.
    offsets = [
        [part.data.unsafe_buffer_pointer() for part in array.addressable_shards]
        for array in (y, z)
    ]
    assert [b - a for a, b in zip(*offsets, strict=True)] == [512, 512]
    np.testing.assert_array_equal(
        psum_of(pool.mesh)(y), np.asarray(x[:2]) + np.asarray(x[2:])
    )


def test_every_type_and_shape_of_dlpack_can_lie_in_it(pool):
    for dtype in ("bool", "uint32", "int64", "float16", "complex64"):
        with jax.enable_x64(True):
            x = rows(pool.mesh, jnp.asarray([[1, 0], [2, 3]], dtype))
            y = pool.device_put(x)
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, x)
    assert pool.zeros((2, 0), spec=jax.P("i")).shape == (2, 0)
    assert pool.zeros(()) == 0
    assert pool.zeros(2).shape == (2,)


def test_a_pool_is_registered_with_what_there_is_and_with_what_comes(
    stand_in, make_mesh
):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, "i")
    with_one = jaxcomm.SymmetricPool(mesh, SIZE)
    assert len(names(stand_in, *REGISTER)) == 2  # ranks
    jaxcomm.init(mesh, "i", lanes=("b", "c"), policy=jaxcomm.CommPolicy(lanes=3))
    assert len(names(stand_in, *REGISTER)) == 6
    assert set(with_one.registrations().values()) == {"window"}
    for member in jaxcomm.communicators():
        with_one.register_with(member.key)
    assert len(names(stand_in, *REGISTER)) == 6
    # One pool, however many communicators use it.
    assert len(names(stand_in, "ncclMemAlloc")) == 2
    report = jaxcomm.memory_report()
    assert [row.symmetric_bytes for row in report] == [2 * SIZE] * 3
    # Those of other devices and policies have nothing to do with it.
    jaxcomm.init(make_mesh(i=4), "i")
    away = jaxcomm.CommPolicy(lanes=4, symmetric=False)
    (other,) = jaxcomm.init(mesh, "i", lanes="d", policy=away)
    assert with_one.registrations()[other] == "CommPolicy(symmetric=False)"
    assert len(with_one.registrations()) == 4
    assert len(names(stand_in, *REGISTER)) == 6
    with_one.close()


def test_registrations_end_before_the_pool_and_before_their_communicator(
    stand_in, make_mesh
):
    mesh = make_mesh(i=2)
    pool = jaxcomm.SymmetricPool(mesh, SIZE)
    jaxcomm.init(mesh, "i", lanes=("default", "b"))
    stand_in.clear()
    jaxcomm.finalize()
    order = names(stand_in, *DEREGISTER, "ncclCommFinalize")
    assert order[:2] == ["ncclCommWindowDeregister"] * 2
    assert "ncclCommFinalize" in order
    # New ones get it anew.
    jaxcomm.init(mesh, "i", lanes=("default", "b"))
    assert list(pool.registrations().values()) == ["window"] * 2
    stand_in.clear()
    pool.close()
    calls = names(stand_in, *DEREGISTER, *MEMORY)
    assert calls == ["ncclCommWindowDeregister"] * 4 + ["ncclMemFree"] * 2
    assert pool.registrations() == {}
    # The communicators go on, and end without it.
    assert psum_of(mesh)(jnp.ones(2)) == 2
    jaxcomm.finalize()
    assert not violations(stand_in)


def test_a_pool_is_registered_no_more_once_a_process_without_it_was_taken_in(
    stand_in, make_mesh
):
    mesh = make_mesh(i=2)
    old = jaxcomm.SymmetricPool(mesh, SIZE)
    registration.forget([1])  # which has no device of the mesh
    jaxcomm.init(mesh, "i")
    assert list(old.registrations().values()) == ["window"]
    jaxcomm.finalize()
    registration.forget([0])
    stand_in.clear()
    jaxcomm.init(mesh, "i")
    assert not names(stand_in, *REGISTER)
    (why,) = old.registrations().values()
    assert why == "jaxcomm.grow took in a process without it; make another"
    # As in the process that was taken in, where it is the first.
    new = jaxcomm.SymmetricPool(mesh, SIZE)
    assert new.number == 1
    assert list(new.registrations().values()) == ["window"]
    new.close(), old.close()
    assert not violations(stand_in)


def test_memory_comes_back_all_at_once_when_no_array_is_left(pool, monkeypatch):
    x = pool.zeros((2, 1024), spec=jax.P("i"))
    assert pool.used_bytes == 4096
    with monkeypatch.context() as patch:
        clock = waiting.Clock()
        patch.setattr(symmetric_pool, "time", clock)
        for name in ("reset", "close"):
            clock.slept.clear()
            with pytest.raises(
                ValueError, match=f"{name}: 2 arrays still lie in it; d"
            ):
                getattr(pool, name)()
            assert 1 <= sum(clock.slept) < 2
    del x
    gc.collect(1)
    assert pool.used_bytes == 4096
    pool.reset()
    assert pool.used_bytes == 0


def test_an_array_that_is_let_go_of_a_little_later_is_waited_for(pool, patient):
    patient.held.append(pool.zeros((2, 1024), spec=jax.P("i")))
    pool.reset()
    assert patient.slept > 0
    assert pool.used_bytes == 0


@pytest.mark.parametrize("after", [0, 1])
def test_where_ncclcommwindowregister_refuses_it_goes_on_as_a_buffer(
    stand_in, make_mesh, after
):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, "i")
    # The first rank's call, or the second's: all ranks do without a window.
    stand_in.fail("ncclCommWindowRegister", 5, after)
    pool = jaxcomm.SymmetricPool(mesh, SIZE)
    (told,) = pool.registrations().values()
    assert told.startswith("buffer: ncclCommWindowRegister")
    assert names(stand_in, "ncclCommRegister") == ["ncclCommRegister"] * 2
    assert jaxcomm.memory_report()[0].symmetric_bytes == 2 * SIZE
    assert psum_of(mesh)(jnp.ones(2)) == 2
    stand_in.clear()
    for _ in range(2):
        pool.close()
    assert names(stand_in, *DEREGISTER) == ["ncclCommDeregister"] * 2
    assert not violations(stand_in)
    assert repr(pool) == "<SymmetricPool 262144 bytes on each device, closed>"
    for use in (pool.reset, lambda: pool.zeros((2,))):
        with pytest.raises(ValueError, match="the SymmetricPool is closed"):
            use()


def test_where_both_refuse_collectives_work(stand_in, make_mesh):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, "i")
    stand_in.fail("ncclCommWindowRegister", 5)
    for after in (0, 1):
        stand_in.fail("ncclCommRegister", 5, after)
    pool = jaxcomm.SymmetricPool(mesh, SIZE)
    (told,) = pool.registrations().values()
    assert "ncclCommWindowRegister" in told
    assert "ncclCommRegister" in told
    assert jaxcomm.memory_report()[0].symmetric_bytes == 0
    assert psum_of(mesh)(pool.zeros((2,), spec=jax.P("i")) + 1) == 2
    gc.collect(1)
    pool.close()


@pytest.mark.parametrize("after", [0, 1])
def test_no_rank_has_it_where_one_rank_has_not(stand_in, make_mesh, after):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, "i")
    stand_in.fail("ncclCommWindowRegister", 5)
    stand_in.fail("ncclCommRegister", 5, after)
    pool = jaxcomm.SymmetricPool(mesh, SIZE)
    (told,) = pool.registrations().values()
    assert "not alike on all ranks" in told
    assert f"rank {after} of 2" in told.split("; ncclCommRegister")[0].split("; ")[-1]
    assert names(stand_in, *DEREGISTER) == ["ncclCommDeregister"]
    assert jaxcomm.memory_report()[0].symmetric_bytes == 0
    assert psum_of(mesh)(pool.zeros((2,), spec=jax.P("i")) + 1) == 2
    gc.collect(1)
    pool.close()
    assert names(stand_in, *DEREGISTER) == ["ncclCommDeregister"]


OLD = """
mesh = mesh_of(2)
jaxcomm.init(mesh, "i")
def made():
    global answer
    pool = jaxcomm.SymmetricPool(mesh, 4096)
    answer = [*pool.registrations().values()]
    pool.close()
answer = error_of(made) or answer
"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("22203", ["buffer: NCCL 2.22.3 has no windows"]),
        ("21805", "CommunicatorError: SymmetricPool: NCCL 2.18.5 has no ncclMemAlloc; "
                  "2.19 and newer have"),
    ],
)  # fmt: skip
def test_older_libraries_do_what_they_can(told, version, expected):
    assert told(OLD, JAXCOMM_FAKE_NCCL_VERSION=version) == expected


def test_bad_arguments_are_refused(pool, make_mesh):
    mesh, sharding = pool.mesh, r"NamedSharding on the devices of the pool"
    made, put, zeros = jaxcomm.SymmetricPool, pool.device_put, pool.zeros
    keys = rows(mesh, jax.random.split(jax.random.key(0), 2))
    zeros((2, SIZE // 8), spec=jax.P("i"))
    for call, arguments, error, text in [
        (made, (2, SIZE), TypeError, r"mesh must be a jax\.sharding\.Mesh, got int"),
        *(
            (made, (mesh, size), ValueError, "must be a positive integer, got")
            for size in (0, -1, 1.5, True, "1")
        ),
        (put, (np.ones(2),), TypeError, sharding),
        (put, (rows(make_mesh(i=4), jnp.ones(4)),), TypeError, sharding),
        (put, (keys,), ValueError, r"arrays of key<fry> cannot be made"),
        *(
            (zeros, (shape,), ValueError, r"zeros: shape must be of integers")
            for shape in ((-8,), (2, -1), (1.5,), "a")
        ),
        (zeros, ((2,), "float32", "i"), TypeError, "must be a jax.P or None, got 'i'"),
        (zeros, ((2,), "float8_e4m3fn"), ValueError, "cannot be made, since DLPack"),
        (zeros, (SIZE // 4,), ValueError, r"SymmetricPool: 262144 bytes a device were "
         r"asked for, and 131072 of 262144 are left"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            call(*arguments)


def test_more_memory_than_there_is_is_an_error_and_leaves_nothing(stand_in, make_mesh):
    mesh = make_mesh(i=2)
    with pytest.raises(jaxcomm.CommunicatorError, match=r"ncclMemAlloc.*bytes were "
                       r"asked for on device 0, which has \d+ free"):  # fmt: skip
        jaxcomm.SymmetricPool(mesh, 1 << 40)
    stand_in.clear()
    jaxcomm.init(mesh, "i")
    assert not names(stand_in, *REGISTER)


def test_other_devices_are_refused(make_mesh, monkeypatch):
    monkeypatch.delenv("JAXCOMM_NCCL_LIBRARY", raising=False)
    with pytest.raises(jaxcomm.CommunicatorError, match=r"SymmetricPool: .*NVIDIA"):
        jaxcomm.SymmetricPool(make_mesh(i=2), SIZE)


def differ(here, what):
    mesh = here.mesh(2, 2)
    policy = jaxcomm.CommPolicy(symmetric=what == "size")
    a, b = jaxcomm.init(mesh, "i", lanes=("a", "b"), policy=policy)
    if what == "size":
        with pytest.raises(jaxcomm.CommunicatorError) as caught:
            jaxcomm.SymmetricPool(mesh, SIZE * (1 + here.process))
    else:
        one, two = (jaxcomm.SymmetricPool(mesh, 1 << 16) for _ in range(2))
        pool, keys = {
            "order": (one, [a.key, b.key] if here.process else [b.key, a.key]),
            "communicator": (one, [a.key] if here.process else [b.key]),
            "pool": (one if here.process else two, [a.key]),
        }[what]
        with pytest.raises(jaxcomm.CommunicatorError) as caught:
            registration.register(pool, keys)
        one.close(), two.close()
    total = here.run(mesh, lambda x: jaxcomm.psum(x, "i", lane="a"), np.ones(4, "f4"))
    return [str(caught.value), total.tolist()]


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["size", "order", "communicator", "pool"])
def test_registrations_that_differ_fail_together_and_all_go_on(team, what):
    """W2."""
    for text, total in team.call(differ, what=what):
        assert (
            "about to register different symmetric memory, or in different order"
            in text
        )
        if what == "size":
            assert "process 0: 2 registrations" in text
            assert "nothing was registered" in text
        assert total == [4, 4]


def one_has_it_not(here, refuses):
    mesh = here.mesh(2, 2)
    jaxcomm.init(mesh, "i")
    StandIn().fail("ncclCommWindowRegister", 5)
    if here.process == refuses:
        for after in (0, 1):
            StandIn().fail("ncclCommRegister", 5, after)
    pool = jaxcomm.SymmetricPool(mesh, SIZE)
    (told,) = pool.registrations().values()
    held = jaxcomm.memory_report()[0].symmetric_bytes
    total = here.run(mesh, lambda x: jaxcomm.psum(x, "i"), np.ones(4, "f4"))
    pool.close()
    return told, held, total.tolist()


@pytest.mark.multiprocess
@pytest.mark.parametrize("refuses", [0, 1])
def test_no_process_has_it_where_one_has_not(team, refuses):
    for told, held, total in team.call(one_has_it_not, refuses=refuses):
        assert told.startswith("not alike on all processes: process 0: ")
        assert f"process {refuses}: ncclCommWindowRegister" in told
        assert held == 0
        assert total == [4, 4]


def one_cannot_ask(here):
    """NCCL ends in process 1, which tells the other why."""
    mesh = here.mesh(2, 2)
    jaxcomm.init(mesh, "i")
    refusal = RuntimeError("NCCL has left")
    failing = unittest.mock.patch.object(_ffi, "register_memory", side_effect=refusal)
    with failing if here.process else contextlib.nullcontext():
        if not here.process:
            StandIn().fail("ncclCommWindowRegister", 5)
        with pytest.raises(jaxcomm.CommunicatorError) as caught:
            jaxcomm.SymmetricPool(mesh, SIZE)
    return str(caught.value)


@pytest.mark.multiprocess
def test_an_error_of_one_process_reaches_the_others(team):
    for error in team.call(one_cannot_ask):
        assert error == "registering symmetric memory (process 1): NCCL has left"
