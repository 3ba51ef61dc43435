"""Variables and arguments that choose the timeout, the bound and the backend."""

import datetime
import os
import sys

import forked
import jax
import numpy as np
import pytest
import waiting

import jaxcomm
from jaxcomm import config


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e12"])
def test_a_timeout_that_is_no_time_is_refused_by_name(monkeypatch, make_mesh, text):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", text)
    with pytest.raises(
        ValueError, match=r"JAXCOMM_TIMEOUT is '.*'; it must be a positive"
    ):
        jaxcomm.init(make_mesh(i=2))
    assert len(jaxcomm.communicators()) == 0


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many"])
def test_a_bound_that_is_no_number_is_refused_by_name(monkeypatch, make_mesh, text):
    monkeypatch.setenv("JAXCOMM_MAX_COMMUNICATORS", text)
    with pytest.raises(ValueError, match=r"JAXCOMM_MAX_COMMUNICATORS is .*256"):
        jaxcomm.init(make_mesh(i=2))


@pytest.mark.parametrize("empty", [False, True])
def test_unset_and_empty_variables_mean_the_defaults(monkeypatch, empty):
    for name in ("JAXCOMM_TIMEOUT", "JAXCOMM_MAX_COMMUNICATORS"):
        monkeypatch.setenv(name, "")
        if not empty:
            monkeypatch.delenv(name)
    assert config.timeout_seconds() == 300.0
    assert config.max_communicators() == 256


def test_the_timeout_variable_is_read_when_a_communicator_is_made(
    make_mesh, monkeypatch
):
    assert [c.timeout for c in jaxcomm.init(make_mesh(i=2))] == [300]
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "212.5")
    assert [c.timeout for c in jaxcomm.init(make_mesh(i=2), lanes="new")] == [212.5]


@pytest.mark.parametrize("timeout", [90, 90.0, datetime.timedelta(minutes=1.5)])
def test_init_sets_the_timeout_of_what_it_makes(make_mesh, monkeypatch, timeout):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "212.5")
    made = jaxcomm.init(make_mesh(a=2, b=2), timeout=timeout)
    assert [c.timeout for c in made] == [90, 90, 90]
    (record, *_) = jaxcomm.flight_record(made[0]).process.communicators
    assert record.timeout_seconds == 90


def test_a_live_communicator_keeps_its_timeout(make_mesh, psum_over):
    mesh = make_mesh(i=2)
    (first,) = jaxcomm.init(mesh, timeout=90)
    for same in (None, 90):
        assert jaxcomm.init(mesh, timeout=same)[0] is first
    message = r"timeout=60 was asked for, but <Comm.*live> is live with 90 s; close\(\)"
    with pytest.raises(jaxcomm.CommunicatorError, match=message):
        jaxcomm.init(mesh, timeout=60)
    first.close()
    # A program that makes it anew keeps what init said.
    psum_over(mesh).lower(np.ones(2))
    (second,) = jaxcomm.communicators()
    assert second.timeout == 90
    second.close()
    assert jaxcomm.init(mesh, timeout=60)[0].timeout == 60


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
def test_init_refuses_a_timeout_that_is_no_time(make_mesh, timeout, error):
    with pytest.raises(error, match=r"init: timeout must be a (positive )?number of"):
        jaxcomm.init(make_mesh(i=2), timeout=timeout)
    assert len(jaxcomm.communicators()) == 0


@pytest.mark.parametrize("text", ["", "xla"])
def test_the_backend_is_read_once_when_the_package_is_imported(text):
    code = """
import os, jaxcomm
os.environ["JAXCOMM_BACKEND"] = "nccl"
print(jaxcomm.config.BACKEND)
"""
    run = forked.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAXCOMM_BACKEND": text},
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
        check=True,
    )
    assert run.stdout.strip() == (text or "None")


def test_the_backend_variable_changes_no_result(monkeypatch, make_mesh):
    mesh = make_mesh(i=4)
    x = np.arange(8, dtype=np.float32)

    def run():
        program = jax.shard_map(
            lambda x: (jaxcomm.psum(x, "i"), jaxcomm.pscan(x, "i")),
            mesh=mesh,
            in_specs=jax.P("i"),
            out_specs=jax.P("i"),
        )
        return jax.block_until_ready(jax.jit(program)(x))

    host = run()
    jaxcomm.finalize()
    monkeypatch.setattr("jaxcomm.config.BACKEND", "xla")
    found = run()
    assert [c.backend for c in jaxcomm.communicators()] == ["xla"]
    jax.tree.map(np.testing.assert_array_equal, found, host)
    # What init chose goes before the variable.
    jaxcomm.finalize()
    jaxcomm.init(mesh, backend="host")
    run()
    assert [c.backend for c in jaxcomm.communicators()] == ["host"]


def test_an_unknown_backend_variable_is_refused(monkeypatch, make_mesh):
    monkeypatch.setattr("jaxcomm.config.BACKEND", "smoke")
    with pytest.raises(ValueError, match="backend 'smoke' is unknown"):
        jaxcomm.init(make_mesh(i=2))
