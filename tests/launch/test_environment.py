import pytest

from jaxcomm.launch.environment import of_process
from jaxcomm.launch.options import Options
from jaxcomm.launch.restarts import Attempt


def environment(process=1, inherited=None, attempt=None, **given):
    asked = Options(processes=4, script="x", **given)
    return of_process(process, asked, 1234, inherited or {}, attempt)


def test_it_names_the_place_of_the_process():
    found = environment(process=2, inherited={"HOME": "/"})
    assert len(found.pop("JAXCOMM_RUN_ID")) == 32
    assert found == {
        "HOME": "/",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:1234",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "2",
        "JAX_PLATFORMS": "cpu",
        "JAXCOMM_RESTART_COUNT": "0",
        "JAXCOMM_MAX_RESTARTS": "0",
    }


def test_a_restarted_process_knows_which_attempt_it_is():
    attempt = Attempt(restarts=3, slots=(0, 2), run_id="mine")
    found = environment(process=1, attempt=attempt, max_restarts=9, platform="cuda")
    assert found["JAX_NUM_PROCESSES"] == "2"
    assert found["JAX_PROCESS_ID"] == "1"
    assert found["JAX_LOCAL_DEVICE_IDS"] == "2"
    assert found["JAXCOMM_RESTART_COUNT"] == "3"
    assert found["JAXCOMM_MAX_RESTARTS"] == "9"
    assert found["JAXCOMM_RUN_ID"] == "mine"


@pytest.mark.parametrize(
    ("inherited", "asked", "platform"),
    [("", None, "cpu"), ("cuda", None, "cuda"), ("cuda", "cpu", "cpu")],
)
def test_the_option_comes_before_the_environment(inherited, asked, platform):
    found = environment(inherited={"JAX_PLATFORMS": inherited}, platform=asked)
    assert found["JAX_PLATFORMS"] == platform


def test_devices_on_cpu_are_virtual():
    found = environment(devices_per_process=3)
    assert found["JAX_NUM_CPU_DEVICES"] == "3"
    assert "JAX_LOCAL_DEVICE_IDS" not in found


@pytest.mark.parametrize(("devices", "ids"), [(None, "1"), (2, "2,3")])
def test_processes_do_not_share_gpus(devices, ids):
    found = environment(platform="cuda", devices_per_process=devices)
    assert found["JAX_LOCAL_DEVICE_IDS"] == ids
    assert "JAX_NUM_CPU_DEVICES" not in found


def test_the_users_own_choice_of_gpus_stays():
    inherited = {"JAX_LOCAL_DEVICE_IDS": "7"}
    found = environment(platform="cuda", inherited=inherited)
    assert found["JAX_LOCAL_DEVICE_IDS"] == "7"


@pytest.mark.parametrize(
    ("exceptions", "direct"),
    [
        ({}, "127.0.0.1"),
        ({"no_proxy": "a"}, "a,127.0.0.1"),
        ({"no_proxy": "a", "no_grpc_proxy": "b"}, "b,127.0.0.1"),
    ],
)
def test_no_proxy_is_asked_for_the_way_to_this_host(exceptions, direct):
    found = environment(inherited={"https_proxy": "http://p:1", **exceptions})
    assert found["no_grpc_proxy"] == direct
