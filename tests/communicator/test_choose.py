"""Which backend serves a partition, and what is said where it cannot."""

import threading
import types

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.communicator import backends, replica_groups
from jaxcomm.communicator import store as stores
from jaxcomm.communicator.backends import host, xla
from jaxcomm.communicator.backends.nccl import library

THERE = library.Library("libnccl.so.2", "2.28.9", 22809, "13.0", ())


@pytest.fixture
def choose(monkeypatch):
    """Gives ``choose(platform, backend)``: what serves two devices beside NCCL."""
    monkeypatch.setattr("jaxcomm.config.BACKEND", None)
    monkeypatch.setattr(library, "load", lambda: THERE)

    def run(platform, backend=None):
        # Devices as JAX shows them, as far as the choice of a backend looks.
        about = {"platform": platform, "process_index": 0}
        devices = np.array([types.SimpleNamespace(id=i, **about) for i in range(2)])
        mesh = types.SimpleNamespace(devices=devices, axis_names=("i",), shape={"i": 2})
        partition = replica_groups.partition(replica_groups.grid_of(mesh), ("i",))
        found, refusal = backends.choose(mesh, partition, "default", backend)
        return found.name, refusal

    return run


def test_the_platform_chooses_unless_somebody_does(choose, monkeypatch):
    found = {platform: choose(platform) for platform in ("cpu", "gpu", "tpu")}
    assert found == {"cpu": ("host", ""), "gpu": ("nccl", ""), "tpu": ("xla", "")}
    assert choose("gpu", "xla") == ("xla", "")
    assert choose("gpu", "nccl") == ("nccl", "")
    monkeypatch.setattr("jaxcomm.config.BACKEND", "xla")
    assert choose("cpu") == ("xla", "")
    assert choose("cpu", "host") == ("host", "")


def test_what_cannot_serve_says_why_and_where_nobody_insists_xla_does(
    choose, monkeypatch
):
    monkeypatch.setattr(library, "load", lambda: "it is gone")
    assert choose("gpu") == ("xla", "it is gone")
    with pytest.raises(
        jaxcomm.CommunicatorError,
        match=r"backend 'nccl' cannot join the groups of axes \('i',\) \(lane "
        r"'default'\): it is gone\. Use backend='xla', or None to let",
    ):
        choose("gpu", "nccl")
    with pytest.raises(
        jaxcomm.CommunicatorError,
        match=r"'host' cannot join .* it moves bytes of CPU devices, and these are gpu",
    ):
        choose("gpu", "host")


def test_processes_without_the_extension_meet_and_others_are_told(store, monkeypatch):
    thread, version = threading.local(), stores.own_version()
    monkeypatch.setattr(xla, "ABSENCE", "there is none")
    monkeypatch.setattr(jax, "process_index", lambda: thread.process)
    monkeypatch.setattr(stores, "own_version", lambda: thread.version)
    devices = np.array(
        [types.SimpleNamespace(id=i, platform="cpu", process_index=i) for i in range(2)]
    )
    mesh = types.SimpleNamespace(devices=devices, axis_names=("i",), shape={"i": 2})
    partition = replica_groups.partition(replica_groups.grid_of(mesh), ("i",))
    with_it = host.HostBackend()
    without = [xla.AbsentBackend(with_it) for _ in range(2)]

    def refusals(*of_processes):
        def ask(process):
            backend = of_processes[process]
            thread.process = process
            thread.version = version if backend is with_it else f"{version[:-8]}{0:08x}"
            return backend.refusal(mesh, partition)

        found, messages = store.run(dict.fromkeys((0, 1), ask))
        return [str(found[0]), str(found[1])], sum(messages.values())

    assert refusals(*without) == (["there is none"] * 2, 7)
    assert refusals(*without) == (["there is none"] * 2, 0)
    without[1].forget(lambda processes: True)
    found, _ = refusals(with_it, without[1])
    for text in found:
        assert f"this process runs jaxcomm {version[:-8]}" in text
        assert "Install the same version in all processes" in text
