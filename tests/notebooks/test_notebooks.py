"""The notebooks run from top to bottom, again, and after a restart or an interrupt.

`make docs` runs them too, since the site shows what they print.
"""

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path

import nbclient
import nbformat
import pytest
import waiting

pytestmark = [pytest.mark.notebook, pytest.mark.slow, pytest.mark.multiprocess]
FOLDER = Path(__file__).parents[2] / "notebooks"
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
        "process 2) waited 30 s for rank 1. Process 1 was last in psum",
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


def open_notebook(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.fixture
def make_client(tmp_path, monkeypatch, compiled_once):
    """Returns a client that runs a notebook's cells in a kernel of its own."""
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
        # Training compiles for long; tests/examples show what it would.
        pytest.param(
            path.stem, marks=[pytest.mark.thorough] * ("training" in path.stem)
        )
        for path in sorted(FOLDER.glob("*.ipynb"))
    ],
)
def test_runs_from_top_to_bottom(name, make_client):
    notebook = open_notebook(name)
    for cell in notebook.cells:
        # Processes have to meet within it before one goes astray.
        cell.source = cell.source.replace('TIMEOUT": "8"', 'TIMEOUT": "30"')
    make_client(notebook).execute()
    cells = [notebook.cells[i] for i in code_cells(notebook)]
    assert cells[-1].outputs
    shown = "\n".join(map(text_of, cells))
    assert [text for text in SHOWN[name] if text not in shown] == []


def interrupt(client, cell, index, *conditions, afterwards=lambda: None):
    """Run a cell, interrupt it as the stop button does; return its exception.

    Args:
      conditions: the first says when to interrupt, the others when to do so again:
        Python drops an interrupt that comes while it destroys an object.
      afterwards: called after each.
    """
    ended = []

    async def press():
        for condition in conditions:
            await asyncio.to_thread(
                waiting.until, lambda condition=condition: ended or condition()
            )
            if ended:
                return
            await client.km.interrupt_kernel()
            afterwards()

    async def run():
        pressing = asyncio.ensure_future(press())
        try:
            await client.async_execute_cell(cell, index)
        except nbclient.exceptions.CellExecutionError as error:
            return str(error)
        finally:
            ended.append(True)
            await pressing
        return ""

    return nbclient.util.run_sync(run)()


@pytest.mark.thorough
def test_cells_run_again_and_after_a_restart_and_an_interrupt(make_client, tmp_path):
    notebook = open_notebook("01_first_collective")
    client = make_client(notebook)
    code = code_cells(notebook)
    pids = []
    with client.setup_kernel():
        pids.append(client.km.provisioner.pid)
        for index in code:  # in order, every cell twice
            client.execute_cell(notebook.cells[index], index)
            client.execute_cell(notebook.cells[index], index)
        # One rank waits in a callback while the others wait in the collective.
        stuck = nbformat.v4.new_code_cell(
            "import pathlib, waiting\n"
            "def late(x):\n"
            "    def wait(rank, x):\n"
            "        if rank == 0:\n"
            "            pathlib.Path('waits').touch()\n"
            "            waiting.until(pathlib.Path('interrupted').exists)\n"
            "        return x\n"
            "    x = jax.pure_callback(\n"
            "        wait, jax.ShapeDtypeStruct(x.shape, x.dtype),\n"
            "        jax.lax.axis_index(('data', 'context')), x)\n"
            "    return jaxcomm.psum(x, ('data', 'context'))\n"
            "jax.jit(jax.shard_map(late, mesh=mesh, in_specs=split,\n"
            "                      out_specs=jax.P(), check_vma=False))(x)\n"
        )
        notebook.cells.append(stuck)
        found = interrupt(
            client, stuck, len(notebook.cells) - 1, (tmp_path / "waits").exists,
            afterwards=(tmp_path / "interrupted").touch,
        )  # fmt: skip
        # JAX may hold the interrupt back until the collective is done.
        assert "KeyboardInterrupt" in found or not found
        again = nbformat.v4.new_code_cell("print(program(x))")
        notebook.cells.append(again)
        client.execute_cell(again, len(notebook.cells) - 1)
        assert "12" in text_of(again)
    # A restart: a new kernel after the old one was ended without finalize.
    second = open_notebook("01_first_collective")
    client = make_client(second)
    with client.setup_kernel():
        pids.append(client.km.provisioner.pid)
        for index in code:
            client.execute_cell(second.cells[index], index)
    # Those of other tests come and go meanwhile.
    ours = tuple(f"jaxcomm-{pid}-" for pid in pids)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(ours)]


@pytest.mark.thorough
def test_interrupted_training_starts_again(make_client, tmp_path):
    notebook = open_notebook("03_long_sequence_training")
    client = make_client(notebook)
    text = "state = jax.device_put(start, program"
    (training,) = (
        i for i in code_cells(notebook) if notebook.cells[i].source.startswith(text)
    )
    cell = notebook.cells[training]
    original = cell.source
    step = "losses.append(float(loss))"
    # It says how long it trains, and does so until it is interrupted.
    endless = original.replace("range(STEPS)", "iter(int, 1)")
    endless = endless.replace(step, f"{step}; print(step, file=open('steps', 'a'))")
    assert endless.count("iter(int, 1)") == endless.count("open('steps'") == 1
    log = tmp_path / "steps"

    def trained(steps):
        return lambda: log.exists() and log.read_text().count("\n") >= steps

    with client.setup_kernel():
        for index in (i for i in code_cells(notebook) if i < training):
            client.execute_cell(notebook.cells[index], index)
        cell.source = endless
        found = interrupt(client, cell, training, *map(trained, (1, 50, 100)))
        assert "KeyboardInterrupt" in found
        cell.source = original
        client.execute_cell(cell, training)
        # As if it had not been interrupted.
        assert re.search(r"loss 5\.\d+ at step 1, [1-4]\.", text_of(cell))


def processes_with(text):
    """Returns the ids of the processes with a text in their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


@pytest.mark.thorough
def test_an_interrupted_or_abandoned_launch_leaves_no_process(make_client, tmp_path):
    notebook = open_notebook("04_diagnosing_a_hang")
    client = make_client(notebook)
    imports, definitions, index, *rest = code_cells(notebook)
    cell, defined = notebook.cells[index], notebook.cells[definitions]
    script = f"{tmp_path}/jaxcomm-hang-"
    original = defined.source
    # Left to themselves, the processes would go on.
    slow = re.sub(r'(JAXCOMM_TIMEOUT": )"8"', r'\1"200"', original)
    assert slow != original

    def define(source):
        defined.source = source
        client.execute_cell(defined, definitions)

    def all_gone():
        waiting.until(lambda: not processes_with(script), "the end of all processes")

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
        for each in (index, *rest, *rest[-3:]):
            client.execute_cell(notebook.cells[each], each)
        assert "after finalize and init: [3.]" in text_of(cell)
        assert "[6. 6. 6. 6.]" in text_of(notebook.cells[rest[-1]])
        all_gone()
        define(slow)
        # The kernel is restarted while the cell runs.
        client.kc.execute(cell.source)
        waiting.until(started)
        nbclient.util.run_sync(client.km.restart_kernel)(now=True)
        all_gone()
