"""The notebooks run from top to bottom, each cell again, and after a restart.

`make docs` runs them too, since the site shows what they print.
"""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest
import waiting

pytestmark = [pytest.mark.notebook, pytest.mark.slow, pytest.mark.multiprocess]
FOLDER = Path(__file__).parents[2] / "notebooks"
LONG = {"02", "03", "04", "06", "07"}
# What the reader is told to look at.
SHOWN = {
    "01_first_collective": ["<table>", "data x context", "row means: [0. 0.]"],
    "02_ring_attention": ["'dense, one device': [", "'ring of 8, each device': ["],
    "03_long_sequence_training": [
        "tokens/s; loss 5.",
        "step 2: ring 5.",
        "'one device': [",
        "'each of a ring of 8': [",
        "data x context",
    ],
    "04_diagnosing_a_hang": [
        "process 2) waited 4 s for rank 1. Process 1 was last in psum",
        "flight record of process 0 of 3",
        "[1] after finalize and init: [3.]",
        "rank 1 (process 1, cpu:2048) last completed psum(float32[1]) #2; rank 0 (",
        "which died. Process 1 was last in psum",
        "process 1 was ended by SIGKILL; stopping the others",
        "rank 1 (process 1, cpu:2048) left no record; rank",
        "waited 2 s for rank 2",
        "flight record of process 0 of 1",
        "[6. 6. 6. 6.]",
    ],
    "05_overlap": [
        "same results: True",
        "'name': 'ring_shift_start'",
        "'axes': \"('ring',)\"",
        "'jaxcomm_ring_shift_start_ring_1MiB'",
        "'jaxcomm_ring_shift_done_ring_1MiB'",
    ],
    "06_a_process_dies": [
        "kernel 0: 5 steps of 3 rows; parameters",
        "kernel 2: 5 steps of 3 rows; parameters",
        "waited for ranks 2, 3, gone with process 1",
        "kernel 2: rows: 2 the same parameters: True",
        "10 steps; the next was done",
        "suspect: process 1 (pid ",
        "process 1 was ended by SIGKILL; 2 others go on",
        "suspect: process 2 (pid ",
        "it is stopped (state T)",
        "process 2 was given up by the others; 1 other goes on",
        "kernel 0: rows: 1 the same parameters: True",
        "15 steps; the next was done",
        "states: ['completed', 'failed']",
        "status 0",
    ],
    "07_recurrent_layers": [
        "a state passes 6 of 7 borders of fragments",
        # Maps of 8.4 MB of two fragments, to three others, in both passes.
        "'recurrent': [100.7, 100.7, 100.7, 100.7]",
        "'attention': [50.3, 201.3, 805.3, 3221.2]",
        *(f"{size} devices: losses 4.7701 ... 2.9573" for size in (1, 2, 4, 8)),
        "context",
    ],
}


def open_notebook(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.fixture
def make_client(tmp_path, monkeypatch, compiled_once):
    for name, value in compiled_once.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Without the tests' number of devices: the notebook asks for its own.
    monkeypatch.setenv("XLA_FLAGS", os.environ["QUICK_XLA_FLAGS"])

    def make(notebook):
        return nbclient.NotebookClient(
            notebook,
            timeout=2 * waiting.HANG_SECONDS,
            startup_timeout=waiting.HANG_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(tmp_path)}},
        )

    return make


def text_of(cell):
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text", ""))
        parts.extend(str(value) for value in output.get("data", {}).values())
    return "".join(parts)


def code_cells(notebook):
    return [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


@pytest.mark.parametrize(
    "name",
    [
        # These compile for long, or kill processes: tests/attention, tests/examples and
        # tests/faults show what they would.
        pytest.param(path.stem, marks=[pytest.mark.thorough] * (path.stem[:2] in LONG))
        for path in sorted(FOLDER.glob("*.ipynb"))
    ],
)
def test_runs_from_top_to_bottom(name, make_client):
    notebook = open_notebook(name)
    make_client(notebook).execute()
    cells = [notebook.cells[i] for i in code_cells(notebook)]
    assert cells[-1].outputs
    shown = "\n".join(map(text_of, cells))
    assert [text for text in SHOWN[name] if text not in shown] == []


@pytest.mark.thorough
def test_cells_run_again_and_after_a_restart(make_client):
    notebook = open_notebook("01_first_collective")
    client = make_client(notebook)
    with client.setup_kernel():
        for _ in range(2):
            for index in code_cells(notebook):
                client.execute_cell(notebook.cells[index], index)
                client.execute_cell(notebook.cells[index], index)
            # The old kernel is ended without finalize.
            nbclient.util.run_sync(client.km.restart_kernel)(now=True)
            nbclient.util.run_sync(client.kc.wait_for_ready)(waiting.HANG_SECONDS)
