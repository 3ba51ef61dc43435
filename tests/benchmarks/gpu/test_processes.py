"""How processes are started: their GPUs, or the one they share."""

import os
import stat

import pytest

from bench.gpu import options, processes
from jaxcomm.launch import environment


@pytest.fixture
def started(timer, monkeypatch):
    """Gives ``started(words, platform)``: the environment each would have."""
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def start(words, platform="cuda"):
        launched = []

        def run(asked):
            launched.append(asked)
            return 3

        monkeypatch.setattr(processes.run, "run", run)
        words = words.split()
        assert processes.start(words, options.parse(words), platform) == 3
        (asked,) = launched
        assert (asked.script, asked.module) == ("bench", True)
        assert asked.arguments == ("gpu", *words)
        return [
            environment.of_process(number, asked, 1, os.environ)
            for number in range(asked.processes)
        ]

    return start


def test_processes_have_gpus_of_their_own(started):
    found = started("--ranks 4 --processes 2")
    assert [each["JAX_LOCAL_DEVICE_IDS"] for each in found] == ["0,1", "2,3"]
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in found[0]


def test_processes_that_share_a_gpu_all_have_the_first(started):
    found = started("--ranks 4 --one-gpu")
    assert [each["JAX_LOCAL_DEVICE_IDS"] for each in found] == ["0"] * 4
    for name, text in (
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        ("NCCL_NVLS_ENABLE", "0"),
        ("NCCL_RAS_ENABLE", "0"),
        ("NCCL_MAX_CTAS", "2"),
    ):
        assert {each[name] for each in found} == {text}
    # A thread block at least.
    assert started("--ranks 16 --one-gpu")[0]["NCCL_MAX_CTAS"] == "1"


def test_with_the_stand_in_they_have_cpu_devices(started):
    found = started("--ranks 4 --processes 2", "cpu")
    assert {each["JAX_NUM_CPU_DEVICES"] for each in found} == {"2"}


@pytest.mark.parametrize(
    ("answers", "told"),
    [("true", "MPS lets them run at once"), ("false", "without a daemon of MPS")],
)
def test_mps_is_used_where_its_daemon_answers(answers, told, tmp_path, monkeypatch):
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(
        f"#!/bin/sh\nread asked\n[ $asked = get_server_list ] && {answers}\n"
    )
    control.chmod(control.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert told in processes.sharing()
