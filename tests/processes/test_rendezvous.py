"""How processes find each other, and what they do where they share no memory."""

import contextlib
import io
import itertools
import types

import pytest

import jaxcomm
from jaxcomm.communicator import hosts, rendezvous
from jaxcomm.communicator import store as product

pytestmark = pytest.mark.multiprocess


def check_sum(here, mesh, axes=("i",)):
    """Sums something that crosses in one piece and something that is streamed."""
    small = here.values("int32", (mesh.size, 3), 1)
    large = here.values("int32", (mesh.size, 100_003), 2)
    found = here.run(mesh, lambda *x: jaxcomm.psum(x, axes), small, large)
    for result, x in zip(found, (small, large), strict=True):
        total = here.by_group(mesh, axes, here.model.all_reduce("sum"), x)
        here.identical(mesh, result, total)


def one_comes_late(here):
    mesh = here.mesh(4, 1)
    text = None
    here.meet("about to come")
    if here.process != 2:
        looks = itertools.count()

        def monotonic():
            # A process looks at its clock when it begins, and again when it waits: it
            # has said that it came. Once all have said so, their time is over.
            look = next(looks)
            if look == 1:
                here.meet("all wait but one", [0, 1, 3])
            return 1000.0 if look else 0.0

        with pytest.MonkeyPatch.context() as patch:
            its = types.SimpleNamespace(monotonic=monotonic)
            patch.setattr(rendezvous, "time", its)
            with pytest.raises(jaxcomm.CommunicatorError) as caught:
                jaxcomm.init(mesh, backend="host")
        text = str(caught.value)
        assert not jaxcomm.communicators()
    here.meet("one is late")
    jaxcomm.init(mesh, backend="host")
    check_sum(here, mesh)
    assert jaxcomm.communicators()[0].transport == "shared memory"
    return text


def test_who_does_not_come_is_named_and_may_come_later(team):
    """C1."""
    texts = team.call(one_comes_late)
    assert texts.pop(2) is None
    for text in texts:
        assert "for process 2 of [0, 1, 2, 3]" in text
        assert "JAXCOMM_TIMEOUT" in text


def overlapping_sets(here):
    lines = ([0, 2, 4], [2, 4, 6], [0, 1, 4, 6, 7])
    meshes = [here.mesh(4, 2, order=line) for line in lines]
    for _ in range(3):
        for mesh in meshes:
            if mesh is not None:
                check_sum(here, mesh)
    return sorted(sorted(member.groups[0]) for member in jaxcomm.communicators())


def test_processes_belong_to_several_sets_at_a_time(team):
    """C1, C2."""
    assert [len(groups) for groups in team.call(overlapping_sets)] == [2, 2, 3, 2]


def on_two_hosts(here):
    """Processes 2 and 3 believe themselves on another host."""
    mesh = here.mesh(4, 2, (2, 4), ("hosts", "devices"))
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        if here.process >= 2:
            patch.setattr(hosts, "_boot_id", lambda: "another")
        jaxcomm.init(mesh, "devices", "hosts")
        jaxcomm.init(mesh, "hosts", lanes="again")
        with pytest.raises(jaxcomm.CommunicatorError) as caught:
            jaxcomm.init(mesh, "hosts", lanes="other", backend="host")
        patch.setenv("JAXCOMM_ELASTIC", "1")
        with pytest.raises(jaxcomm.CommunicatorError, match="The job is elastic, and"):
            jaxcomm.init(mesh, "hosts", lanes="other")
        jaxcomm.init(mesh, "hosts", lanes="chosen", backend="xla")
    check_sum(here, mesh, ("devices",))
    check_sum(here, mesh, ("hosts",))
    within, across, *_ = jaxcomm.communicators()
    assert (within.backend, within.transport) == ("host", "shared memory")
    return across.transport, str(caught.value), said.getvalue()


def test_groups_on_two_hosts_go_through_xla_and_those_on_one_through_memory(team):
    found = team.call(on_two_hosts)
    first, *others = [said for _, _, said in found]
    assert others == [""] * 3
    assert first.startswith("jaxcomm: backend 'host' cannot join processes over axes")
    assert first.count("\n") == first.count("XLA's collectives serve") == 1
    for transport, refusal, _ in found:
        assert transport.startswith("xla: processes ")
        assert "are on 2 hosts" in transport
        assert "backend 'host' cannot join" in refusal


def requests_of_the_store(here):
    """The client's errors are told apart by their texts."""
    store, key = product.of_job((here.process,)), f"test/{here.process}"
    none = store.get(key), store.wait(key, 0.05), store.entries("test/none", [1])
    once = [store.set_once(key, what, here.process) for what in ("one", "two")]
    store.set(f"{key}/5", "five", here.process)
    found = store.get(key), store.wait(key, 60), store.entries(key, [4, 5])
    store.client.key_value_delete(key)
    counts = [store.client.key_value_increment(f"{key}/n", 1) for _ in range(3)]
    return none, once, found, store.get(key), counts


def test_the_store_of_jax_answers_as_the_one_of_other_tests(team):
    for answer in team.call(requests_of_the_store):
        assert answer == [
            [None, None, {}], [True, False], ["one", "one", {"5": "five"}],
            None, [1, 2, 3],
        ]  # fmt: skip
