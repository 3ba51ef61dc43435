import pytest

from jaxcomm.launch import run
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


@pytest.mark.parametrize(
    ("chosen", "asked", "is_told"),
    [(None, {}, True), ("cpu", {}, False), (None, {"platform": "cpu"}, False)],
)
def test_who_chose_nothing_learns_of_the_gpus(
    chosen, asked, is_told, tmp_path, monkeypatch, capfd
):
    monkeypatch.delenv("JAX_PLATFORMS")
    if chosen:
        monkeypatch.setenv("JAX_PLATFORMS", chosen)
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(run, "_GPUS", f"{tmp_path}/nvidia[0-9]*")
    run._say_of_gpus(Options(processes=1, script="x", **asked))
    said = capfd.readouterr().err
    assert ("this host has 2 GPUs, and the processes use the CPU" in said) == is_told
