"""The published package's path to the devices of the pool; see `roundpipe.devices`."""

from roundpipe.device.listed import Device as Device
from roundpipe.device.listed import __getattr__ as __getattr__
from roundpipe.device.listed import get_num_devices as get_num_devices
