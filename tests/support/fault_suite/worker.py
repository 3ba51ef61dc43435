"""One process of cases: ``python -m fault_suite.worker PARENT``.

The first line on stdin is its plan, as JSON. It says on stdout, in lines of JSON, how
far it has come and what became of every result; it takes the words "go" and "leave" on
stdin.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
import warnings

import jax

import jaxcomm
from fault_suite.cases import Case
from fault_suite.lines import hear, say
from fault_suite.trial import Trial

_PR_SET_PDEATHSIG = 1


def _take_part(plan, cases):
    is_gpu = plan["is_gpu"]
    for case in cases:
        trial = Trial(case, is_gpu, plan["process"])
        say("ready", case=str(case), is_prefilled=trial.is_prefilled)
        word = hear()
        if word == "leave":
            # The program has come to its end, in order.
            jaxcomm.finalize()
            say("left", case=str(case))
            return
        trial.run()
        trial.aftermath()
        say("done", case=str(case))
    assert hear() == "leave"


def main():
    """Take part in the cases of a plan, then end as any program does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
    plan = json.loads(hear())
    # It may have been started ahead, for any case; JAX has no devices yet.
    os.environ |= plan["variables"]
    jax.config.update("jax_num_cpu_devices", plan["devices"])
    # Where memory is not donated, what nobody wrote may be right by chance.
    warnings.filterwarnings("error", message=".*donated")
    if plan["processes"] > 1:
        # The coordinator is to serve on the loopback interface only.
        jax.distributed.initialize(
            plan["address"], plan["processes"], plan["process"],
            local_device_ids=[plan["gpu"]] if plan["is_gpu"] else None,
            coordinator_bind_address=plan["address"],
        )  # fmt: skip
    try:
        _take_part(plan, [Case(**each) for each in plan["cases"]])
    except Exception:
        say("broken", text=traceback.format_exc())
        os._exit(1)


if __name__ == "__main__":
    main()
