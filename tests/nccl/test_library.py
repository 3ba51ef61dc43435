"""Which libnccl serves, what older ones lack, and what is said without one."""

import pytest

import jaxcomm
from jaxcomm.communicator.backends.nccl import devices, library

OPTIONAL = {
    "ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister",
    "ncclCommWindowRegister", "ncclCommWindowDeregister", "ncclAlltoAll", "ncclGather",
    "ncclScatter", "ncclCommRevoke", "ncclCommSuspend", "ncclCommResume",
    "ncclCommMemStats",
}  # fmt: skip
SINCE_2_28 = OPTIONAL - {
    "ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister",
    "ncclCommWindowRegister", "ncclCommWindowDeregister",
}  # fmt: skip


def test_the_library_tells_what_it_is(stand_in, stand_in_path):
    found = library.load()
    assert found == library.Library(
        path=stand_in_path, version="2.32.3", version_code=23203,
        driver_version="13.0", missing=(), is_stand_in=True,
    )  # fmt: skip
    assert devices.refusal("cpu") is None
    assert devices.refusal("tpu") == "NCCL serves NVIDIA GPUs, not tpu devices"


def test_cpu_devices_are_served_only_by_a_library_that_is_named(stand_in, monkeypatch):
    monkeypatch.delenv("JAXCOMM_NCCL_LIBRARY")
    assert devices.refusal("cpu") == "NCCL serves NVIDIA GPUs, not cpu devices"


def test_cpu_devices_choose_host_even_where_there_is_a_stand_in(
    stand_in, make_mesh, monkeypatch
):
    monkeypatch.setattr("jaxcomm.config.BACKEND", None)
    (member,) = jaxcomm.init(make_mesh(i=2))
    assert member.backend == "host"


EVERY_MOVE = """
mesh = mesh_of(3)
x = np.arange(3 * 3 * 4, dtype=np.float32).reshape(3 * 3, 4)
calls = {
    "psum": lambda x: jaxcomm.psum(x, "i"),
    "bfloat16": lambda x: jaxcomm.psum(x.astype(jnp.bfloat16), "i"),
    "all_gather": lambda x: jaxcomm.all_gather(x, "i", axis=1),
    "all_to_all": lambda x: jaxcomm.all_to_all(x, "i", 0, 1, tiled=True),
    "psum_scatter": lambda x: jaxcomm.psum_scatter(x, "i", tiled=True),
    "gather": lambda x: jaxcomm.pgather(x, "i", 1),
    "scatter": lambda x: jaxcomm.pscatter(x, "i", 2),
    "ppermute": lambda x: jaxcomm.ppermute(x, "i", [(0, 2)]),
}
def of(backend):
    run = jitted(lambda x: {n: f(x) for n, f in calls.items()}, mesh)
    jaxcomm.config.BACKEND = backend
    return jax.tree.map(np.asarray, run(x))
found, expected = of("nccl"), of("host")
(member, *_) = jaxcomm.communicators()
tell({
    "transport": member.transport,
    "wrong": [n for n in calls if not np.array_equal(found[n], expected[n])],
    "all to all": len(trace("ncclAlltoAll")),
    "device bytes": jaxcomm.memory_report()[0].device_bytes,
    "missing": jaxcomm.communicator.backends.nccl.library.load().missing,
    "config": trace("ncclCommSplit")[0]["config"],
})
"""


@pytest.mark.parametrize(
    ("code", "text", "missing"),
    [("21801", "2.18.1", OPTIONAL), ("22703", "2.27.3", SINCE_2_28)],
)
def test_older_versions_do_with_sends_what_they_lack(told, code, text, missing):
    found = told(EVERY_MOVE, JAXCOMM_FAKE_NCCL_VERSION=code)
    assert found["transport"] == f"NCCL {text}"
    assert found["wrong"] == []
    assert found["all to all"] == 0
    assert set(found["missing"]) == missing
    assert found["config"] == {"blocking": 1, "split_share": 1}
    # Measured, where there is no ncclCommMemStats: the stand-in takes 1 MiB a rank.
    assert found["device bytes"] == 3 << 20


def test_settings_that_a_version_does_not_know_are_refused_by_name(told):
    code = """
from jaxcomm.communicator.policy import CommPolicy
fields = dict(max_ctas=8, min_ctas=2, cga_cluster_size=1, traffic_class=3, name="mine",
              max_p2p_peers=5)
tell({
    field: error_of(
        lambda: (jaxcomm.init(mesh_of(2), policy=CommPolicy(**{field: value})), 0)[1]
    )
    for field, value in fields.items()
})
"""
    errors = told(code, JAXCOMM_FAKE_NCCL_VERSION="21801")
    known = {"max_ctas", "min_ctas", "cga_cluster_size"}
    assert {field for field, error in errors.items() if not error} == known
    for field, name in (
        ("traffic_class", "trafficClass"),
        ("name", "commName"),
        ("max_p2p_peers", "maxP2pPeers"),
    ):
        assert "CommunicatorError" in errors[field]
        assert f"NCCL 2.18.1 has no setting '{name}'; leave it out" in errors[field]


# What is named, and what is said of it.
NO_LIBRARIES = {
    "no file": ("{folder}/libnccl.so", ("{folder}/libnccl.so", "cannot open")),
    "no library": ("{folder}/text.so", ("{folder}/text.so", "invalid ELF header")),
    "not NCCL": ("libc.so.6", ("lacks ncclGetVersion", "2.18 or newer is needed")),
}


def test_what_is_no_nccl_is_refused_with_a_reason(told, tmp_path):
    (tmp_path / "text.so").write_text(
        "This is no library, though it is long enough.\n" * 3
    )
    named = [named.format(folder=tmp_path) for named, _ in NO_LIBRARIES.values()]
    code = f"""
def error_with(path):
    os.environ["JAXCOMM_NCCL_LIBRARY"] = path
    jaxcomm.communicator.backends.nccl.library.load.cache_clear()
    return error_of(lambda: len(jaxcomm.init(mesh_of(2))))

tell([error_with(path) for path in [*{named!r}, stand_in._name]])
"""
    *errors, right = told(code)
    for error, (_, said) in zip(errors, NO_LIBRARIES.values(), strict=True):
        assert error.startswith("CommunicatorError: backend 'nccl' cannot join the")
        assert "axes ('i',) (lane 'default')" in error
        for text in said:
            assert text.format(folder=tmp_path) in error
    # A library that could not be taken is no obstacle to another.
    assert right == ""


def test_a_real_library_serves_no_cpu_devices(monkeypatch, make_mesh):
    there = library.Library("/lib/libnccl.so.2", "2.28.9", 22809, "13.0", (), False)
    monkeypatch.setattr(library, "load", lambda: there)
    monkeypatch.setenv("JAXCOMM_NCCL_LIBRARY", "/lib/libnccl.so.2")
    with pytest.raises(
        jaxcomm.CommunicatorError, match=r"libnccl\.so\.2 is NCCL itself"
    ):
        jaxcomm.init(make_mesh(i=2), backend="nccl")
