"""Variables and arguments that choose the timeout, the bound and the backend."""

import datetime
import os
import sys

import forked
import numpy as np
import pytest
import waiting

import jaxcomm
from jaxcomm import config


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        ("TIMEOUT", ["0", "-1", "soon", "nan", "inf", "1e12"],
         r"JAXCOMM_TIMEOUT is '.*'; it must be a positive"),
        ("MAX_COMMUNICATORS", ["0", "-3", "1.5", "many"],
         r"JAXCOMM_MAX_COMMUNICATORS is .*256"),
    ],
)  # fmt: skip
def test_a_variable_that_is_no_such_number_is_refused_by_name(
    monkeypatch, make_mesh, name, texts, message
):
    for text in texts:
        monkeypatch.setenv(f"JAXCOMM_{name}", text)
        with pytest.raises(ValueError, match=message):
            jaxcomm.init(make_mesh(i=2))
    monkeypatch.setattr(config, "BACKEND", "smoke")
    monkeypatch.delenv(f"JAXCOMM_{name}")
    with pytest.raises(ValueError, match="backend 'smoke' is unknown"):
        jaxcomm.init(make_mesh(i=2))
    assert len(jaxcomm.communicators()) == 0


def test_variables_are_read_when_a_communicator_is_made_and_empty_is_unset(
    make_mesh, monkeypatch
):
    names = ("JAXCOMM_TIMEOUT", "JAXCOMM_MAX_COMMUNICATORS")
    for change in (monkeypatch.delenv, lambda name: monkeypatch.setenv(name, "")):
        for name in names:
            monkeypatch.setenv(name, "9")
            change(name)
        assert [c.timeout for c in jaxcomm.init(make_mesh(i=2))] == [300]
        assert config.max_communicators() == 256
    monkeypatch.setenv(names[0], "212.5")
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


def test_init_refuses_a_timeout_that_is_no_time(make_mesh):
    numbers = (0, -1, float("nan"), float("inf"), datetime.timedelta(0))
    for error, timeouts in (TypeError, ("90", True, [90])), (ValueError, numbers):
        for timeout in timeouts:
            with pytest.raises(error, match=r"timeout must be a (positive )?number of"):
                jaxcomm.init(make_mesh(i=2), timeout=timeout)
    assert len(jaxcomm.communicators()) == 0


@pytest.mark.parametrize(
    ("backend", "check"), [("", ""), ("xla", "1")], ids=["unset", "set"]
)
def test_what_tracing_asks_is_read_once_when_the_package_is_imported(backend, check):
    code = """
import os, jaxcomm
os.environ |= {"JAXCOMM_BACKEND": "nccl", "JAXCOMM_CHECK": "maybe"}
print(jaxcomm.config.BACKEND, jaxcomm.config.check())
"""
    run = forked.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAXCOMM_BACKEND": backend, "JAXCOMM_CHECK": check},
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
        check=True,
    )
    assert run.stdout.split() == [backend or "None", str(check == "1")]


def test_init_does_not_contradict_the_variable_that_gives_xla_all_calls(
    monkeypatch, make_mesh
):
    """Whether a program is portable is known before its devices are."""
    mesh = make_mesh(i=4)
    monkeypatch.setattr(config, "BACKEND", "xla")
    with pytest.raises(
        ValueError,
        match="init: backend 'host' was asked for, and JAXCOMM_BACKEND=xla gives XLA "
        r"all calls that name no backend\. Unset the variable; or leave backend out "
        r"here, and pass backend='host' to calls or to jaxcomm\.using",
    ):
        jaxcomm.init(mesh, backend="host")
    with pytest.raises(ValueError, match="backend 'gloo' is unknown"):
        jaxcomm.init(mesh, backend="gloo")
    assert [c.backend for c in jaxcomm.init(mesh, backend="xla")] == ["xla"]
    # Other variables settle nothing before lowering, which asks what init chose.
    monkeypatch.setattr(config, "BACKEND", "host")
    assert jaxcomm.init(make_mesh(i=2), backend="xla")[0].backend == "xla"
