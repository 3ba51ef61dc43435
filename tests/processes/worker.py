"""One process of a team: runs the functions it is told, until its input ends.

``worker.py process processes devices port``. A line of JSON comes in for each call,
and one goes out. What the functions print goes where errors go.
"""

import faulthandler
import gc
import json
import os
import pathlib
import sys
import traceback

import jax
import waiting

import jaxcomm

# Not there by itself under PYTHONSAFEPATH, by which make keeps the source folder
# jaxcomm/ from hiding the installed package.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from here import Here, load


def run(call, here):
    # The deadline holds inside C++ too, and when nobody reads the answer any more.
    faulthandler.dump_traceback_later(waiting.HANG_SECONDS, exit=True)
    environment = dict(os.environ)
    try:
        os.environ.update(call["environment"])
        function = getattr(load(call["file"]), call["function"])
        return {"value": function(here, **call["arguments"])}
    except BaseException:
        return {"error": traceback.format_exc()}
    finally:
        os.environ.clear()
        os.environ.update(environment)
        faulthandler.cancel_dump_traceback_later()


def main():
    process, processes, devices, port = map(int, sys.argv[1:])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        processes,
        process,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"127.0.0.1:{port}",
    )
    here = Here()
    # As in tests/conftest.py: what is here already is no garbage.
    gc.freeze()
    print(json.dumps({"value": process}), file=replies, flush=True)
    for line in sys.stdin:
        reply = run(json.loads(line), here)
        # The next call meets nothing of this one.
        jaxcomm.finalize()
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
