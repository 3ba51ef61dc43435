"""What becomes of each communicator: who shares it, what happens, what is left."""

import threading

import jax
import numpy as np
import pytest
import waiting

import jaxcomm
from jaxcomm.communicator import hosts, replica_groups

pytestmark = pytest.mark.multiprocess

# Processes of each, and the name of its mesh's rows, of which each process has one.
COMMUNICATORS = {
    "own": (None, "i"),
    "pair": ((0, 1), "i"),
    "mesh": ((0, 1, 2), "i"),
    "twin": ((0, 1, 2), "j"),
    "wide": ((0, 1, 2, 3), "i"),
}
KEPT = dict.fromkeys(COMMUNICATORS, "kept")
ANEW = dict.fromkeys(("pair", "mesh", "twin"), "anew")
LOST = KEPT | {"pair": "anew", "mesh": "moved", "twin": "closed", "wide": "closed"}
# What happens, in which processes, and what is left in processes 0 and 1.
TABLE = {
    "init": ([0, 1, 2, 3], KEPT),
    "close the pair": ([0, 1], KEPT | {"pair": "closed"}),
    "finalize": ([0, 1, 2, 3], dict.fromkeys(COMMUNICATORS, "closed")),
    "shrink the pair": ([0, 1], KEPT | {"pair": "anew"}),
    "shrink the mesh": ([0, 1, 2], KEPT | ANEW),
    "without process 2, shrink the mesh": ([0, 1], LOST),
    "without process 2, shrink the mesh and the twin": (
        [0, 1],
        LOST | {"twin": "moved"},
    ),
}


def mesh_of(processes, rows):
    grid = [[d for d in jax.devices() if d.process_index == p] for p in processes]
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.sharding.Mesh(np.array(grid), (rows, "devices"), axis_types=auto)


def make(mesh, lane="default"):
    (member,) = jaxcomm.init(mesh, mesh.axis_names, lanes=lane)
    return member


def sum_over(here, mesh, lane="default"):
    """Return a function that adds over a mesh and checks what comes out."""
    add = here.program(mesh, lambda x: jaxcomm.psum(x, mesh.axis_names, lane=lane))
    x = here.values("int32", (mesh.size, 5), 0)
    operand, total = here.put(mesh, x), x.sum(0, np.int32)

    def check():
        found = here.mine(add(operand))
        here.identical(mesh, found, np.broadcast_to(total, x.shape))

    return check


class Walk:
    """The communicators that this process has a part in, and programs over them."""

    def __init__(self, here):
        self.here, self.meshes, self.sums = here, {}, {}
        for name, (processes, rows) in COMMUNICATORS.items():
            if here.process in (processes := processes or (here.process,)):
                self.meshes[name] = mesh_of(processes, rows)
                self.sums[name] = sum_over(here, self.meshes[name])

    def begin(self):
        jaxcomm.finalize()
        self.made = {name: make(mesh) for name, mesh in self.meshes.items()}
        for check in self.sums.values():
            check()

    def act(self, event):
        if event == "init":
            assert [*map(make, self.meshes.values())] == [*self.made.values()]
        elif event == "finalize":
            jaxcomm.finalize()
        elif event == "close the pair":
            self.made["pair"].close()
        else:
            names = [name for name in self.meshes if f"the {name}" in event]
            return {
                name: jaxcomm.shrink(self.meshes[name], COMMUNICATORS[name][1])
                for name in names
            }
        return {}

    def states(self, shrunk):
        """Say what became of each communicator, and use those that are there."""
        live = {(each.axes, each.groups): each for each in jaxcomm.communicators()}
        found = {}
        for name, before in self.made.items():
            now = live.get((before.axes, before.groups))
            if now is not None:
                found[name] = "anew" if before.closed else "kept"
                assert before.closed == (now is not before)
                self.sums[name]()
                # Its processes still agree who shares memory: one more can be made.
                make(self.meshes[name], "another")
            elif (before.axes, groups_of(shrunk.get(name))) in live:
                found[name] = "moved"
                sum_over(self.here, shrunk[name])()
            else:
                assert before.closed
                found[name] = "closed"
        return found

    def check_closed(self, states):
        """See programs raise whose communicators are gone, which fails all others."""
        for name in [name for name, state in states.items() if state == "closed"]:
            with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as told:
                self.sums[name]()
            assert "is closed or was never created" in str(told.value)


def groups_of(mesh):
    if mesh is None:
        return None
    grid = replica_groups.grid_of(mesh)
    return replica_groups.partition(grid, mesh.axis_names).groups


def walk(here):
    this, found = Walk(here), {}
    for event, (processes, _) in TABLE.items():
        this.begin()
        here.meet(f"all are made: {event}")
        with pytest.MonkeyPatch.context() as patch:
            if "without" in event:
                # It does nothing any more, and stands for one that has ended.
                patch.setattr(hosts, "ended", lambda some, me: {2} & {*some})
            shrunk = this.act(event) if here.process in processes else {}
            if here.process in processes or "without" not in event:
                found[event] = this.states(shrunk)
        here.meet(f"all have used what is left: {event}")
        this.check_closed(found.get(event, {}))
        here.meet(f"all have seen: {event}")
    return found


def test_each_event_leaves_of_each_communicator_what_the_table_says(team):
    for found in team.call(walk)[:2]:
        for event, (_, states) in TABLE.items():
            assert found[event] == states, event


class Sum:
    """A sum over a mesh that a thread waits in; ``told`` has the error, or None."""

    def __init__(self, member, check):
        self.told, self._check = [], check
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        waiting.until(lambda: member.stats()["in_flight"] or self.told)

    def _run(self):
        try:
            self.told.append(self._check())
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            self.told.append(str(error))

    def end(self):
        waiting.joined(self._thread)
        (told,) = self.told
        return told


CLOSED = "was closed while a rank waited in it"


def one_makes_it_anew(here, mesh):
    """Process 0 alone makes it anew. Process 1 sums over the older one."""
    check = sum_over(here, mesh)
    member = make(mesh)
    here.meet("both have one", [0, 1])
    if here.process == 0:
        member.close()
        member = make(mesh)
    adding = Sum(member, check)
    here.meet("both wait, but not for each other", [0, 1])
    assert adding.told == []
    here.meet("both have looked", [0, 1])
    if here.process == 1:
        member.close()
        assert CLOSED in adding.end()
    else:
        assert "refused, since a collective has failed in process 1" in adding.end()
    # Nor in memory of before, where that failure is told.
    jaxcomm.finalize()
    here.meet("both have none", [0, 1])
    make(mesh)
    check()


def test_a_communicator_never_meets_an_older_one_of_its_key(team):
    team.call(one_makes_it_anew, at=(2, 2))
