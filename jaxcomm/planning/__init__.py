"""What a layout costs, before there is a device: see :func:`jaxcomm.plan`."""
