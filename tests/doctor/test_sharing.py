"""H4: what is forbidden between processes is found out by trying."""

import ctypes
import os
import subprocess
import sys
import unittest.mock

from jaxcomm.doctor import attempts, sharing


def by_name(rows):
    return {row.name: row for row in rows}


def test_every_attempt_has_an_answer_and_leaves_nothing_open():
    before = len(os.listdir("/proc/self/fd"))
    found = by_name(sharing.sharing())
    for name in ("memfd through /proc/<pid>/fd", "pidfd_open", "process_vm_readv"):
        assert isinstance(found[name].value["works"], bool)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_the_other_is_shared_and_read(tmp_path):
    # Nothing stops a process from looking at itself, however strict the system.
    path = tmp_path / "word"
    path.write_bytes(b"abc")
    with open(path, "r+b") as file:
        attempts.reverse_memory(os.getpid(), file.fileno(), 3)
    assert path.read_bytes() == b"cba"
    word = ctypes.create_string_buffer(b"abc", 3)
    assert attempts.read(os.getpid(), ctypes.addressof(word), 3) == b"abc"


def test_every_failure_has_its_reason():
    # Long gone: waited for by subprocess.
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    reasons = dict.fromkeys(("pidfd", "read"), "No such process")
    reasons["memory"] = "No such file or directory"
    assert attempts.all_of(gone.pid, 0, 0, 1) == reasons


def test_refusals_say_what_that_means(monkeypatch):
    refused = dict.fromkeys(("memory", "pidfd", "read"), "Operation not permitted")
    monkeypatch.setattr(sharing, "_try", lambda: refused)
    found = by_name(sharing.sharing())
    assert found["memfd through /proc/<pid>/fd"].text == (
        "refused (Operation not permitted): processes fall back to files in /dev/shm"
    )
    assert found["pidfd_open"].is_fine is False
    # Only ever an extra.
    read = found["process_vm_readv"]
    assert read.is_fine is None
    assert read.value == {"works": False, "reason": "Operation not permitted"}


def test_attempts_that_cannot_be_made_are_a_problem(monkeypatch):
    for error in (
        PermissionError(1, "Operation not permitted"),
        AttributeError("module 'os' has no attribute 'memfd_create'"),
        subprocess.TimeoutExpired("python", 30),
    ):
        fails = unittest.mock.Mock(side_effect=error)
        monkeypatch.setattr(sharing.os, "memfd_create", fails)
        (row,) = sharing.sharing()
        assert row.is_fine is False
        assert row.text.startswith("could not be made: ")
