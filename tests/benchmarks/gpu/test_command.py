"""The command as a user runs it, in one process and in several."""

import os
import sys

import forked
import pytest
import waiting

# Figures, then findings.
FEW = ("--only", "lanes,symmetric")
PARTS = ["lanes"] * 2 + ["symmetric"] * 14
ONE_GPU = {"JAXCOMM_FAKE_ONE_GPU": "1"}


@pytest.mark.thorough
def test_rows_come_as_they_are_found_and_a_table_last(bench_gpu):
    done = bench_gpu(*FEW, "--ranks", "4")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("4 ranks on cpu, processes: 1, jax ")
    assert second.startswith("NCCL 2.32.3 (")
    assert "two exchanges of 4 KiB on two lanes" in done.stdout
    lines = done.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == PARTS
    rows = done.report["rows"]
    assert [row["part"] for row in rows] == PARTS
    assert all(row["met"] is not False for row in rows[2:])
    assert set(done.report["seconds"]) == {"lanes", "symmetric"}
    assert done.report["command"][3:5] == ["gpu", "--only"]


def test_a_part_that_fails_says_so_and_the_next_begins(bench_gpu):
    faults = {"JAXCOMM_FAKE_FAULTS": "ncclSend:0:2"}
    done = bench_gpu("--only", "lanes,borrowed", **faults)
    assert done.returncode == 1, done.stderr
    failed, *rest = done.report["rows"]
    assert failed["met"] is False
    assert "ncclSend" in failed["found"]
    assert [(row["part"], row["met"]) for row in rest] == [("borrowed", None)]


@pytest.mark.multiprocess
def test_several_processes_are_one_run(bench_gpu):
    done = bench_gpu("--only", "lanes", "--ranks", "4", "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 ranks on cpu, processes: 2, jax ")
    # The others say nothing.
    assert done.stdout.count("two exchanges of 4 KiB on two lanes") == 2
    assert [row["part"] for row in done.report["rows"]] == ["lanes"] * 2


@pytest.mark.multiprocess
@pytest.mark.thorough
def test_a_part_that_fails_in_one_process_ends_all(bench_gpu):
    faults = {"JAXCOMM_FAKE_FAULTS": "ncclMemAlloc:0:2"}
    done = bench_gpu(*FEW, "--processes", "2", **faults)
    assert done.returncode == 1
    assert "ncclMemAlloc" in done.stderr
    # What was found before is told all the same.
    assert "two exchanges" in done.stdout
    assert [row["part"] for row in done.report["rows"]] == ["lanes"] * 2


def test_an_nccl_that_refuses_to_share_a_gpu_is_named(bench_gpu, stand_in_path):
    done = bench_gpu("--one-gpu", JAXCOMM_FAKE_NCCL_VERSION="22809", **ONE_GPU)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "bench gpu: --one-gpu: ranks share a GPU from NCCL 2.30.3 on, and "
        f"{stand_in_path} is 2.28.9. Name a newer one in LD_PRELOAD, by the path of "
        "its libnccl.so.2. See --help.\n"
    )


def test_without_gpus_it_says_what_is_needed():
    done = forked.run(
        [sys.executable, "-m", "bench", "gpu"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=waiting.HANG_SECONDS,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "2 ranks were asked for and JAX finds 0 GPUs" in done.stderr
