"""The schedules that can be asked for by name."""

from jaxcomm.attention.schedules.contiguous import Contiguous
from jaxcomm.attention.schedules.schedule import Schedule
from jaxcomm.attention.schedules.striped import Striped
from jaxcomm.attention.schedules.zigzag import Zigzag

# A new schedule is one file and one entry here.
SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Contiguous(),
        Striped(),
        Zigzag(),
    )
}


def get_schedule(schedule: str | Schedule) -> Schedule:
    """Return the schedule of that name, or the argument if it is one already.

    Args:
      schedule: ``"contiguous"``, ``"striped"``, ``"zigzag"`` or a :class:`Schedule`.

    Raises:
      ValueError: no schedule has that name.
      TypeError: the argument is neither a name nor a schedule.

    >>> get_schedule("zigzag").name
    'zigzag'
    """
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str):
        raise TypeError(
            f"schedule={schedule!r} is of type {type(schedule).__name__}. Pass one of "
            f"{', '.join(map(repr, SCHEDULES))} or an instance of Schedule."
        )
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule={schedule!r} is not known. Pass one of "
            f"{', '.join(map(repr, SCHEDULES))}, or an instance of Schedule."
        )
    return SCHEDULES[schedule]
