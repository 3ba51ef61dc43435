"""How long a rank waits is said for all communicators, or for one.

That they do wait so long: test_errors_at_run_time.py.
"""

import datetime

import jax
import numpy as np
import pytest

import jaxcomm


def test_the_environment_says_it_for_all(make_mesh, monkeypatch):
    assert [c.timeout for c in jaxcomm.init(make_mesh(i=2))] == [300]
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "12.5")
    assert [c.timeout for c in jaxcomm.init(make_mesh(i=2), lanes="new")] == [12.5]


@pytest.mark.parametrize("timeout", [90, 90.0, datetime.timedelta(minutes=1.5)])
def test_init_says_it_for_those_it_makes(make_mesh, monkeypatch, timeout):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "12.5")
    made = jaxcomm.init(make_mesh(a=2, b=2), timeout=timeout)
    assert [c.timeout for c in made] == [90, 90, 90]
    (record, *_) = jaxcomm.flight_record(made[0]).process.communicators
    assert record.timeout_seconds == 90


def test_one_that_is_live_keeps_its_own(make_mesh):
    mesh = make_mesh(i=2)
    (first,) = jaxcomm.init(mesh, timeout=90)
    for same in (None, 90):
        assert jaxcomm.init(mesh, timeout=same)[0] is first
    message = r"timeout=60 was asked for, but <Comm.*live> is live with 90 s; close\(\)"
    with pytest.raises(jaxcomm.CommunicatorError, match=message):
        jaxcomm.init(mesh, timeout=60)
    split = jax.P("i")
    program = jax.shard_map(
        lambda x: jaxcomm.psum(x, "i"), mesh=mesh, in_specs=split, out_specs=split
    )
    assert jax.jit(program)(np.ones(2)).tolist() == [2, 2]
    assert [c.timeout for c in jaxcomm.communicators()] == [90]
    first.close()
    assert jaxcomm.init(mesh, timeout=60)[0].timeout == 60


def test_a_program_that_makes_one_anew_keeps_to_what_init_said(make_mesh):
    mesh = make_mesh(i=2)
    jaxcomm.init(mesh, timeout=90)[0].close()
    split = jax.P("i")
    program = jax.shard_map(
        lambda x: jaxcomm.psum(x, "i"), mesh=mesh, in_specs=split, out_specs=split
    )
    jax.jit(program).lower(np.ones(2))
    assert [c.timeout for c in jaxcomm.communicators()] == [90]


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        ("90", TypeError),
        (True, TypeError),
        ([90], TypeError),
        (0, ValueError),
        (-1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (datetime.timedelta(0), ValueError),
    ],
)
def test_what_is_no_time(make_mesh, timeout, error):
    with pytest.raises(error, match=r"init: timeout must be a (positive )?number of"):
        jaxcomm.init(make_mesh(i=2), timeout=timeout)
    assert len(jaxcomm.communicators()) == 0
