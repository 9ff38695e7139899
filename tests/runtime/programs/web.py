"""A web server and its client, two processes with one lasting connection. usage: web.py COUNTER FOLDER SEED STEPS"""

import hashlib
import http.client
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from posting import Posting  # type: ignore[import-not-found] # beside this file, which is run by its path

address, folder, seed, steps = sys.argv[1:]
out = Path(folder)
out.mkdir(parents=True, exist_ok=True)


class Handler(BaseHTTPRequestHandler):
    """Answers with the hash of everything that was ever posted."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state = hashlib.sha256(seed.encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.state.update(body)
        answer = f"{self.client_address[1]} {self.state.hexdigest()}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        return


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
child = os.fork()
if child == 0:
    server.serve_forever()
    os._exit(1)
posting = Posting(address)
client = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
server.socket.close()
ports = set()
with (out / "answers.txt").open("w", buffering=1) as answers:
    for step in range(int(steps)):
        client.request("POST", "/", body=f"{step}\n".encode() * 200)
        port, digest = client.getresponse().read().decode().split()
        ports.add(port)
        answers.write(f"{step} {digest}\n")
        print(step, flush=True)
        posting.step(step)
        time.sleep(0.02)
(out / "connections.txt").write_text(f"{len(ports)}\n")
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
for name in ("answers.txt", "connections.txt"):
    posting.file(out / name)
