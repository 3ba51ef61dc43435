"""H4: systems that give us no shared memory, or of another kind, or do not watch."""

import pytest

pytestmark = pytest.mark.multiprocess

MEET = """
jaxcomm.finalize()
(member,) = jaxcomm.init(mesh)
psum = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
total = [float(sum(range(mesh.devices.size)))] * jax.local_device_count()
right = [values(psum(spread(mesh, width))) == total for width in (1, 3, 1 << 20)]
answer = [member.backend, member.transport, right]
"""
RIGHT = [True, True, True]


def test_where_no_shared_memory_is_to_be_had_xla_communicates(start):
    processes = start(2)
    # As where /dev/shm is full and memfd_create forbidden: files end at a megabyte.
    processes.ask(
        "import resource\n"
        "mesh = mesh_of()\n"
        "if index == 0: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))"
    )
    for backend, transport, right in processes.ask(MEET):
        assert (backend, right) == ("xla", RIGHT)
        assert transport.startswith("xla: ")
        assert "File too large" in transport
        # What to do about it.
        assert "enlarge it" in transport

    processes.ask("resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))")
    assert processes.ask(MEET) == [["host", "shared memory", RIGHT]] * 2


def test_files_in_dev_shm_serve_where_anonymous_memory_does_not(start):
    processes = start(2, devices=2, JAX_ENABLE_RECOVERABILITY="1")
    processes.ask("mesh = mesh_of()")
    # As where a sandbox hides /proc/<pid>/fd.
    processes.ask(
        """
attach = jaxcomm._ffi.attach_segment
def attach_file(path, *more):
    if path.startswith("/proc"):
        raise RuntimeError(f"cannot open {path}: Permission denied")
    return attach(path, *more)
jaxcomm._ffi.attach_segment = attach_file
"""
    )
    shared = """
import glob
with open("/proc/self/maps") as maps:
    mapped = {line.split()[5] for line in maps if "jaxcomm-" in line}
answer = [len(mapped), glob.glob(f"/dev/shm/jaxcomm-{os.getpid()}-*")]
"""
    assert processes.ask(MEET) == [["host", "shared memory", RIGHT]] * 2
    assert processes.ask(shared) == [[1, []]] * 2

    # As in a container without them: also in process 0, which makes the memory.
    forbidden = processes.ask(
        "answer = attempt(lambda: forbid('memfd_create', 'pidfd_open'))"
    )
    if any("error" in outcome for outcome in forbidden):
        pytest.skip(f"system calls cannot be forbidden here: {forbidden}")
    assert processes.ask(MEET) == [["host", "shared memory", RIGHT]] * 2
    assert processes.ask(shared) == [[1, []]] * 2

    # Nobody watches for us; looking now and then must do.
    processes[0].ask("begin(lambda: values(psum(spread(mesh, 3))))")
    processes[1].popen.kill()
    outcome = processes[0].ask("answer = outcome()")
    assert (
        f"ranks 2, 3, gone with process 1 (pid {processes[1].pid})" in outcome["text"]
    )


def test_processes_of_another_pid_namespace_are_not_taken_for_dead(start):
    processes = start(2)
    # As in two containers that share /dev/shm: here nobody has the id that it hands in.
    processes[1].ask(
        """
import types
jaxcomm.communicator.hosts.os = types.SimpleNamespace(
    getpid=lambda: 2**22 + 1, readlink=lambda path: "pid:[1]"
)
jaxcomm._ffi.process_start_time = lambda pid: 12345
"""
    )
    processes.ask("mesh = mesh_of()")
    assert processes.ask(MEET) == [["host", "shared memory", RIGHT]] * 2
