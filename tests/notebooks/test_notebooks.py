"""The notebooks run from top to bottom, again, and after a restart or an interrupt."""

import asyncio
import contextlib
import os
import re
import signal
import time
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Those that compute for longer than they compile.
COMPUTING = ["03_long_sequence_training"]
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
        "process 2) waited 8 s for rank 1. Process 1 was last in psum",
        "flight record of process 0 of 3",
        "[1] after finalize and init: [3.]",
        "rank 1 (process 1, cpu:2048) last completed psum(float32[1]) #2; rank 0 (",
        "which died. Process 1 was last in psum",
        "process 1 was ended by SIGKILL; stopping the others",
        "rank 1 (process 1, cpu:2048) left no record; rank 0 (",
        "waited 3 s for rank 2",
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
}


def open_notebook(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture
def make_client(tmp_path, monkeypatch, compiled_once):
    """Returns a client that runs a notebook's cells in a kernel of its own."""
    for name, value in compiled_once.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    clients = []

    def make(notebook, quick=True):
        # Without the tests' number of devices: the notebook asks for its own.
        flags = os.environ["QUICK_XLA_FLAGS"]
        if not quick:
            flags = flags.replace("optimization_level=0", "optimization_level=1")
        monkeypatch.setenv("XLA_FLAGS", flags)
        client = nbclient.NotebookClient(
            notebook,
            timeout=240,
            kernel_name="python3",
            resources={"metadata": {"path": str(tmp_path)}},
        )
        clients.append(client)
        return client

    return make


def text_of(cell):
    parts = []
    for output in cell.outputs:
        parts.append(output.get("text", ""))
        parts.extend(str(value) for value in output.get("data", {}).values())
    return "".join(parts)


def interrupt(client, cell, index, condition):
    """Runs a cell, interrupts it when the condition holds; returns its exception."""

    async def press():
        while not condition():
            await asyncio.sleep(0.01)
        while True:
            await client.km.interrupt_kernel()
            # Python drops one that comes while it destroys an object.
            await asyncio.sleep(20)

    async def run():
        pressing = asyncio.ensure_future(press())
        try:
            await client.async_execute_cell(cell, index)
        except nbclient.exceptions.CellExecutionError as error:
            return str(error)
        finally:
            pressing.cancel()
        return ""

    return nbclient.util.run_sync(run)()


def processes_with(text):
    """Returns the ids of the processes with a text in their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


def code_cells(notebook):
    return [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, make_client):
    notebook = open_notebook(path)
    make_client(notebook, quick=path.stem not in COMPUTING).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells[-1].outputs
    shown = "\n".join(map(text_of, cells))
    assert [text for text in SHOWN[path.stem] if text not in shown] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_without_outputs(path):
    for cell in open_notebook(path).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


@pytest.mark.notebook
@pytest.mark.slow
def test_cells_run_again_and_after_a_restart_and_an_interrupt(make_client, tmp_path):
    notebook = open_notebook(FOLDER / "01_first_collective.ipynb")
    client = make_client(notebook)
    code = code_cells(notebook)
    pids = []
    with client.setup_kernel():
        pids.append(client.km.provisioner.pid)
        for index in code:  # in order, every cell twice
            client.execute_cell(notebook.cells[index], index)
            client.execute_cell(notebook.cells[index], index)
        # One rank sleeps in a callback while the others wait in the collective.
        stuck = nbformat.v4.new_code_cell(
            "import time\n"
            "def late(x):\n"
            "    def sleep(rank, x):\n"
            "        if rank == 0:\n"
            "            open('sleeps', 'w').close()\n"
            "            time.sleep(2)\n"
            "        return x\n"
            "    x = jax.pure_callback(\n"
            "        sleep, jax.ShapeDtypeStruct(x.shape, x.dtype),\n"
            "        jax.lax.axis_index(('data', 'context')), x)\n"
            "    return jaxcomm.psum(x, ('data', 'context'))\n"
            "jax.jit(jax.shard_map(late, mesh=mesh, in_specs=split,\n"
            "                      out_specs=jax.P(), check_vma=False))(x)\n"
        )
        notebook.cells.append(stuck)

        # As the stop button does.
        sleeps = (tmp_path / "sleeps").exists
        interrupted = interrupt(client, stuck, len(notebook.cells) - 1, sleeps)
        # JAX may hold the interrupt back until the collective is done.
        assert "KeyboardInterrupt" in interrupted or not interrupted
        again = nbformat.v4.new_code_cell("print(program(x))")
        notebook.cells.append(again)
        client.execute_cell(again, len(notebook.cells) - 1)
        assert "12" in text_of(again)
    # A restart: a new kernel after the old one was ended without finalize.
    second = open_notebook(FOLDER / "01_first_collective.ipynb")
    client = make_client(second)
    with client.setup_kernel():
        pids.append(client.km.provisioner.pid)
        for index in code:
            client.execute_cell(second.cells[index], index)
    # Those of other tests come and go meanwhile.
    ours = tuple(f"jaxcomm-{pid}-" for pid in pids)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(ours)]


def cell_that_begins(notebook, text):
    (found,) = (
        i for i in code_cells(notebook) if notebook.cells[i].source[: len(text)] == text
    )
    return found


@pytest.mark.notebook
@pytest.mark.slow
def test_interrupted_training_starts_again(make_client, tmp_path):
    notebook = open_notebook(FOLDER / "03_long_sequence_training.ipynb")
    for some in notebook.cells:
        some.source = some.source.replace("STEPS = 20", "STEPS = 12")
    client = make_client(notebook, quick=False)
    training = cell_that_begins(notebook, "state = jax.device_put(start, program")
    cell = notebook.cells[training]
    original = cell.source
    step = "losses.append(float(loss))"
    # It says that it trains, and does so until it is interrupted.
    endless = original.replace("range(STEPS)", "iter(int, 1)")
    endless = endless.replace(step, f"{step}; open('trains', 'w').close()")
    assert endless.count("iter(int, 1)") == endless.count("open('trains'") == 1
    with client.setup_kernel():
        for index in (i for i in code_cells(notebook) if i < training):
            client.execute_cell(notebook.cells[index], index)
        cell.source = endless
        trains = (tmp_path / "trains").exists
        assert "KeyboardInterrupt" in interrupt(client, cell, training, trains)
        cell.source = original
        client.execute_cell(cell, training)
        # As if it had not been interrupted.
        assert re.search(r"loss 5\.\d+ at step 1, [1-4]\.", text_of(cell))


@pytest.mark.notebook
@pytest.mark.slow
def test_an_interrupted_or_abandoned_launch_leaves_no_process(make_client, tmp_path):
    notebook = open_notebook(FOLDER / "04_diagnosing_a_hang.ipynb")
    client = make_client(notebook)
    imports, definitions, index, *_ = code_cells(notebook)
    cell, defined = notebook.cells[index], notebook.cells[definitions]
    script = f"{tmp_path}/jaxcomm-hang-"
    original = defined.source
    # Left to themselves, the processes would go on for minutes.
    slow = original.replace('"JAXCOMM_TIMEOUT": "8"', '"JAXCOMM_TIMEOUT": "200"')
    assert slow != original

    def define(source):
        defined.source = source
        client.execute_cell(defined, definitions)

    def all_gone():
        deadline = time.monotonic() + 60
        while left := processes_with(script):
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.05)

    def started():
        # The launcher and three processes.
        return len(processes_with(script)) >= 4

    def kill():
        for pid in processes_with(script):
            os.kill(pid, signal.SIGKILL)

    with contextlib.ExitStack() as stack:
        stack.callback(kill)
        stack.enter_context(client.setup_kernel())
        client.execute_cell(notebook.cells[imports], imports)
        define(slow)
        assert "KeyboardInterrupt" in interrupt(client, cell, index, started)
        all_gone()
        define(original)
        client.execute_cell(cell, index)
        assert "after finalize and init: [3.]" in text_of(cell)
        all_gone()
        define(slow)
        # The kernel is restarted while the cell runs.
        client.kc.execute(cell.source)
        while not started():
            time.sleep(0.05)
        nbclient.util.run_sync(client.km.restart_kernel)(now=True)
        all_gone()


@pytest.mark.notebook
@pytest.mark.slow
def test_the_end_of_the_hang_runs_again_in_the_same_kernel(make_client):
    notebook = open_notebook(FOLDER / "04_diagnosing_a_hang.ipynb")
    client = make_client(notebook)
    late = cell_that_begins(notebook, "import time")
    imports, *_ = code_cells(notebook)
    with client.setup_kernel():
        client.execute_cell(notebook.cells[imports], imports)
        for _ in range(2):
            for index in (i for i in code_cells(notebook) if i >= late):
                client.execute_cell(notebook.cells[index], index)
                client.execute_cell(notebook.cells[index], index)
            assert "waited 3 s for rank 2" in text_of(notebook.cells[late])
            assert "[6. 6. 6. 6.]" in text_of(notebook.cells[index])
