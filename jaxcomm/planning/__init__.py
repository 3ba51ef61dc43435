"""What a layout costs, before there is a device: see :func:`jaxcomm.plan`."""

from jaxcomm.machine import MACHINES as MACHINES
from jaxcomm.planning.plan import Plan as Plan
