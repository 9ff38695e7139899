"""A socket to the hypervisor (AF_VSOCK), as agents of virtual machines have."""

import socket

from common import run

made = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
run(lambda n: made.fileno())
