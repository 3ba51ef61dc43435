import jax
import pytest

from jaxcomm.communicator.backends.nccl import library
from jaxcomm.doctor import software
from jaxcomm.launch.environment import of_process
from jaxcomm.launch.options import Options


def by_name(rows):
    return {row.name: row for row in rows}


def test_versions_are_those_that_run():
    found = by_name(software.versions())
    assert list(found) == ["python", "jax", "jaxlib", "jaxcomm"]
    assert found["jax"].text == jax.__version__


def test_devices_are_counted():
    found = by_name(software.devices())
    assert found["default"].text == "8 x cpu (cpu)"
    assert found["default"].value == [str(device) for device in jax.devices()]
    assert found["process"].value == {"index": 0, "count": 1}


def test_a_machine_where_jax_finds_nothing(monkeypatch):
    def fail(platform=None):
        raise RuntimeError("Unknown backend tpu\nand more")

    monkeypatch.setattr(jax, "devices", fail)
    (row,) = software.devices()
    assert (row.text, row.is_fine) == ("JAX finds none: Unknown backend tpu", False)
    host = by_name(software.backends())["host"]
    assert "unavailable: JAX has no CPU devices" in host.text
    assert host.is_fine is False


def test_every_backend_is_there_or_says_why_not(monkeypatch):
    monkeypatch.delenv("JAXCOMM_NCCL_LIBRARY", raising=False)
    monkeypatch.setattr(library, "load", lambda: "NCCL cannot be loaded: no such file")
    found = by_name(software.backends())
    assert {name: row.value["available"] for name, row in found.items()} == {
        "host": True,
        "xla": True,
        "nccl": False,
        "cuDNN attention": False,
    }
    assert found["nccl"].text == "unavailable: NCCL cannot be loaded: no such file"
    assert found["cuDNN attention"].text.startswith("unavailable: ")
    # Nobody asked for it: no problem.
    assert found["nccl"].is_fine is None


def test_what_is_known_of_nccl_is_told(monkeypatch):
    nccl = library.Library(
        "/lib/nccl", "2.28.9", 22809, "13.0", ("ncclCommSuspend",), False
    )
    monkeypatch.setattr(library, "load", lambda: nccl)
    row = by_name(software.backends())["nccl"]
    assert row.is_fine
    assert row.value["version_code"] == 22809
    for text in ("2.28.9", "/lib/nccl", "13.0", "no, from 2.30.3", "ncclCommSuspend"):
        assert text in row.text


def test_documented_variables_are_listed_set_or_not():
    found = by_name(software.variables({"JAXCOMM_BACKEND": "xla", "HOME": "/"}))
    assert {
        "JAXCOMM_BACKEND",
        "JAXCOMM_TIMEOUT",
        "JAXCOMM_MAX_COMMUNICATORS",
        "JAXCOMM_DUMP_DIR",
    } <= set(found)
    assert found["JAXCOMM_BACKEND"].text == "xla"
    assert found["JAXCOMM_TIMEOUT"].text == "not set"
    assert "HOME" not in found


def test_variables_of_jax_that_are_set_are_listed():
    found = by_name(software.variables({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--a"}))
    assert found["JAX_PLATFORMS"].text == "cpu"
    assert found["XLA_FLAGS"].text == "--a"


def test_a_misspelt_variable_is_a_problem():
    row = by_name(software.variables({"JAXCOMM_TIMOUT": "3"}))["JAXCOMM_TIMOUT"]
    assert row.is_fine is False
    assert row.text == "'3', but jaxcomm knows no such variable"


def test_what_launch_sets_is_no_problem():
    given = of_process(0, Options(processes=2, script="x"), 1234, {})
    found = by_name(software.variables(given))
    assert {name for name in given if name.startswith("JAXCOMM_")} <= set(found)
    assert [row.text for row in found.values() if row.is_fine is False] == []


@pytest.mark.parametrize(
    ("name", "text"), [("JAXCOMM_TIMEOUT", "soon"), ("JAXCOMM_MAX_COMMUNICATORS", "0")]
)
def test_a_wrong_value_is_a_problem(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    row = by_name(software.variables())[name]
    assert row.is_fine is False
    assert f"{name} is {text!r}; it must be" in row.text


def test_looking_at_the_folder_for_records_does_not_make_it(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", str(tmp_path / "dumps"))
    row = by_name(software.variables())["JAXCOMM_DUMP_DIR"]
    assert (row.text, row.is_fine) == (str(tmp_path / "dumps"), None)
    assert not (tmp_path / "dumps").exists()
    (tmp_path / "dumps").write_text("a file")
    row = by_name(software.variables())["JAXCOMM_DUMP_DIR"]
    assert row.is_fine is False
    assert row.text.startswith(f"'{tmp_path}/dumps' cannot be written: ")


def test_looking_at_a_folder_for_records_leaves_nothing_in_it(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXCOMM_DUMP_DIR", str(tmp_path))
    row = by_name(software.variables())["JAXCOMM_DUMP_DIR"]
    assert (row.text, row.is_fine) == (str(tmp_path), None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_for_records_below_one_that_takes_no_files_is_a_problem():
    # Not even root's.
    rows = by_name(software.variables({"JAXCOMM_DUMP_DIR": "/proc/self/dumps"}))
    assert rows["JAXCOMM_DUMP_DIR"].is_fine is False


def test_an_unknown_backend_is_a_problem():
    row = by_name(software.variables({"JAXCOMM_BACKEND": "mpi"}))["JAXCOMM_BACKEND"]
    assert row.is_fine is False
    assert row.text.startswith("'mpi' is no backend; choose one of ('host', ")


def test_a_library_that_was_named_and_cannot_be_loaded_is_a_problem(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: "NCCL cannot be loaded: no such file")
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", "/no/such/libnccl.so")
    row = by_name(software.backends())["nccl"]
    assert row.is_fine is False
