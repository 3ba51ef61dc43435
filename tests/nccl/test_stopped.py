"""A failure that costs a process its GPUs, by default: what is told, and stays so.

The fault suite has the other faults and policies: test_faults.py.
"""

CAUSE = "An asynchronous error that a test asked for"
NAMED = "psum(float32[2]) over axes ('i',) (lane 'default'"
STOPPED = (
    "the GPUs of this process are stopped, because a collective failed: psum(float32"
)
# A run of the program fails while it hangs, and what is done afterwards.
PROGRAM = """
mesh = mesh_of(3)
jaxcomm.init(mesh)
program = jitted(lambda x: jaxcomm.psum(x, "i"), mesh)
x = jnp.arange(6.0)
kept = np.asarray(program(x))
assert kept.tolist() == [6, 9] * 3
stand_in.clear()
stand_in.hang("ncclAllReduce")

def run():
    return program(x)

def give_error():
    stand_in.until_called("ncclAllReduce", 3)
    # Not of the last call, which may still be made.
    stand_in.async_error(stand_in.trace("ncclAllReduce")[0])

threading.Thread(target=give_error).start()
answer = {
    "first": error_of(run),
    "next": error_of(run),
    "first failure": jaxcomm._ffi.first_failure(),
    "init of what is live": error_of(lambda: len(jaxcomm.init(mesh))),
    "init": error_of(lambda: len(jaxcomm.init(mesh, lanes="other"))),
    "finalize": error_of(jaxcomm.finalize),
    "init again": error_of(lambda: len(jaxcomm.init(mesh))),
    "anew": error_of(run),
    "live": jaxcomm.communicators().counters.live,
    "kept": kept.tolist(),
}
"""


def test_all_that_uses_the_gpus_raises_and_says_why(alone, tmp_path):
    done = alone(PROGRAM, JAXCOMM_DUMP_DIR=str(tmp_path))
    assert done.popen.returncode == 0, done.said()[-3000:]
    record = tmp_path / "flight-record-0.json"
    assert "psum" in record.read_text()
    assert str(record) in done.said()
    (line,) = [line for line in done.said().splitlines() if NAMED in line]
    assert line.startswith("jaxcomm: ")
    for text in (CAUSE, " rank ", "the GPUs of this process were stopped"):
        assert text in line
    told = done.hear()
    # What was on the host stays.
    assert told["kept"] == [6, 9] * 3
    # As XLA raises what CUDA gives; the rank whose own call failed says why.
    assert "CUDA error 716" in told["first"] or CAUSE in told["first"], told
    assert told["next"].startswith("JaxRuntimeError"), told
    for later in ("init of what is live", "init", "init again"):
        assert told[later].startswith(f"CommunicatorError: {STOPPED}"), told
        assert CAUSE in told[later]
    assert told["finalize"] == ""
    assert told["anew"] != ""
    assert told["live"] == 0
    assert CAUSE in told["first failure"]
