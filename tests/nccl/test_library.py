"""Which libnccl serves, what older ones lack, and what is said without one."""

import pytest

import jaxcomm
from jaxcomm.communicator.backends.nccl import devices, library

LACKED_BY_ALL_BELOW_2_28 = {"ncclAlltoAll", "ncclGather", "ncclScatter",
                            "ncclCommMemStats"}  # fmt: skip
# Of NCCL 2.18 alone.
LACKED_BY_2_18 = {"ncclMemAlloc", "ncclCommRegister", "ncclCommWindowRegister"}


def test_the_library_tells_what_it_is(stand_in, stand_in_path):
    found = library.load()
    assert found == library.Library(
        path=stand_in_path, version="2.32.3", version_code=23203,
        driver_version="13.0", missing=(),
    )  # fmt: skip
    assert devices.refusal("cpu") is None
    assert devices.refusal("tpu") == "NCCL serves NVIDIA GPUs, not tpu devices"


def test_cpu_devices_are_served_only_by_a_stand_in_that_is_named(
    stand_in, make_mesh, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("jaxcomm.config.BACKEND", None)
        # And even then they choose host.
        (member,) = jaxcomm.init(make_mesh(i=2))
        assert member.backend == "host"
        there = library.Library("/lib/libnccl.so.2", "2.28.9", 22809, "13", ())
        patch.setattr(library, "load", lambda: there)
        with pytest.raises(jaxcomm.CommunicatorError, match=r"so\.2 is NCCL itself"):
            jaxcomm.init(make_mesh(i=2), backend="nccl")
        patch.delenv("JAXCOMM_NCCL_LIBRARY")
        assert devices.refusal("cpu") == "NCCL serves NVIDIA GPUs, not cpu devices"


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
answer = {
    "transport": member.transport,
    "wrong": [n for n in calls if not np.array_equal(found[n], expected[n])],
    "all to all": len(stand_in.trace("ncclAlltoAll")),
    "device bytes": jaxcomm.memory_report()[0].device_bytes,
    "missing": jaxcomm.communicator.backends.nccl.library.load().missing,
    "config": stand_in.trace("ncclCommSplit")[0]["config"],
}
"""


@pytest.mark.parametrize(
    ("code", "text", "lacks"),
    [("21801", "2.18.1", LACKED_BY_2_18), ("22703", "2.27.3", set())],
)
def test_older_versions_do_with_sends_what_they_lack(told, code, text, lacks):
    found = told(EVERY_MOVE, JAXCOMM_FAKE_NCCL_VERSION=code)
    assert found["transport"] == f"NCCL {text}"
    assert found["wrong"] == []
    assert found["all to all"] == 0
    missing = set(found["missing"])
    assert missing >= LACKED_BY_ALL_BELOW_2_28
    assert missing & LACKED_BY_2_18 == lacks
    named = {} if lacks else {"comm_name": "jaxcomm"}
    assert found["config"] == {"blocking": 1, "split_share": 1} | named
    # Measured, where there is no ncclCommMemStats: the stand-in takes 1 MiB a rank.
    assert found["device bytes"] == 3 << 20


def test_settings_that_a_version_does_not_know_are_refused_by_name(told):
    code = """
from jaxcomm.communicator.policy import CommPolicy
fields = dict(max_ctas=8, min_ctas=2, cga_cluster_size=1, traffic_class=3, name="mine",
              max_p2p_peers=5)
answer = {
    field: error_of(
        lambda: (jaxcomm.init(mesh_of(2), policy=CommPolicy(**{field: value})), 0)[1]
    )
    for field, value in fields.items()
}
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


# What is said of what is named.
SAID = [
    ("{folder}/libnccl.so", "{folder}/libnccl.so: cannot open"),
    ("{folder}/text.so", "{folder}/text.so: invalid ELF header"),
    ("libc.so.6", "lacks ncclGetVersion"),
]


def test_what_is_no_nccl_is_refused_with_a_reason(told, tmp_path):
    (tmp_path / "text.so").write_text(
        "This is no library, though it is long enough.\n" * 3
    )
    named = [name.format(folder=tmp_path) for name, _ in SAID]
    code = f"""
def error_with(path):
    os.environ["JAXCOMM_NCCL_LIBRARY"] = path
    jaxcomm.communicator.backends.nccl.library.load.cache_clear()
    return error_of(lambda: len(jaxcomm.init(mesh_of(2))))

right = os.environ["JAXCOMM_NCCL_LIBRARY"]
answer = [error_with(path) for path in [*{named!r}, right]]
"""
    *errors, right = told(code)
    for error, (_, said) in zip(errors, SAID, strict=True):
        assert error.startswith("CommunicatorError: backend 'nccl' cannot join the")
        assert "axes ('i',) (lane 'default')" in error
        assert said.format(folder=tmp_path) in error
    # A library that could not be taken is no obstacle to another.
    assert right == ""
