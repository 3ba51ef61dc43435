"""The notebooks run from top to bottom, again, and after a restart or an interrupt."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def open_notebook(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture
def make_client(tmp_path, monkeypatch):
    """Returns a client that runs a notebook's cells in a kernel of its own."""
    # The notebook asks for its devices itself; the tests' flag would be in the way.
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("MPLBACKEND", "agg")
    clients = []

    def make(notebook):
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


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, make_client):
    notebook = open_notebook(path)
    make_client(notebook).execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert last.outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_without_outputs(path):
    for cell in open_notebook(path).cells:
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None


@pytest.mark.notebook
def test_the_communicator_table_is_html(make_client):
    notebook = open_notebook(FOLDER / "01_first_collective.ipynb")
    make_client(notebook).execute()
    tables = [c for c in notebook.cells if c.source == "jaxcomm.communicators()"]
    assert "<table>" in text_of(tables[0])
    assert "data x context" in text_of(tables[0])


@pytest.mark.notebook
@pytest.mark.slow
def test_cells_run_again_and_after_a_restart_and_an_interrupt(make_client):
    notebook = open_notebook(FOLDER / "01_first_collective.ipynb")
    client = make_client(notebook)
    before = set(os.listdir("/dev/shm"))
    code = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    with client.setup_kernel():
        for index in code:  # in order, every cell twice
            client.execute_cell(notebook.cells[index], index)
            client.execute_cell(notebook.cells[index], index)
        # One rank sleeps in a callback while the others wait in the collective.
        stuck = nbformat.v4.new_code_cell(
            "import time\n"
            "def late(x):\n"
            "    def sleep(rank, x):\n"
            "        time.sleep(2.0 * float(rank == 0))\n"
            "        return x\n"
            "    x = jax.pure_callback(\n"
            "        sleep, jax.ShapeDtypeStruct(x.shape, x.dtype),\n"
            "        jax.lax.axis_index(('data', 'context')), x)\n"
            "    return jaxcomm.psum(x, ('data', 'context'))\n"
            "jax.jit(jax.shard_map(late, mesh=mesh, in_specs=split,\n"
            "                      out_specs=jax.P(), check_vma=False))(x)\n"
        )
        notebook.cells.append(stuck)

        interrupted = []

        # As the stop button does, half a second into the cell.
        async def interrupt():
            import asyncio

            await asyncio.sleep(0.5)
            await client.km.interrupt_kernel()

        async def run():
            import asyncio

            task = asyncio.ensure_future(interrupt())
            try:
                await client.async_execute_cell(stuck, len(notebook.cells) - 1)
            except nbclient.exceptions.CellExecutionError as error:
                interrupted.append(str(error))
            await task

        nbclient.util.run_sync(run)()
        # JAX may hold the interrupt back until the collective is done.
        assert all("KeyboardInterrupt" in text for text in interrupted)
        again = nbformat.v4.new_code_cell("print(program(x))")
        notebook.cells.append(again)
        client.execute_cell(again, len(notebook.cells) - 1)
        assert "12" in text_of(again)
    # A restart: a new kernel after the old one was ended without finalize.
    second = open_notebook(FOLDER / "01_first_collective.ipynb")
    make_client(second).execute()
    assert set(os.listdir("/dev/shm")) <= before
