"""What a layout costs, before there is a device: see :func:`jaxcomm.plan`."""

from jaxcomm.machine import MACHINES as MACHINES
from jaxcomm.machine import Sample as Sample
from jaxcomm.planning.result import Plan as Plan
