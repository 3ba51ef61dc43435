import unittest.mock

import jax
import pytest

from jaxcomm.communicator.backends.nccl import library
from jaxcomm.doctor import software
from jaxcomm.launch.environment import of_process
from jaxcomm.launch.options import Options


def by_name(rows):
    return {row.name: row for row in rows}


def test_versions_and_devices_are_those_that_run(monkeypatch):
    found = by_name(software.versions())
    assert list(found) == ["python", "jax", "jaxlib", "jaxcomm", "extension"]
    assert found["extension"].text == "loaded"
    assert found["jax"].text == jax.__version__
    found = by_name(software.devices())
    assert found["default"].text == "8 x cpu (cpu)"
    assert found["default"].value == [str(device) for device in jax.devices()]
    assert found["process"].value == {"index": 0, "count": 1}
    # A machine where JAX finds nothing.
    error = RuntimeError("Unknown backend tpu\nand more")
    monkeypatch.setattr(jax, "devices", unittest.mock.Mock(side_effect=error))
    (row,) = software.devices()
    assert (row.text, row.is_fine) == ("JAX finds none: Unknown backend tpu", False)
    host = by_name(software.backends())["host"]
    assert "unavailable: JAX has no CPU devices" in host.text
    assert host.is_fine is False


def test_a_backend_of_the_environment_that_needs_the_extension_is_a_problem(
    monkeypatch,
):
    asked = {"JAXCOMM_BACKEND": "host", "JAXCOMM_NO_EXTENSION": "1"}
    assert by_name(software.variables(asked))["JAXCOMM_BACKEND"].is_fine is None
    monkeypatch.setattr(software, "ABSENCE", "there is none")
    found = by_name(software.variables(asked))
    assert found["JAXCOMM_BACKEND"].text.startswith("'host' cannot serve: there is no")
    assert found["JAXCOMM_BACKEND"].is_fine is False
    assert found["JAXCOMM_NO_EXTENSION"].is_fine is None


def test_every_backend_is_there_or_says_why_not(monkeypatch):
    monkeypatch.delenv("JAXCOMM_NCCL_LIBRARY", raising=False)
    monkeypatch.setattr(library, "load", lambda: "NCCL cannot be loaded: no such file")
    found = by_name(software.backends())
    there = {name for name, row in found.items() if row.value["available"]}
    assert (there, len(found)) == ({"host", "xla"}, 5)
    assert found["nccl"].text == "unavailable: NCCL cannot be loaded: no such file"
    for name in ("FlashAttention-3", "cuDNN attention"):
        assert found[name].text.startswith("unavailable: ")
    # Nobody asked for it: no problem.
    assert found["nccl"].is_fine is None
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", "/no/such/libnccl.so")
    assert by_name(software.backends())["nccl"].is_fine is False


def test_what_is_known_of_nccl_is_told(monkeypatch):
    nccl = library.Library("/lib/nccl", "2.28.9", 22809, "13.0", ("ncclCommMemStats",))
    monkeypatch.setattr(library, "load", lambda: nccl)
    row = by_name(software.backends())["nccl"]
    assert row.is_fine
    assert row.value["version_code"] == 22809
    for text in ("2.28.9", "/lib/nccl", "13.0", "no, from 2.30.3", "ncclCommMemStats"):
        assert text in row.text


@pytest.mark.parametrize(
    ("code", "machine", "told"),
    [
        (22809, "aarch64", ["stand still", "SymmetricPool", "NCCL_CTA_POLICY"]),
        (22902, "x86_64", ["collectives may hang", "SymmetricPool", "NCCL_CTA"]),
        (23101, "aarch64", ["SymmetricPool", "NCCL_CTA_POLICY"]),
        (21801, "x86_64", []),
        (23102, "aarch64", []),
    ],
)
def test_bugs_of_the_loaded_nccl_are_told(monkeypatch, code, machine, told):
    nccl = library.Library("/lib/nccl", "-", code, "13.0", ())
    monkeypatch.setattr(library, "load", lambda: nccl)
    monkeypatch.setattr("platform.machine", lambda: machine)
    row = by_name(software.backends()).get("nccl, known bugs")
    assert (row is None) == (not told)
    if row is not None:
        assert len(row.value) == len(told)
        assert all(text in found for text, found in zip(told, row.value, strict=True))
        assert row.text.endswith("Install NCCL 2.31.2 or newer if you meet one")
        assert row.is_fine is None


def test_variables_are_listed_set_or_not_and_those_of_launch_are_no_problem():
    given = {"JAXCOMM_BACKEND": "xla", "HOME": "/", "XLA_FLAGS": "--a"}
    found = by_name(software.variables(given))
    assert {"JAXCOMM_MAX_COMMUNICATORS", "JAXCOMM_DUMP_DIR"} <= set(found)
    assert found["JAXCOMM_BACKEND"].text == "xla"
    assert found["JAXCOMM_TIMEOUT"].text == "not set"
    assert found["XLA_FLAGS"].text == "--a"
    assert "HOME" not in found
    given = of_process(0, Options(processes=2, script="x"), "127.0.0.1:1234", {})
    found = by_name(software.variables(given))
    assert {name for name in given if name.startswith("JAXCOMM_")} <= set(found)
    assert [row.text for row in found.values() if row.is_fine is False] == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("JAXCOMM_TIMEOUT", "soon", "JAXCOMM_TIMEOUT is 'soon'; it must be"),
        ("JAXCOMM_MAX_COMMUNICATORS", "0", "JAXCOMM_MAX_COMMUNICATORS is '0'; it mus"),
        ("JAXCOMM_BACKEND", "mpi", "'mpi' is no backend; choose one of ('host', "),
        ("JAXCOMM_TIMOUT", "3", "'3', but jaxcomm knows no such variable"),
        # Not even root's files.
        ("JAXCOMM_DUMP_DIR", "/proc/self/dumps", "cannot be written: "),
    ],
)
def test_a_wrong_variable_is_a_problem(monkeypatch, name, value, text):
    monkeypatch.setenv(name, value)
    row = by_name(software.variables())[name]
    assert row.is_fine is False
    assert text in row.text


def test_looking_at_the_folder_for_records_leaves_it_as_it_is(monkeypatch, tmp_path):
    for folder in (tmp_path / "dumps", tmp_path):
        monkeypatch.setenv("JAXCOMM_DUMP_DIR", str(folder))
        row = by_name(software.variables())["JAXCOMM_DUMP_DIR"]
        assert (row.text, row.is_fine) == (str(folder), None)
        assert list(tmp_path.iterdir()) == []
