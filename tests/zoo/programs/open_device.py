"""A device that was handed in as a volume and is open (as /dev/kvm or an accelerator)."""

import os

from common import run

device = os.open("/dev/fuse", os.O_RDWR)
run(lambda n: os.fstat(device))
