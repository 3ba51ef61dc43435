import types
import unittest.mock

from jaxcomm.doctor import machine


def by_name(rows):
    return {row.name: row for row in rows}


def test_the_bounds_of_a_container_are_told(monkeypatch):
    files = {"/sys/fs/cgroup/cpu.max": "150000 100000",
             "/sys/fs/cgroup/memory.max": "1048576"}  # fmt: skip
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    found = by_name(machine.machine())
    assert found["cores"].value["quota"] == 1.5
    assert found["cores"].text.endswith("; its container may use 1.5 at a time")
    assert found["memory"].value["limit"] == 1 << 20
    assert found["memory"].text.endswith("; its container may use 1 MiB")
    assert found["huge pages"].text == "unknown"
    files = {"/sys/fs/cgroup/cpu.max": "max 100000", "/sys/fs/cgroup/memory.max": "max"}
    found = by_name(machine.machine())
    assert "quota" not in found["cores"].value
    assert "limit" not in found["memory"].value


def test_a_system_that_does_not_count_its_memory_is_described(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda path: "")
    counts = dict.fromkeys(("SC_PAGE_SIZE", "SC_PHYS_PAGES"))  # macOS
    monkeypatch.setattr(machine.os, "sysconf_names", counts)
    memory = by_name(machine.machine())["memory"]
    assert memory.value["available"] is None
    assert "available" not in memory.text
    monkeypatch.setattr(machine.os, "sysconf_names", {})
    assert by_name(machine.machine())["memory"].text == "unknown"


def test_a_small_dev_shm_comes_with_advice_and_none_is_told(monkeypatch):
    row = by_name(machine.machine())["/dev/shm"]
    assert 0 <= row.value["free"] <= row.value["bytes"]
    found = types.SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=256)
    monkeypatch.setattr(machine.os, "statvfs", lambda path: found)
    row = by_name(machine.machine())["/dev/shm"]
    assert row.text.startswith("1 MiB free of 64 MiB; a container can be given more")
    assert row.value == {"bytes": 64 << 20, "free": 1 << 20}
    error = FileNotFoundError(2, "No such file or directory")
    monkeypatch.setattr(machine.os, "statvfs", unittest.mock.Mock(side_effect=error))
    row = by_name(machine.machine())["/dev/shm"]
    assert row.text == "not there: No such file or directory"
