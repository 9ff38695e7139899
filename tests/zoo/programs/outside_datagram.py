"""A unix datagram socket connected to a server outside, through a socket on a volume (as to a system log)."""

import socket

from common import run

client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
client.connect("/gate/outside.log")
run(lambda n: client.send(b"%d\n" % n))
