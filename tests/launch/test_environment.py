import pytest

from jaxcomm.launch import devices
from jaxcomm.launch.environment import of_process
from jaxcomm.launch.options import Options


def environment(process=1, inherited=None, place=None, **given):
    asked = Options(processes=4, script="x", **given)
    return of_process(process, asked, "127.0.0.1:1234", inherited or {}, place)


def test_it_names_the_place_of_the_process():
    assert environment(process=2, inherited={"HOME": "/"}) == {
        "HOME": "/",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:1234",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "2",
        "JAX_PLATFORMS": "cpu",
    }


PROXY = {"https_proxy": "http://p:1"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # The option comes before the environment.
        ({"inherited": {"JAX_PLATFORMS": ""}}, "JAX_PLATFORMS=cpu"),
        ({"inherited": {"JAX_PLATFORMS": "cuda"}}, "JAX_PLATFORMS=cuda"),
        ({"inherited": {"JAX_PLATFORMS": "cuda"}, "platform": "cpu"},
         "JAX_PLATFORMS=cpu"),
        # Devices on CPU are virtual; processes do not share GPUs.
        ({"devices_per_process": 3},
         "JAX_NUM_CPU_DEVICES=3 JAX_LOCAL_DEVICE_IDS=None"),
        ({"platform": "cuda"}, "JAX_LOCAL_DEVICE_IDS=1 JAX_NUM_CPU_DEVICES=None"),
        ({"platform": "cuda", "devices_per_process": 2},
         "JAX_LOCAL_DEVICE_IDS=2,3 JAX_NUM_CPU_DEVICES=None"),
        # The user's own choice stays.
        ({"platform": "cuda", "inherited": {"JAX_LOCAL_DEVICE_IDS": "7"}},
         "JAX_LOCAL_DEVICE_IDS=7"),
        # Of those that are left each keeps its GPU.
        ({"platform": "cuda", "place": 3}, "JAX_LOCAL_DEVICE_IDS=3"),
        # Processes of another host number on and have its GPUs.
        ({"process": 5, "platform": "cuda", "hosts": 3, "host": 1,
          "coordinator": "first:1234"},
         "JAX_NUM_PROCESSES=12 JAX_LOCAL_DEVICE_IDS=1"),
        # No proxy is asked for the way to this host.
        ({"inherited": PROXY}, "no_grpc_proxy=127.0.0.1"),
        ({"inherited": PROXY | {"no_proxy": "a"}}, "no_grpc_proxy=a,127.0.0.1"),
        ({"inherited": PROXY | {"no_proxy": "a", "no_grpc_proxy": "b"}},
         "no_grpc_proxy=b,127.0.0.1"),
    ],
)  # fmt: skip
def test_what_is_asked_for_or_inherited_shows(given, expected):
    found = environment(**given)
    for name, value in (pair.split("=") for pair in expected.split()):
        assert str(found.get(name)) == value


ONE_EACH = "GPU 0 to process 0; GPU 1 to process 1"
NO_JAX = (
    "the processes use the CPU: this host has 2 GPUs, and this Python has no JAX for "
    "CUDA. Install jax[cuda13], or say --platform cpu"
)


@pytest.mark.parametrize(
    ("given", "inherited", "platform", "said"),
    [
        ({}, {}, "cuda,cpu", ONE_EACH),
        ({"processes": 1}, {}, "cuda,cpu", "GPU 0 to process 0"),
        ({"processes": 1, "devices_per_process": 2}, {}, "cuda,cpu",
         "GPUs 0, 1 to process 0"),
        # Processes of another host, and a choice of GPUs from outside.
        ({"hosts": 2, "host": 1}, {"CUDA_VISIBLE_DEVICES": "6,4"}, "cuda,cpu",
         "GPU 6 to process 2; GPU 4 to process 3"),
        ({"platform": "cuda"}, {}, "cuda", ONE_EACH),
        ({}, {"JAX_PLATFORMS": "cuda"}, "cuda", ONE_EACH),
        # The user says which: JAX_LOCAL_DEVICE_IDS.
        ({}, {"JAX_PLATFORMS": "cuda", "JAX_LOCAL_DEVICE_IDS": "1"}, "cuda", ""),
        ({"platform": "cpu"}, {}, "cpu", ""),
        ({}, {"JAX_PLATFORMS": "cpu"}, "cpu", ""),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "cpu", ""),
        ({}, {"plugin": ""}, "cpu", NO_JAX),
        ({"processes": 3}, {}, "cpu",
         "the processes use the CPU: this host has 2 GPUs, and the processes need 3. "
         "Start fewer, or say --platform cpu"),
    ],
)  # fmt: skip
def test_who_gets_which_gpu(given, inherited, platform, said, tmp_path, monkeypatch):
    """The files of a driver, and modules in the place of JAX's for CUDA."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(devices, "_FILES", f"{tmp_path}/nvidia[0-9]*")
    plugins = () if "plugin" in inherited else ("no_such_module", "json")
    monkeypatch.setattr(devices, "_PLUGINS", plugins)
    asked = Options(**{"processes": 2, "script": "x", **given})
    assert devices.choose(asked, inherited) == devices.Devices(platform, said)


def test_who_got_which_gpu_is_said_first(launch, monkeypatch):
    """And they get them: here a place of CPU devices."""
    chosen = devices.Devices("cpu", ONE_EACH)
    monkeypatch.setattr(devices, "choose", lambda options, environment: chosen)
    status, out, err = launch("print(os.environ['JAX_PLATFORMS'])")
    assert (status, err) == (0, f"jaxcomm.launch: {ONE_EACH}\n")
    assert sorted(out.split()) == ["[0]", "[1]", "cpu", "cpu"]
