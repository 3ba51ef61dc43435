import os
import subprocess
import sys

import jax
import numpy as np
import pytest

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


def test_unset_and_empty_variables_mean_the_defaults(monkeypatch):
    for name in ("JAXCOMM_TIMEOUT", "JAXCOMM_MAX_COMMUNICATORS"):
        monkeypatch.setenv(name, "")
    assert config.timeout_seconds() == 300.0
    assert config.max_communicators() == 256
    for name in ("JAXCOMM_TIMEOUT", "JAXCOMM_MAX_COMMUNICATORS"):
        monkeypatch.delenv(name)
    assert config.timeout_seconds() == 300.0
    assert config.max_communicators() == 256


def test_values_are_read_when_a_communicator_is_made(monkeypatch, make_mesh):
    monkeypatch.setenv("JAXCOMM_TIMEOUT", "7.5")
    assert config.timeout_seconds() == 7.5
    (member,) = jaxcomm.init(make_mesh(i=2))
    assert member.timeout == 7.5


@pytest.mark.parametrize("text", ["", "xla"])
def test_the_backend_is_read_once_when_the_package_is_imported(text):
    code = """
import os, jaxcomm
os.environ["JAXCOMM_BACKEND"] = "nccl"
print(jaxcomm.config.BACKEND)
"""
    env = os.environ | {"JAXCOMM_BACKEND": text}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
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


def test_an_unknown_backend_variable_is_refused(monkeypatch, make_mesh):
    monkeypatch.setattr("jaxcomm.config.BACKEND", "smoke")
    with pytest.raises(ValueError, match="backend 'smoke' is unknown"):
        jaxcomm.init(make_mesh(i=2))
