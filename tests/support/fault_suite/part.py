"""The part of a process in a plan: its cases, one after another."""

import os
import sys
import traceback
import warnings

import jax

import jaxcomm
from fault_suite.cases import Case
from fault_suite.results import Results
from fault_suite.trial import Trial


def take_part(plan, say, hear):
    """Take part in the cases of a plan, in a process that has no devices yet.

    ``say`` tells the runner something, and ``hear`` returns its word "go" or "leave".
    """
    try:
        _take_part(plan, say, hear)
    except Exception:
        traceback.print_exc()
        os._exit(1)


def _take_part(plan, say, hear):
    os.environ |= plan["variables"]
    jax.config.update("jax_num_cpu_devices", plan["devices"])
    # Where memory is not donated, what nobody wrote may be right by chance.
    warnings.filterwarnings("error", message=".*donated")
    if plan["processes"] > 1:
        # The coordinator is to serve on the loopback interface only.
        jax.distributed.initialize(
            plan["address"], plan["processes"], plan["process"],
            local_device_ids=plan["gpus"],
            coordinator_bind_address=plan["address"],
        )  # fmt: skip
    elif plan["gpus"]:
        # What jax.distributed.initialize sets, too.
        visible = ",".join(map(str, plan["gpus"]))
        jax.config.update("jax_cuda_visible_devices", visible)
    for fields in plan["cases"]:
        case = Case(**fields)
        results = Results(case, say)
        trial = Trial(case, plan["is_gpu"], plan["process"], results)
        results.say("ready", is_prefilled=trial.is_prefilled)
        if hear() == "leave":
            # The program has come to its end, in order.
            jaxcomm.finalize()
            results.say("left")
            sys.exit()
        trial.run()
        trial.aftermath()
        results.say("done")
    assert hear() == "leave"
    sys.exit()
