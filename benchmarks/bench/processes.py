"""Several processes on this host, one device each: ours against gloo and MPI."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from bench import chain, collectives, roofline, targets, timing
from bench.cases import Case, Session
from bench.processes_team import Team
from bench.processes_variants import CHAIN, MEMCPY
from bench.rows import OURS, ProcessesRow
from bench.targets import KIB, MIB

SUITE = "processes"
PROCESSES = (2,)
SIZES = (256, 64 * KIB, MIB, 16 * MIB)
OPS = ("psum", "ppermute", "all_gather", "all_to_all")
# More processes than these share few cores: 16 MiB each would take minutes.
_MOST_WITH_ALL_SIZES = 4
# Seconds of samples, whatever the session allows: 17 cases fit into two minutes.
_BUDGET = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessesCase(Case):
    """One operation in all processes of a team.

    Attributes:
      team: the processes, started when its first case is measured.
      dtype: of the payload.
      payload_bytes: of each process's operand.
      work: bytes that all processes together read and write at least.
      is_last: whether the team may go afterwards.
    """

    team: Team
    dtype: str = "float32"
    payload_bytes: int
    work: float
    is_last: bool = False

    def measure(self, session: Session) -> Sequence[ProcessesRow]:
        try:
            return [self._measure(session)]
        # Also after Ctrl-C: processes that were left in the middle are of no more use.
        except BaseException:
            self.team.stop()
            raise
        finally:
            if self.is_last:
                self.team.stop()

    def _measure(self, session):
        # Half of the roofline's buffers, in every process: still more than caches hold.
        limit = roofline.best(session.rooflines, roofline.BYTES)
        copy_bytes = int(limit.work) // 4
        found, *others = self.team.ask(
            do="prepare",
            name=self.name,
            payload_bytes=self.payload_bytes,
            copy_bytes=copy_bytes,
        )
        if any(other != found for other in others):
            raise RuntimeError(f"ranks have different variants: {[found, *others]}")
        clock = _SlowestProcess(self.team)
        once = {
            name: functools.partial(clock.sample, name, 1) for name in found["variants"]
        }
        effort = session.effort
        calls = {
            name: timing.calls_per_sample(
                {name: call}, seconds=effort.sample_seconds, clock=clock
            )
            for name, call in once.items()
        }
        # Every call of these is a whole sample, of which the clock says the mean.
        samples = timing.interleave(
            {
                name: functools.partial(clock.sample, name, count)
                for name, count in calls.items()
            },
            calls=dict.fromkeys(calls, 1),
            rounds=effort.rounds,
            last=MEMCPY,
            fewest_rounds=effort.fewest_rounds,
            budget=min(effort.budget, _BUDGET),
            clock=clock,
        )
        copied = 2 * copy_bytes * self.team.count
        return self._row(samples, calls, copied, found["absent"])

    def _row(self, samples, calls, copied, absent):
        at_limit = samples.pop(MEMCPY)
        seconds = {name: timing.Quartiles.of(of) for name, of in samples.items()}
        bounds = {
            peer: targets.for_processes(
                self.name, self.payload_bytes, self.devices, peer
            )
            for peer in (*samples, *absent)
        }
        return ProcessesRow(
            suite=self.suite,
            name=self.name,
            devices=self.devices,
            detail=self.team.peers,
            dtype=self.dtype,
            payload_bytes=self.payload_bytes,
            seconds=seconds,
            ratios={
                name: timing.median_ratio(of, samples[OURS])
                for name, of in samples.items()
                if name != OURS and OURS in samples
            },
            unit=roofline.BYTES,
            work=self.work,
            rates={name: self.work / of.median for name, of in seconds.items()},
            roofline="memcpy in every process",
            roofline_rate=copied / timing.Quartiles.of(at_limit).median,
            shares={
                name: self.work / copied * timing.median_ratio(at_limit, of)
                for name, of in samples.items()
            },
            calls=calls.get(OURS, 0),
            calls_of={name: count for name, count in calls.items() if name != MEMCPY},
            rounds=len(at_limit),
            targets={peer: bound for peer, bound in bounds.items() if bound},
            absent=absent,
        )


class _SlowestProcess:
    """A clock that stands still but for samples, of which the slowest rank's counts."""

    def __init__(self, team):
        self._team = team
        self._now = 0.0

    def __call__(self):
        return self._now

    def sample(self, variant, calls):
        replies = self._team.ask(do="sample", variant=variant, calls=calls)
        self._now += max(reply["seconds"] for reply in replies)


def cases(
    processes: Sequence[int] = PROCESSES,
    sizes: Sequence[int] | None = None,
    ops: Sequence[str] = OPS,
) -> Iterator[ProcessesCase]:
    """Yield a case for each op and size, then the chain, for each number of processes.

    Args:
      processes: how many take part, at a time.
      sizes: bytes of each process's operand, rounded up to whole slices. If None,
        ``SIZES``, without the largest for more than four processes.
      ops: keys of ``collectives.OPS``.
    """
    for count in processes:
        few = count <= _MOST_WITH_ALL_SIZES
        asked = sizes or (SIZES if few else SIZES[:-1])
        team = Team(count)
        for size in asked:
            # An element of four bytes for every rank, or several.
            size = -(-size // (4 * count)) * 4 * count
            for name in ops:
                yield ProcessesCase(
                    suite=SUITE,
                    name=name,
                    devices=count,
                    team=team,
                    dtype=collectives.OPS[name].dtype,
                    payload_bytes=size,
                    work=count * size * (1 + collectives.OPS[name].growth(count)),
                )
        yield ProcessesCase(
            suite=SUITE,
            name=CHAIN,
            devices=count,
            team=team,
            payload_bytes=chain.PAYLOAD_BYTES,
            work=2 * chain.LENGTH * count * chain.PAYLOAD_BYTES,
            is_last=True,
        )
