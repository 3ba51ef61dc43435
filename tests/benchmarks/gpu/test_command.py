"""The command as a user runs it, in one process and in several."""

import pytest


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        (2, "collectives,dispatch,lanes,memory,overlap,symmetric"),
        pytest.param(2, "attention,strategies", marks=pytest.mark.thorough),
        pytest.param(2, "documents,masks,states", marks=pytest.mark.thorough),
        pytest.param(8, "meshes,training", marks=pytest.mark.thorough),
    ],
)
def test_the_parts_run_and_find_nothing_wrong(bench_gpu, ranks, parts):
    done = bench_gpu("--only", parts, "--ranks", str(ranks))
    assert done.returncode == 0, done.stderr
    rows = done.rows
    assert sorted({row["part"] for row in rows}) == parts.split(",")
    findings = [row for row in rows if row["kind"] == "finding"]
    assert [row for row in findings if row["met"] is False] == []


def test_a_part_that_fails_says_so_and_the_next_begins(bench_gpu):
    faults = {"JAXCOMM_FAKE_FAULTS": "ncclSend:0:2"}
    done = bench_gpu("--only", "lanes,torch", **faults)
    assert done.returncode == 1, done.stderr
    failed, *rest = done.rows
    assert failed["met"] is False
    assert "ncclSend" in failed["found"]
    assert [(row["part"], row["met"]) for row in rest] == [("torch", None)]


@pytest.mark.thorough
@pytest.mark.multiprocess
def test_several_processes_are_one_run(bench_gpu):
    done = bench_gpu("--only", "lanes,training", "--ranks", "4", "--processes", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 ranks on cpu, processes: 2, jax ")
    # The others say nothing.
    assert done.stdout.count("two exchanges of 4 KiB on two lanes") == 2
    rows = done.rows
    assert [row["part"] for row in rows] == ["lanes"] * 2 + ["training"] * 4
    # Gradients are those of one device.
    assert rows[2]["met"] is True


def test_without_gpus_it_says_what_is_needed(bench_gpu):
    done = bench_gpu(JAX_PLATFORMS="cpu", JAXCOMM_NCCL_LIBRARY="")
    assert (done.returncode, done.stdout) == (2, "")
    assert "2 ranks were asked for and JAX finds 0 GPUs" in done.stderr
