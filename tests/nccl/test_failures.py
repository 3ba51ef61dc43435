"""Operations that fail or hang: who says what, and that the next communicator works."""

import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm

INTERNAL_ERROR, REMOTE_ERROR = 3, 6
# Of what is to happen at once, for a machine that has more to do than these tests.
PATIENCE_SECONDS = 30


def summed(mesh, lane=None, axis="i"):
    spec = jax.P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            lambda x: jaxcomm.psum(x, axis, lane=lane),
            mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
        )
    )  # fmt: skip


def error_of(program, x):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(program(x))
    return str(caught.value)


class Waiting:
    """A program that runs in a thread of its own, and what becomes of it."""

    def __init__(self, program, x, stand_in, calls):
        """Starts it, and returns once there were so many calls of ncclAllReduce."""
        stand_in.clear()
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(program, x))
        self._thread.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(stand_in.trace("ncclAllReduce")) < calls:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _run(self, program, x):
        try:
            jax.block_until_ready(program(x))
        except jax.errors.JaxRuntimeError as error:
            self.error = str(error)

    def end(self):
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture
def works_again(make_mesh):
    """Gives a function that shows that all is well after a new start."""

    def check():
        jaxcomm.finalize()
        mesh = make_mesh(i=3)
        jaxcomm.init(mesh)
        np.testing.assert_array_equal(summed(mesh)(jnp.arange(3.0)), [3, 3, 3])

    return check


def test_an_operation_that_hangs_is_named_at_its_deadline(
    stand_in, make_mesh, monkeypatch, tmp_path, works_again
):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "0.4")
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", str(tmp_path))
    mesh = make_mesh(i=3)
    program, x = summed(mesh), jnp.arange(6.0)
    jax.block_until_ready(program(x))
    stand_in.clear()
    stand_in.hang("ncclAllReduce")
    error = error_of(program, x)
    assert "DEADLINE_EXCEEDED" in error
    assert (
        "psum(float32[2]) over axes ('i',) (lane 'default', operation 2), rank" in error
    )
    assert "not done after 0.4 s" in error
    assert "JAXCOMM_TIMEOUT" in error
    assert "jaxcomm.finalize() in every process, then jaxcomm.init()" in error
    assert len(stand_in.trace("ncclCommAbort")) == 3
    # The next one says the same at once.
    assert "not done after 0.4 s" in error_of(program, x)
    record = json.loads((tmp_path / "flight-record-0.json").read_text())
    assert "psum" in json.dumps(record)
    assert "timeout" in json.dumps(record)
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    works_again()


def test_an_asynchronous_error_ends_who_waits_and_who_comes(
    stand_in, make_mesh, works_again
):
    mesh = make_mesh(i=3)
    program, x = summed(mesh), jnp.arange(3.0)
    jax.block_until_ready(program(x))
    stand_in.hang("ncclAllReduce")
    waiting = Waiting(program, x, stand_in, calls=3)
    stand_in.async_error(stand_in.trace("ncclAllReduce")[1]["comm"], REMOTE_ERROR)
    error = waiting.end()
    assert error is not None
    assert (
        "psum(float32[1]) over axes ('i',) (lane 'default', operation 2), rank" in error
    )
    assert " of 3 (device " in error
    assert "An asynchronous error that a test asked for" in error
    assert len(stand_in.trace("ncclCommAbort")) == 3
    assert "An asynchronous error that a test asked for" in error_of(program, x)
    works_again()


def test_a_call_that_nccl_refuses_is_named(stand_in, make_mesh, works_again):
    mesh = make_mesh(i=3)
    program, x = summed(mesh), jnp.arange(3.0)
    jax.block_until_ready(program(x))
    stand_in.fail("ncclAllReduce", INTERNAL_ERROR, after=1)
    error = error_of(program, x)
    for text in (
        "psum(float32[1]) over axes ('i',)", "lane 'default'",
        "ncclAllReduce: internal error", "ncclAllReduce failed because a test asked",
        "jaxcomm.finalize()",
    ):  # fmt: skip
        assert text in error
    assert "ncclAllReduce: internal error" in error_of(program, x)
    works_again()


@pytest.mark.parametrize("function", ["ncclGroupStart", "ncclSend", "ncclGroupEnd"])
def test_a_hop_that_nccl_refuses_leaves_no_group_open(
    stand_in, make_mesh, works_again, function
):
    mesh = make_mesh(i=2)
    program = jax.jit(
        jax.shard_map(
            lambda x: jaxcomm.ppermute(x, "i", [(0, 1), (1, 0)]),
            mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"),
        )
    )  # fmt: skip
    x = jnp.arange(2.0)
    jax.block_until_ready(program(x))
    stand_in.fail(function, INTERNAL_ERROR)
    error = error_of(program, x)
    assert "ppermute(float32[1]) with parameters [1, 0] over axes ('i',)" in error
    assert f"{function}: internal error" in error
    works_again()


def test_closing_ends_an_operation_that_hangs(
    stand_in, make_mesh, monkeypatch, works_again
):
    # Which is also what close() grants to operations on their way.
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "1")
    mesh = make_mesh(i=2)
    program, x = summed(mesh), jnp.arange(2.0)
    jax.block_until_ready(program(x))
    stand_in.hang("ncclAllReduce")
    waiting = Waiting(program, x, stand_in, calls=2)
    begin = time.monotonic()
    jaxcomm.communicators()[0].close()
    error = waiting.end()
    assert time.monotonic() - begin < PATIENCE_SECONDS
    assert error is not None
    assert "psum(float32[1])" in error or "closed" in error
    assert jaxcomm.counters().live == 0
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    works_again()


def test_a_lane_with_resources_of_its_own_survives_another(
    stand_in, make_mesh, monkeypatch, works_again
):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "0.4")
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, lanes=("default", "other"))
    default, other = summed(mesh), summed(mesh, lane="other")
    x = jnp.arange(2.0)
    np.testing.assert_array_equal(other(x), [1, 1])
    stand_in.hang("ncclAllReduce")
    assert "(lane 'default', operation 1)" in error_of(default, x)
    np.testing.assert_array_equal(other(x), [1, 1])
    works_again()


def test_those_that_share_with_an_aborted_one_fail_and_never_hang(
    stand_in, make_mesh, monkeypatch, works_again
):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "0.4")
    mesh = make_mesh(i=2, j=2)
    over_i, over_j = summed(mesh, axis="i"), summed(mesh, axis="j")
    x = jnp.arange(4.0)
    jax.block_until_ready((over_i(x), over_j(x)))
    stand_in.hang("ncclAllReduce")
    assert "over axes ('i',)" in error_of(over_i, x)
    error = error_of(over_j, x)
    assert "psum(float32[1]) over axes ('j',)" in error
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    works_again()


def test_one_that_failed_can_be_made_anew_beside_those_it_shared_with(
    stand_in, make_mesh, monkeypatch
):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "0.4")
    mesh = make_mesh(i=2, j=2)
    first, _ = jaxcomm.init(mesh, ["i", "j"])
    program, x = summed(mesh), jnp.arange(4.0)
    stand_in.hang("ncclAllReduce")
    error_of(program, x)
    first.close()
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    jaxcomm.init(mesh, "i")
    np.testing.assert_array_equal(program(x), [2, 4, 2, 4])


def test_every_program_in_flight_ends(stand_in, make_mesh, monkeypatch, works_again):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "0.4")
    mesh = make_mesh(i=2)
    program, x = summed(mesh), jnp.arange(2.0)
    jax.block_until_ready(program(x))
    stand_in.hang("ncclAllReduce", after=4)
    outs = [program(x) for _ in range(20)]
    ended = []
    for out in outs:
        try:
            ended.append(out.tolist())
        except jax.errors.JaxRuntimeError as error:
            ended.append("not done after 0.4 s" in str(error))
    assert ended[:2] == [[1, 1]] * 2
    # Those before it may have lost their result with the communicator.
    assert ended[3:] == [True] * 17
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "60")
    works_again()
