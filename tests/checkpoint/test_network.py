"""The private network: the same inside everywhere, a way outward, no way to the instance's credentials, and nothing left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from savedworker.checkpoint import network, tools
from savedworker.checkpoint.network import (
    GATEWAY,
    INNER,
    INNER6,
    Endpoint,
    PrivateNetwork,
    Redirect,
    write_resolv_conf,
)

_CLONE_NEWNET = 0x40000000
pytestmark = pytest.mark.criu


def on_an_instance(story: Callable[[], None]) -> None:
    """Run ``story`` in a thread with a network of its own, as an instance has: nothing of this machine's is touched."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            assert ctypes.CDLL(None).unshare(_CLONE_NEWNET) == 0
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            story()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def private() -> Iterator[PrivateNetwork]:
    made = PrivateNetwork(f"swk-test-{os.getpid()}")
    made.create()
    try:
        yield made
    finally:
        made.remove()


def inside(made: PrivateNetwork, *command: str) -> str:
    done = subprocess.run(
        ["ip", "netns", "exec", made.name, *command], capture_output=True, text=True, check=True
    )
    return done.stdout


class Client:
    """A process in the network that connects and waits."""

    def __init__(self, made: PrivateNetwork, *addresses: tuple[str, int]) -> None:
        program = "import socket, sys\nkept = [socket.create_connection(a) for a in eval(sys.argv[1])]\nprint('connected', flush=True)\nsys.stdin.readline()\nfor s in kept:\n    try:\n        print('EOF' if s.recv(10) == b'' else 'data', flush=True)\n    except OSError as error:\n        print(type(error).__name__, flush=True)\n"
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", made.name, "/usr/bin/python3", "-c", program, repr(list(addresses))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "connected\n"

    def ends(self) -> list[str]:
        """How each connection ended, by the client."""
        return self.process.communicate("go\n", timeout=30)[0].splitlines()


def test_addresses_and_routes_are_the_same_everywhere_and_nothing_is_left() -> None:
    def story() -> None:
        with private() as made:
            addresses = inside(made, "ip", "-o", "addr")
            assert f"{INNER}/30" in addresses
            assert f"{INNER6}/64" in addresses
            assert not [x for x in addresses.splitlines() if INNER6 in x and "tentative" in x]
            assert f"default via {GATEWAY}" in inside(made, "ip", "route")
            assert "02:5a:7e:0d:00:02" in inside(made, "ip", "link")
        assert not made.path.exists()
        assert (
            "sw-worker"
            not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
        )
        assert (
            "savedworker"
            not in subprocess.run(
                ["nft", "list", "tables"], capture_output=True, text=True, check=True
            ).stdout
        )
        made.remove()
        with private():
            pass  # and at once again

    on_an_instance(story)


ANOTHER = """
import sys
from savedworker.checkpoint.network import PrivateNetwork
from savedworker.model.errors import Fatal
made = PrivateNetwork(sys.argv[1])
try:
    made.create()
    print("created", flush=True)
except Fatal as error:
    print(error)
finally:
    made.remove()
"""


def another_agent(*before: str) -> str:
    """What comes of another process that creates its private network on the same instance, and removes it."""
    command = [*before, sys.executable, "-c", ANOTHER, f"swk-test-{os.getpid()}-other"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_second_worker_on_an_instance_is_refused_and_the_first_keeps_its_network() -> None:
    """Two jobs of AWS Batch on one machine have its network, and so has a bench beside a worker."""

    def story() -> None:
        with socket.create_server(("0.0.0.0", 80)), private() as made:
            for _ in range(2):
                assert another_agent().startswith("another worker has the private network")
            assert ask(made, GATEWAY) == "reached\n"
            tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True)
            assert "savedworker" in tables.stdout

    on_an_instance(story)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("container", [True, False])
def test_a_worker_whose_agent_was_killed_keeps_its_network(again: bool, container: bool) -> None:
    """Its agent is started again, and claims it; before that moment, too. Another one may be in another container, which sees neither names nor processes."""
    hides = 'mount -t tmpfs none /run && exec "$@"'
    before = ("unshare", "--mount", "--pid", "--fork", "sh", "-c", hides, "sh") if container else ()

    def story() -> None:
        name = f"swk-test-{os.getpid()}-left"
        done = subprocess.run([sys.executable, "-c", KILLED, name], check=False)
        assert done.returncode == -signal.SIGKILL
        worker = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "1000"])
        left = PrivateNetwork(name)
        try:
            while "sleep" not in Path(f"/proc/{worker.pid}/comm").read_text():
                pass  # it has not entered the namespace before
            if again:
                assert network.claim(name)
            assert another_agent(*before).startswith("another worker has the private network")
            with socket.create_server(("0.0.0.0", 80)):
                assert ask(left, GATEWAY) == "reached\n"
        finally:
            worker.kill()
            worker.wait()
            left.remove()
        assert another_agent(*before) == "created\n" or again  # else this process has the claim

    on_an_instance(story)


KILLED = """
import os, signal, sys
from savedworker.checkpoint.network import PrivateNetwork
PrivateNetwork(sys.argv[1]).create()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("removed", [True, False])
def test_what_a_killed_agent_leaves_is_in_nobodys_way(removed: bool) -> None:
    """The next one takes it away, or at least makes its own."""

    def story() -> None:
        name = f"swk-test-{os.getpid()}-killed"
        done = subprocess.run([sys.executable, "-c", KILLED, name], check=False)
        assert done.returncode == -signal.SIGKILL
        left = PrivateNetwork(name)
        try:
            assert left.path.exists()
            if removed:
                left.remove()
            with private() as made, socket.create_server(("0.0.0.0", 80)):
                left.remove()
                assert ask(made, GATEWAY) == "reached\n"
        finally:
            left.remove()

    on_an_instance(story)


def test_connections_that_leave_are_destroyed_at_both_ends_and_those_inside_are_left_alone() -> None:
    def story() -> None:
        with socket.create_server(("0.0.0.0", 8080)) as outside, private() as made:
            server = subprocess.Popen(
                ["ip", "netns", "exec", made.name, "/usr/bin/python3", "-c", "import socket, sys\ns = socket.create_server(('', 9090))\nprint('ready', flush=True)\nc, _ = s.accept()\nsys.stdin.readline()\nc.sendall(b'hi')\nc.recv(1)\n"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            assert server.stdout is not None
            server.stdout.readline()
            client = Client(made, (GATEWAY, 8080), (INNER, 9090))
            peer, _ = outside.accept()
            assert [line.split(" -> ")[1] for line in made.outbound()] == [f"{GATEWAY}:8080"]
            assert len(made.destroy_outbound([client.process.pid])) == 1
            assert made.outbound() == []
            assert made.destroy_outbound([client.process.pid]) == []
            with pytest.raises(ConnectionResetError):
                peer.recv(10)
            assert server.stdin is not None
            server.stdin.write("go\n")
            server.stdin.flush()
            assert client.ends() == ["ConnectionAbortedError", "data"]
            server.communicate()

    on_an_instance(story)


def test_where_the_kernel_cannot_destroy_sockets_they_are_disconnected_through_their_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_destroy(argv: list[str | Path], check: bool = True) -> subprocess.CompletedProcess[str]:
        return tools.run(["true"] if "-KHtn" in argv else argv, check=check)

    monkeypatch.setattr(network, "run", without_destroy)

    def story() -> None:
        with socket.create_server(("0.0.0.0", 8080)) as outside, private() as made:
            client = Client(made, (GATEWAY, 8080))
            peer, _ = outside.accept()
            assert len(made.destroy_outbound([client.process.pid])) == 1
            with pytest.raises(ConnectionResetError):
                peer.recv(10)
            assert client.ends() == ["ConnectionResetError"]

    on_an_instance(story)


@pytest.mark.parametrize(
    ("address", "is_inside"),
    [
        ("127.0.0.1:80", True),
        ("[::1]:80", True),
        ("[::ffff:127.0.0.1]:80", True),
        (f"{INNER}:80", True),
        (f"[{INNER6}]:80", True),
        (f"[::ffff:{INNER}]:80", True),
        (f"{GATEWAY}:80", False),
        ("10.0.0.1:80", False),
        ("[2001:db8::1]:80", False),
        ("[::ffff:10.0.0.1]:80", False),
        ("[fe80::1%eth0]:80", False),
    ],
)
def test_what_is_inside(address: str, is_inside: bool) -> None:
    assert network._inside(address) is is_inside


def test_the_resolver_file_names_the_fixed_address_and_how_this_instance_completes_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, made = tmp_path / "given", tmp_path / "made"
    monkeypatch.setattr(network, "_UPSTREAM_DNS", given)
    given.write_text(
        "# made by hand\nsearch example.org\nnameserver 127.0.0.53\nnameserver 10.0.0.2\noptions ndots:1\n"
    )
    write_resolv_conf(made)
    assert made.read_text() == f"nameserver {GATEWAY}\nsearch example.org\noptions ndots:1\n"
    given.unlink()
    write_resolv_conf(made)
    assert made.read_text() == f"nameserver {GATEWAY}\n"


@pytest.mark.parametrize("address", ["169.254.169.254", "169.254.170.2", "169.254.170.23"])
def test_what_only_the_instance_should_know_is_out_of_reach(address: str) -> None:
    def story() -> None:
        subprocess.run(["ip", "addr", "add", f"{address}/32", "dev", "lo"], check=True)
        with socket.create_server(("0.0.0.0", 80)), private() as made:
            assert ask(made, address) == "ConnectionRefusedError\n"
            with socket.create_connection((address, 80), timeout=10):
                pass  # this instance itself reaches it

    on_an_instance(story)


def test_a_fixed_address_leads_to_a_port_of_this_end_until_it_is_led_elsewhere() -> None:
    def story() -> None:
        endpoint = Endpoint("169.254.170.2", 80)
        with private() as made, socket.create_server((GATEWAY, 0)) as one, socket.create_server((GATEWAY, 0)) as two:  # fmt: skip
            assert ask(made, endpoint.address) != "reached\n"
            for server in (one, two):
                made.redirect([Redirect(endpoint, "tcp", server.getsockname()[1])])
                assert ask(made, endpoint.address) == "reached\n"
                server.settimeout(10)
                connection, (peer, _) = server.accept()
                connection.close()
                assert peer == INNER
            made.redirect([])
            assert ask(made, endpoint.address) != "reached\n"

    on_an_instance(story)


def ask(made: PrivateNetwork, address: str) -> str:
    """How a connection to port 80 of ``address`` goes, from inside."""
    program = f"import socket\ntry:\n    socket.create_connection(({address!r}, 80), timeout=10)\n    print('reached')\nexcept OSError as error:\n    print(type(error).__name__)\n"
    return inside(made, "/usr/bin/python3", "-c", program)
