"""Runs of the launcher: in this process, which is quick, or as a user starts it."""

import inspect
import selectors
import subprocess
import tempfile
import textwrap

import forked
import pytest
import waiting

from jaxcomm.launch import job, members, options, records, run, stopping, witness


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


# What the programs have.
_MINE = textwrap.dedent(
    """
    import os, signal, subprocess, sys
    from waiting import forever, until

    i = int(os.environ["JAX_PROCESS_ID"])

    # Between the processes of a run.
    def note(name):
        return os.environ["JAXCOMM_DUMP_DIR"] + "/" + name

    # Whole as soon as it is there.
    def tell(name, text=""):
        with open(note(name) + ".new", "w") as file: file.write(text)
        os.rename(note(name) + ".new", note(name))

    def hear(name):
        until(lambda: os.path.exists(note(name)), name)
        return open(note(name)).read()
    """
) + inspect.getsource(is_running)


@pytest.fixture
def temporary(tmp_path_factory):
    """The folder for temporary files. Its path is short enough for sockets in it."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(autouse=True)
def inherited(monkeypatch, temporary):
    """Takes away what the tests' own environment would add: devices, for one.

    Also its temporary folder, where a launcher leaves what it keeps.
    """
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.fixture
def program(tmp_path):
    def write(text, name="program.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_MINE + text)
        return str(path)

    return write


@pytest.fixture
def launch(program, capfd, monkeypatch):
    def start(text, *arguments, processes=2, **given):
        asked = options.Options(
            processes=processes, script=program(text), arguments=arguments, **given
        )
        with monkeypatch.context() as patch:
            if "import jax" in text:
                patch.setattr(subprocess, "Popen", forked.Popen)
            status = run.run(asked)
        return status, *capfd.readouterr()

    return start


@pytest.fixture
def notes(monkeypatch, tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(records.VARIABLE, str(folder))
    return folder


@pytest.fixture
def time_passes_at(monkeypatch, notes):
    """Returns a function by which the launcher's clock goes on when notes are there.

    It stands still otherwise. Of a process that is slow no test can say when it has
    done its part. So the launcher waits for a time, and has waited for long enough once
    all notes of a group are there: then time goes on, and after it a note of that name
    and " passed" is there. Each such wait of the launcher needs a group.
    """
    clock, groups = waiting.Clock(), []
    select = selectors.EpollSelector.select

    def is_time():
        return groups and all((notes / name).exists() for name in groups[0][0])

    def select_or_pass(self, timeout=None):
        # Only the job's selector, while it waits for a time: those of the pumps have no
        # data. Not while it waits for answers: these have a clock of their own.
        is_job = any(key.data for key in self.get_map().values())
        if timeout is None or timeout <= witness.ANSWER_SECONDS or not is_job:
            return select(self, timeout)
        waiting.until(lambda: is_time() or select(self, 0), "an event of the job")
        if is_time():
            names, seconds = groups.pop(0)
            clock.advance(seconds)
            (notes / f"{names[0]} passed").touch()
        return select(self, 0)

    def pass_at(*names, seconds=100_000):
        groups.append((names, seconds))

    monkeypatch.setattr(selectors.EpollSelector, "select", select_or_pass)
    for module in (job, members, run, stopping):
        monkeypatch.setattr(module, "time", clock)
    return pass_at


@pytest.fixture
def secret(tmp_path):
    """A file with what only the launchers of a job know."""
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text("a secret of tests")
    return str(path)


@pytest.fixture
def started(piped):
    def start(*arguments, words=("-m", "jaxcomm.launch"), **options):
        return piped([*words, *arguments], **options)

    return start


@pytest.fixture(name="is_running")
def running():
    return is_running


@pytest.fixture
def assert_gone():
    def check(pids):
        assert pids
        waiting.until(lambda: not any(map(is_running, pids)), f"the ends of {pids}")

    return check


@pytest.fixture
def sums_device_ids():
    """Returns a program that sums all device ids by XLA's own collective."""
    return textwrap.dedent(
        """
        import jax
        import numpy as np
        style = dict(enumerate(sys.argv[1:])).get(i)
        if style == "initialize":
            jax.distributed.initialize()
        elif style == "mpi4py":
            jax.distributed.initialize(cluster_detection_method="mpi4py")
        elif style == "explicit":
            address = os.environ["JAX_COORDINATOR_ADDRESS"]
            jax.distributed.initialize(address, len(sys.argv) - 1, process_id=i)
        elif style == "alone":
            jax.distributed.initialize(num_processes=1)
        mesh = jax.make_mesh((jax.device_count(),), ("i",),
                             axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.NamedSharding(mesh, jax.P("i"))
        ids = np.array([device.id for device in mesh.devices.flat], np.int32)
        x = jax.make_array_from_callback(ids.shape, spec, lambda index: ids[index])
        psum = jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh,
                             in_specs=jax.P("i"), out_specs=jax.P())
        print("process", jax.process_index(), "of", jax.process_count(),
              "devices", jax.local_device_count(), "of", jax.device_count(),
              "right" if int(jax.jit(psum)(x)[0]) == sum(ids.tolist()) > 0 else ids)
        """
    )
