"""Children that a process forks while it communicates: not one takes its place."""

import multiprocessing
import os
import warnings

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator import settling, shutdown

pytestmark = pytest.mark.multiprocess


def in_child(action):
    """Return what an action raised in a forked child, or what it returned, as text."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX and Python: threads do not survive it
        child = os.fork()
    if child == 0:
        try:
            text = f"returned {action()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read) as said:
        text = said.read()
    assert os.waitpid(child, 0) == (child, 0), text
    return text


def forks(here, mesh):
    run = here.program(mesh, lambda x: jaxcomm.psum(x, "i"))
    ones = here.put(mesh, np.ones((2, 1), np.float32))
    thousands = here.put(mesh, np.full((2, 1), 1000, np.float32))
    np.testing.assert_equal(here.mine(run(ones)), [[2]])
    if here.process == 0:
        forked = f"was forked from process {os.getpid()}"
        # The other process waits in the next sum: for this one, not for a child.
        text = in_child(lambda: here.mine(run(thousands)))
        assert "psum(float32[1]) over axes ('i',): process" in text, text
        assert forked in text, text
        text = in_child(lambda: jaxcomm.init(mesh, lanes="of a child"))
        assert text.startswith("CommunicatorError: "), text
        assert forked in text, text
        assert "spawn" in text, text
        text = in_child(lambda: jaxcomm.shrink(mesh, "i"))
        assert text.startswith("CommunicatorError: shrink is called in process"), text
        assert forked in text, text
        text = in_child(lambda: (jaxcomm.finalize(), len(jaxcomm.communicators())))
        assert text == "returned (None, 0)"
        text = in_child(lambda: (shutdown._at_exit(), settling._is_over.is_set()))
        assert text == "returned (None, False)"  # the end of a child ends nothing
        assert in_child(lambda: os.execv("/bin/true", ["true"])) == ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = multiprocessing.get_context("fork").Process(target=os.getpid)
            child.start()
        child.join()
        assert child.exitcode == 0
    np.testing.assert_equal(here.mine(run(ones)), [[2]])
    # The parent's communicator is as it was.
    assert len(jaxcomm.communicators()) == 1
    assert jax.process_count() > 1


def test_a_forked_child_is_refused_and_disturbs_nobody(team):
    team.call(forks, at=(2, 1))
