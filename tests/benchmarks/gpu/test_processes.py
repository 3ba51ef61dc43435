"""How processes are started: their GPUs, or the one they share."""

import os

import pytest

from bench.gpu import options, processes
from jaxcomm.launch import environment


@pytest.fixture
def started(timer, monkeypatch):
    """Gives ``started(words, platform)``: the environment each would have."""
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def start(words, platform="cuda"):
        launched, words = [], words.split()
        monkeypatch.setattr(processes.run, "run", lambda of: launched.append(of) or 3)
        assert processes.start(words, options.parse(words), platform) == 3
        (asked,) = launched
        assert (asked.script, asked.module) == ("bench", True)
        assert asked.arguments == ("gpu", *words)
        return [
            environment.of_process(number, asked, 1, os.environ)
            for number in range(asked.processes)
        ]

    return start


def test_processes_have_gpus_of_their_own_or_cpu_devices(started):
    found = started("--ranks 4 --processes 2")
    assert [each["JAX_LOCAL_DEVICE_IDS"] for each in found] == ["0,1", "2,3"]
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in found[0]
    # With the stand-in.
    found = started("--ranks 4 --processes 2", "cpu")
    assert {each["JAX_NUM_CPU_DEVICES"] for each in found} == {"2"}


def test_processes_that_share_a_gpu_all_have_the_first(started):
    found = started("--ranks 4 --one-gpu")
    shared = {
        "JAX_LOCAL_DEVICE_IDS": "0", "CUDA_VISIBLE_DEVICES": "0", "NCCL_MAX_CTAS": "2",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",
    }  # fmt: skip
    assert [shared.items() <= each.items() for each in found] == [True] * 4
    # A thread block at least.
    assert started("--ranks 16 --one-gpu")[0]["NCCL_MAX_CTAS"] == "1"
