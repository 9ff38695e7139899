"""The worker's private network: the same inner address on every instance, and a way outward.

Connections inside the worker survive a migration because their addresses are the same everywhere. Those that leave it
cannot: they are destroyed while the worker is frozen, so that both ends learn it at once instead of hanging.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from savedworker.checkpoint.tools import need, run
from savedworker.model.errors import Fatal

GATEWAY = "198.19.255.1"
INNER = "198.19.255.2"
GATEWAY6 = "fd5a:7e0d::1"
INNER6 = "fd5a:7e0d::2"
_MAC = "02:5a:7e:0d:00:02"
_LINK = "sw-worker"
_CLAIM = "\0savedworker-network"
"""An abstract address: of each network namespace its own."""
_TABLE = "savedworker_worker"
_UPSTREAM_DNS = Path("/etc/resolv.conf")
_METADATA = ("169.254.169.254", "169.254.170.2", "169.254.170.23")
_METADATA6 = ("fd00:ec2::254", "fd00:ec2::23")
"""Where clouds tell an instance, or a container on it, what only that should know: EC2 and Google; ECS; EKS."""


@dataclass(frozen=True)
class Endpoint:
    """A fixed inner address at which the agent serves something. Never changed: frozen processes know it."""

    address: str
    port: int
    protocols: tuple[str, ...] = ("tcp",)


NAMESERVER = Endpoint(GATEWAY, 53, ("udp", "tcp"))
CREDENTIALS = Endpoint("169.254.170.2", 80)
"""The address to which every AWS SDK adds AWS_CONTAINER_CREDENTIALS_RELATIVE_URI."""
CREDENTIALS_PATH = "/savedworker/credentials"


@dataclass(frozen=True)
class Redirect:
    """What the worker sends to ``endpoint`` over ``protocol`` goes to the port ``to`` of GATEWAY."""

    endpoint: Endpoint
    protocol: str
    to: int


_claims: dict[int, socket.socket] = {}
"""Of this process, by network namespace: they go with it."""


def claim(name: str = "") -> bool:
    """Claim this instance's link and rules for this process. False when another has them, or a worker other than that in the namespace ``name``.

    Raises Fatal when that cannot be seen.
    """
    here = os.stat("/proc/thread-self/ns/net").st_ino
    if here not in _claims:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            made.bind(_CLAIM)
        except OSError as error:
            made.close()
            if error.errno != errno.EADDRINUSE:
                raise Fatal(f"the private network cannot be claimed: {error.strerror}") from error
            return False
        _claims[here] = made
    there = _leads_to()
    if there is None or name in there:
        return True
    # Without a name it is another container's. What a killed agent left has a name, and nothing runs in it.
    ip = need("ip", "iproute2")
    return bool(there) and not any(run([ip, "netns", "pids", x], check=False).stdout.strip() for x in there)


def _leads_to() -> list[str] | None:
    """The name of the namespace to which the link leads, if it is one that can be seen from here; None without a link. Raises Fatal."""
    try:
        socket.if_nametoindex(_LINK)
    except OSError:
        return None
    ip = need("ip", "iproute2")
    try:
        links = json.loads(run([ip, "-json", "link", "show", _LINK], check=False).stdout or "[]")
        spaces = json.loads(run([ip, "-json", "netns", "list"], check=False).stdout or "[]")
        numbers = {x["link_netnsid"] for x in links if "link_netnsid" in x}
        return [x["name"] for x in spaces if x.get("id") in numbers] if links else None
    except (ValueError, KeyError, TypeError) as error:
        raise Fatal(f"ip does not say what the link {_LINK} leads to: {error}") from error


class PrivateNetwork:
    """A network namespace joined to this instance's by a veth pair and address translation. One per instance.

    Link and rules have fixed names: they are those of the process that has the claim, or of the worker that runs with them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = Path("/run/netns") / name
        self._made = False

    def create(self) -> None:
        """Make the namespace, its link and the translation rules. Raises Fatal; undoes what it did then."""
        ip = need("ip", "iproute2")
        if not claim():
            raise Fatal(
                "another worker has the private network of this instance: there is one",
                "run one worker at a time on an instance, or give it --network host",
            )
        try:
            self._remove(True)  # of an agent that was killed
            self.path.parent.mkdir(parents=True, exist_ok=True)  # an image may have no /run
            run([ip, "netns", "add", self.name])
            inside: tuple[str | Path, ...] = (ip, "-n", self.name)
            run([*inside, "link", "set", "lo", "up"])
            run([ip, "link", "add", _LINK, "type", "veth", "peer", "name", "eth0", "netns", self.name])
            self._made = True
            run([ip, "addr", "add", f"{GATEWAY}/30", "dev", _LINK])
            run([ip, "link", "set", _LINK, "up"])
            run([*inside, "link", "set", "eth0", "address", _MAC])
            run([*inside, "addr", "add", f"{INNER}/30", "dev", "eth0"])
            run([*inside, "link", "set", "eth0", "up"])
            run([*inside, "route", "add", "default", "via", GATEWAY])
            if Path("/proc/net/if_inet6").exists():
                run([ip, "addr", "add", f"{GATEWAY6}/64", "dev", _LINK, "nodad"])
                run([*inside, "addr", "add", f"{INNER6}/64", "dev", "eth0", "nodad"])
                run([*inside, "-6", "route", "add", "default", "via", GATEWAY6])
                Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            self._translate()
        except (Fatal, OSError) as error:
            self.remove()
            if isinstance(error, Fatal):
                raise
            raise Fatal(
                f"the worker's network cannot be set up: {error}", "run doctor; --network host does without"
            ) from error

    @staticmethod
    def _translate() -> None:
        """Masquerade what leaves; keep the worker from this instance's metadata service (its credentials)."""
        guards = (
            f'  iifname "{_LINK}" ip daddr {{ {", ".join(_METADATA)} }} reject\n'
            f'  iifname "{_LINK}" ip6 daddr {{ {", ".join(_METADATA6)} }} reject\n'
        )
        _load(
            f"table inet {_TABLE} {{\n"
            f" chain out {{ type nat hook postrouting priority srcnat;\n"
            f"  ip saddr {INNER} masquerade\n  ip6 saddr {INNER6} masquerade\n }}\n"
            f" chain inner {{ type nat hook prerouting priority dstnat; }}\n"
            f" chain guard {{ type filter hook forward priority filter;\n{guards} }}\n"
            f" chain guard_local {{ type filter hook input priority filter;\n{guards} }}\n"
            "}\n"
        )

    def redirect(self, rules: Sequence[Redirect]) -> None:
        """Lead these fixed addresses to ports of this end of the link, instead of what was led there before. Raises Fatal.

        By translation, since a listener inside would be in the way of the worker's own, and one on the address itself would
        hide a service of that address which this instance needs.
        """
        _load(
            f"flush chain inet {_TABLE} inner\n"
            + "".join(
                f'add rule inet {_TABLE} inner iifname "{_LINK}" ip daddr {rule.endpoint.address} '
                f"{rule.protocol} dport {rule.endpoint.port} redirect to :{rule.to}\n"
                for rule in rules
            )
        )

    def remove(self) -> None:
        """Take everything away again; nothing happens when it is gone, or is another's."""
        self._remove(self._made or self.name in (_leads_to() or ()))
        self._made = False

    def _remove(self, link: bool) -> None:
        """Take the namespace away, and with ``link`` what leads there."""
        ip = need("ip", "iproute2")
        if self.path.exists():
            run([ip, "netns", "delete", self.name], check=False)
        if link:
            # The kernel takes its time to clean a namespace up; the name of the link is needed again at once.
            run([ip, "link", "delete", _LINK], check=False)
            with contextlib.suppress(Fatal):
                run([need("nft", "nftables"), "delete", "table", "inet", _TABLE], check=False)

    def outbound(self) -> list[str]:
        """The TCP connections that leave the worker, as ``local -> peer``."""
        return [
            f"{local} -> {peer}"
            for state, local, peer in self._connections()
            if not _inside(peer) and state != "TIME-WAIT"
        ]

    def _connections(self) -> list[tuple[str, str, str]]:
        """State, own and other address of every end of a TCP connection."""
        listing = run([*self._ss(), "-Htn", *_FILTER])
        lines = map(str.split, listing.stdout.splitlines())
        return [(words[0], words[3], words[4]) for words in lines if len(words) >= 5]

    def _ss(self) -> tuple[str | Path, ...]:
        return (need("ip", "iproute2"), "netns", "exec", self.name, need("ss", "iproute2"))

    def destroy_one_sided(self) -> int:
        """After a restore: destroy each connection inside the worker whose other end did not come back; how many.

        CRIU does not save a connection that waits in a listener's queue to be accepted, but it does save the client's end,
        which would wait for ever (seen with 4.2.1). Destroyed, its next use fails with ECONNABORTED, and it connects again.
        """
        ends = self._connections()
        there = {(_normal(local), _normal(peer)) for _, local, peer in ends}
        gone = [
            (local, peer)
            for state, local, peer in ends
            if state in ("ESTAB", "FIN-WAIT-1", "FIN-WAIT-2")
            and _inside(peer)
            and (_normal(peer), _normal(local)) not in there
        ]
        for local, peer in gone:
            run([*self._ss(), "-KHtn", *_FILTER, "src", local, "dst", peer], check=False)
        return len(gone)

    def destroy_outbound(self, pids: list[int]) -> list[str]:
        """Destroy every connection that leaves the worker: its next use fails and the peer gets a reset.

        Needs CONFIG_INET_DIAG_DESTROY; what is left after it is disconnected through the processes ``pids`` that have
        it open. Returns the connections that there were. Raises Fatal when some survive both.
        """
        found = self.outbound()
        if not found:
            return []
        peers = {line.rsplit(" -> ", 1)[1] for line in found}
        for peer in sorted(peers):
            run([*self._ss(), "-KHtn", *_FILTER, "dst", peer], check=False)
        if self.outbound():
            _disconnect(pids, _leaves)
        left = self.outbound()
        if left:
            raise Fatal(f"outside connections could not be destroyed: {', '.join(left[:3])}")
        return found


_FILTER = ["state", "connected"]


def _load(rules: str) -> None:
    """Have nft execute ``rules``, all or none of them. Raises Fatal."""
    file = Path(f"/run/savedworker-{os.getpid()}.nft")
    file.write_text(rules)
    try:
        run([need("nft", "nftables"), "-f", file])
    finally:
        file.unlink()


def _inside(address: str) -> bool:
    host = address.rsplit(":", 1)[0].strip("[]").split("%")[0]
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return True
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = mapped or parsed
    return parsed.is_loopback or parsed.is_unspecified or str(parsed) in (INNER, INNER6)


def _normal(address: str) -> str:
    """An address as ss writes it, the same for both ends: one may say v4 and the other v4 within v6."""
    return (
        address.replace("[::ffff:", "", 1).replace("]", "", 1) if address.startswith("[::ffff:") else address
    )


_SYS_PIDFD_GETFD = 438


def reset_all(pids: list[int]) -> int:
    """Without a network of its own no connection of a worker survives: reset them all, through the processes ``pids``.

    On the instance that it leaves, so that peers see a reset and no clean end. On the next one CRIU has shut the sockets
    down, which reads like a clean end too; after this they answer ENOTCONN. Returns how many there were.
    """
    return _disconnect(pids, lambda sock: _connected(sock) or _shut_down(sock))


def _connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _shut_down(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return any(events & select.POLLRDHUP for _, events in poll.poll(0))


def _leaves(sock: socket.socket) -> bool:
    try:
        return not _inside("{}:{}".format(*sock.getpeername()[:2]))
    except OSError:
        return False


def _disconnect(pids: list[int], wanted: Callable[[socket.socket], bool]) -> int:
    """connect(AF_UNSPEC) on every TCP socket of ``pids`` that is ``wanted``: works where the kernel cannot destroy sockets."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = 0
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
            names = [x for x in os.listdir(f"/proc/{pid}/fd") if _is_socket(pid, x)]
        except OSError:
            continue
        try:
            for name in names:
                fd = libc.syscall(_SYS_PIDFD_GETFD, pidfd, int(name), 0)
                if fd < 0:
                    continue
                with socket.socket(fileno=fd) as sock:
                    if (
                        sock.family not in (socket.AF_INET, socket.AF_INET6)
                        or sock.type != socket.SOCK_STREAM
                    ):
                        continue
                    if wanted(sock) and libc.connect(fd, ctypes.create_string_buffer(16), 16) == 0:
                        done += 1
        finally:
            os.close(pidfd)
    return done


def _is_socket(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    except OSError:
        return False


_KEPT = ("search", "domain", "options")


def write_resolv_conf(target: Path) -> None:
    """The resolver file for the worker: the agent's forwarder, and how this instance completes names."""
    try:
        given = _UPSTREAM_DNS.read_text(errors="replace").splitlines()
    except OSError:
        given = []
    kept = [line for line in given if line.split()[:1] and line.split()[0] in _KEPT]
    target.write_text("\n".join([f"nameserver {NAMESERVER.address}", *kept]) + "\n")
