"""H4: what is forbidden between processes is found out by trying."""

import ctypes
import os
import subprocess
import sys

import pytest

from jaxcomm.doctor import attempts, sharing


def by_name(rows):
    return {row.name: row for row in rows}


def test_every_attempt_has_an_answer_and_leaves_nothing_open():
    before = len(os.listdir("/proc/self/fd"))
    found = by_name(sharing.sharing())
    for name in ("memfd through /proc/<pid>/fd", "pidfd_open", "process_vm_readv"):
        assert isinstance(found[name].value["works"], bool)
    assert len(os.listdir("/proc/self/fd")) == before


# Nothing stops a process from looking at itself: where these fail, the attempt is
# broken and not the system strict.


def test_memory_is_shared_through_a_descriptor_of_the_other(tmp_path):
    path = tmp_path / "word"
    path.write_bytes(b"abc")
    with open(path, "r+b") as file:
        attempts.reverse_memory(os.getpid(), file.fileno(), 3)
    assert path.read_bytes() == b"cba"


def test_memory_of_the_other_is_read():
    word = ctypes.create_string_buffer(b"abc", 3)
    assert attempts.read(os.getpid(), ctypes.addressof(word), 3) == b"abc"


def test_every_failure_has_its_reason():
    # Long gone: waited for by subprocess.
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    found = attempts.all_of(gone.pid, 0, 0, 1)
    assert found == {
        "memory": "No such file or directory",
        "pidfd": "No such process",
        "read": "No such process",
    }


def test_refusals_say_what_that_means(monkeypatch):
    refused = dict.fromkeys(("memory", "pidfd", "read"), "Operation not permitted")
    monkeypatch.setattr(sharing, "_try", lambda: refused)
    found = by_name(sharing.sharing())
    assert found["memfd through /proc/<pid>/fd"].text == (
        "refused (Operation not permitted): processes fall back to files in /dev/shm"
    )
    assert found["pidfd_open"].is_fine is False
    # Only ever an extra.
    assert found["process_vm_readv"].is_fine is None
    assert found["process_vm_readv"].value == {
        "works": False,
        "reason": "Operation not permitted",
    }


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(1, "Operation not permitted"),
        AttributeError("module 'os' has no attribute 'memfd_create'"),
        subprocess.TimeoutExpired("python", 30),
    ],
)
def test_attempts_that_cannot_be_made_are_a_problem(monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(sharing.os, "memfd_create", fail)
    (row,) = sharing.sharing()
    assert row.is_fine is False
    assert row.text.startswith("could not be made: ")
