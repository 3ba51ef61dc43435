"""Failures that cross hosts, through the key-value store of ``jax.distributed``.

On its own host a process sees another one end. Of other hosts it sees nothing: its
collectives would wait until they time out, with "not done" for a cause. Instead one
thread of each process publishes the process's first failure in the store, and looks
there for failures of others.

A world is a communicator of a whole mesh. Its name, here NCCL's unique id, is new for
each one that is made and the same on all of its processes. A world has one entry at
most, ``jaxcomm/failures/<world>``: the store takes the first. So processes that share
no world do not fail each other, old failures do not reach a world that is made anew,
and a look takes no longer the more processes fail.
"""

import dataclasses
import functools
import hashlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping

import jax

from jaxcomm._built import _ffi
from jaxcomm.communicator import forks, hosts, settling
from jaxcomm.communicator.store import EntryError, Store, not_ours, of_job, unseal

_FOLDER = "jaxcomm/failures"
# A look into this process takes a microsecond.
_TICK_SECONDS = 0.1
# A look into the store is one message of every process to the coordinator.
_POLL_SECONDS = 0.3
# A store that does not answer for so long is gone. XLA then ends the process itself.
_GIVE_UP_SECONDS = 10.0
# The store answers within milliseconds. The end of the process must not wait for a
# coordinator that has ended.
_JOIN_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, order=True)
class Failure:
    """The first failure of a process.

    Attributes:
      order: 1-based position among the failures of the job; the store counts.
      process: where it happened, as JAX numbers processes.
      text: what happened.
    """

    order: int
    process: int
    text: str


class FailureWatch:
    """Tells other processes of this one's first failure, and this one of theirs.

    Args:
      store: of the job.
      process: this process, as JAX numbers them.
      first_failure: returns the text of the first failure of the worlds that this
        process has now, ``""`` if none failed.
      fail_worlds: is called once, with the first cause, when another process that
        shares a world failed and this one did not. It must not raise.
      ends: returns the statuses of processes that have ended, as the launcher tells.
      tick: seconds between looks into this process.
      interval: seconds between looks into the store.
      give_up: seconds after which a store that does not answer is gone.
    """

    def __init__(
        self,
        store: Store,
        process: int,
        first_failure: Callable[[], str],
        fail_worlds: Callable[[str], object],
        ends: Callable[[], Mapping[int, int]] = lambda: {},
        *,
        tick: float = _TICK_SECONDS,
        interval: float = _POLL_SECONDS,
        give_up: float = _GIVE_UP_SECONDS,
    ):
        self.store = store
        self._process = process
        self._first_failure = first_failure
        self._fail_worlds = fail_worlds
        self._ends = ends
        self._tick = tick
        self._interval = interval
        self._give_up = give_up
        self._changed = threading.Condition()
        # What follows requires _changed. No call of the store is made under its lock.
        self._worlds: dict[str, Callable[[], object]] = {}
        self._endings: dict[str, Callable[[], object]] = {}
        self._processes: dict[str, tuple[int, ...]] = {}
        # A failure that older worlds had; that of a new one differs, or comes after "".
        self._known = ""
        self._stopping = False
        self._thread: threading.Thread | None = None

    def watch(
        self,
        world: str,
        alive: Callable[[], object] = lambda: True,
        on_end: Callable[[], object] = lambda: None,
        processes: tuple[int, ...] = (),
    ) -> None:
        """Watch one more world.

        Args:
          world: its name, the same on all of its processes and on no other world.
          alive: returns None once the world is gone, as a weak reference does.
          on_end: is called once, when it has failed in this process, or is gone. It
            must not raise.
          processes: that share it. If one fails and ends, so do all.
        """
        with self._changed:
            self._prune()
            if not self._worlds:
                self._known = self._first_failure()
            self._worlds[world] = alive
            self._endings[world] = on_end
            self._processes[world] = processes
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="jaxcomm-failures", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread. What this process has to tell, it tells first."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def is_running(self) -> bool:
        """Return whether the thread is there."""
        with self._changed:
            return self._thread is not None

    def _run(self):
        polled = float("-inf")
        silent_since = None
        while True:
            with self._changed:
                # Nobody asks the store while there is no world.
                if not self._stopping:
                    self._changed.wait(self._tick if self._worlds else None)
                now = time.monotonic()
                is_gone = (
                    silent_since is not None and now - silent_since > self._give_up
                )
                is_last = self._stopping or is_gone
                if is_last:
                    # A later watch() starts another thread.
                    self._thread = None
                news = self._news()
                # Before worlds that are gone leave the list: they may have failed.
                worlds = list(self._worlds)
                self._prune()
            if worlds and not news:
                self._see_ends(worlds)
            polls = not news and not is_last and now - polled >= self._interval
            if worlds and (news or polls):
                try:
                    if news:
                        self._publish(worlds, news)
                    else:
                        polled = now
                        self._hear(worlds)
                    silent_since = None
                except Exception:
                    # The store goes with the job, at any time. XLA reports that.
                    silent_since = now if silent_since is None else silent_since
            self._end(is_last)
            if is_last:
                return

    def _news(self) -> str:
        """Return a failure that others have not been told of. Requires ``_changed``."""
        text = self._first_failure()
        if not text:
            self._known = ""
        return text if text != self._known else ""

    def _publish(self, worlds, text):
        """Tell the other processes of some worlds, and watch these worlds no more."""
        order = int(self.store.client.key_value_increment(f"{_FOLDER}-count", 1))
        failure = dataclasses.asdict(Failure(order, self._process, text))
        for world in worlds:
            self.store.set_once(f"{_FOLDER}/{world}", failure, self._process)
        self._forget(worlds)
        with self._changed:
            self._known = text

    def _hear(self, worlds):
        """Fail the worlds of this process if another process failed in one of them.

        That is a failure of this process, too: processes that share a world with this
        one, but not with the other, are told in turn.
        """
        found = []
        for key, text in self.store.client.key_value_dir_get(f"{_FOLDER}/"):
            world = key.removeprefix(f"{_FOLDER}/")
            if world in worlds:
                found.append((_failure(key, text), world))
        if found:
            first = min(found)[0]
            self._forget(world for _, world in found)
            who = "a process" if first.process < 0 else f"process {first.process}"
            self._fail_worlds(f"{who} failed first: {first.text}")

    def _see_ends(self, worlds):
        """Fail the worlds of which a process has failed and ended, on any host."""
        ended = {process for process, status in self._ends().items() if status}
        with self._changed:
            lost = {w: ended.intersection(self._processes.get(w, ())) for w in worlds}
        lost = {world: some for world, some in lost.items() if some}
        if lost:
            self._forget(lost)
            first = min(min(some) for some in lost.values())
            self._fail_worlds(f"process {first} has ended")

    def _forget(self, worlds):
        with self._changed:
            for world in worlds:
                self._worlds.pop(world, None)

    def _prune(self):
        """Drop worlds that are gone. Requires ``_changed``."""
        for world in [w for w, alive in self._worlds.items() if alive() is None]:
            del self._worlds[world]

    def _end(self, is_last):
        """Call ``on_end`` of worlds that are watched no more; at the end, of all."""
        with self._changed:
            ended = [w for w in self._endings if is_last or w not in self._worlds]
            endings = [self._endings.pop(world) for world in ended]
            for world in ended:
                self._processes.pop(world, None)
        for on_end in endings:
            on_end()


def _failure(key: str, text: str) -> Failure:
    """Return what a process wrote of its failure, or that this cannot be read."""
    try:
        match unseal(key, text):
            case {"order": int(order), "process": int(process), "text": str(said)}:
                return Failure(order, process, said)
        raise not_ours(key, text)
    except EntryError as error:
        # Processes write there only when they fail. One that says why counts first.
        return Failure(sys.maxsize, -1, str(error))


_lock = threading.Lock()
_watch: FailureWatch | None = None


def watch(
    unique_id: str,
    world: "_ffi.NcclWorld",
    processes: tuple[int, ...],
    settles: bool,
) -> None:
    """Watch a world that several processes share, until it is collected.

    Args:
      unique_id: of NCCL, in hexadecimal digits.
      world: the communicator of the whole mesh.
      processes: those that share it.
      settles: whether it is stopped only once all of them expect that.
    """
    global _watch
    store = of_job(processes)
    with _lock:
        if _watch is None or _watch.store is not store:
            _watch = FailureWatch(
                store,
                jax.process_index(),
                _ffi.first_failure,
                _ffi.fail_worlds,
                hosts.told_ends,
            )
        name = hashlib.sha256(unique_id.encode()).hexdigest()[:32]
        me, health = jax.process_index(), world.health
        settle = functools.partial(settling.settle, store, name, me, processes, health)
        on_end = settle if settles else lambda: None
        _watch.watch(name, weakref.ref(world), on_end, processes)


def stop() -> None:
    """Stop watching; the next :func:`watch` starts anew."""
    global _watch
    with _lock:
        stopped, _watch = _watch, None
    if stopped is not None:
        stopped.stop()


def _leave_to_parent():
    # A child of os.fork() has no thread, and perhaps a lock that the thread held.
    global _lock, _watch
    _lock, _watch = threading.Lock(), None


forks.in_child(_leave_to_parent)
