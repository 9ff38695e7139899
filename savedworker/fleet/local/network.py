"""The hosts' network: a bridge in the root namespace, one address per host from 198.18.0.0/16, and a way outward.

198.18.0.0/15 is reserved for tests of devices (RFC 2544), so that it collides with nobody's network. Bridge, addresses and
NAT table are shared by all state directories of this machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from savedworker.fleet.local.files import Lock, read_json, write_json
from savedworker.fleet.local.host import HostRecord
from savedworker.fleet.local.process import ProcessId, boot_id
from savedworker.model.errors import Refused, Temporary

BRIDGE = "swbr0"
GATEWAY = "198.18.0.1"
NETWORK = ipaddress.ip_network("198.18.0.0/16")
METADATA_ADDRESS = "169.254.169.254"
SHARED = Path("/run/savedworker")
"""Where this machine's processes agree on addresses, whatever their state directory."""
ADDRESSES = SHARED / "addresses"

_NAT = f"""
table ip savedworker {{
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {NETWORK} ip daddr != {NETWORK} masquerade
  }}
}}
"""


def _call(argv: Sequence[str], given: str | None = None) -> str:
    """Run a tool of iproute2 or nftables. Raises Refused when this machine cannot do it at all, else Temporary."""
    try:
        done = subprocess.run(argv, input=given, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError as error:
        raise Refused(f"{argv[0]} is not installed", "apt-get install iproute2 nftables") from error
    except subprocess.TimeoutExpired as error:
        raise Temporary(f"{' '.join(argv)} does not return") from error
    if done.returncode:
        said = done.stderr.strip().replace("\n", "; ")
        if "not permitted" in said or "ermission denied" in said:
            raise Refused(
                f"no right to make network namespaces ({said})",
                "run as root with CAP_SYS_ADMIN and CAP_NET_ADMIN (a container needs --privileged)",
            )
        raise Temporary(f"{' '.join(argv)}: {said}")
    return done.stdout


def ensure_bridge() -> None:
    """Make bridge, forwarding and NAT, unless they are there. Sets ``net.ipv4.ip_forward``. Raises Refused or Temporary."""
    SHARED.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = Lock.take(SHARED / "lock", 30.0)
    if lock is None:
        raise Temporary("another process is setting up the bridge and does not come to an end")
    with lock:
        if not Path(f"/sys/class/net/{BRIDGE}").exists():
            # A fixed MAC: else the bridge takes that of a port, and changes it under everybody's ARP entries when that goes.
            _call(["ip", "link", "add", BRIDGE, "address", "02:53:c6:12:00:01", "type", "bridge"])
        if f" {GATEWAY}/" not in _call(["ip", "-4", "addr", "show", "dev", BRIDGE, "up"]):
            _call(["ip", "addr", "replace", f"{GATEWAY}/{NETWORK.prefixlen}", "dev", BRIDGE])
            _call(["ip", "link", "set", BRIDGE, "up"])
        forward = Path("/proc/sys/net/ipv4/ip_forward")
        if forward.read_text().strip() != "1":
            forward.write_text("1")
        if shutil.which("nft") is None:
            return  # hosts then reach the root namespace only
        try:
            _call(["nft", "list", "chain", "ip", "savedworker", "postrouting"])
        except Temporary:
            _call(["nft", "-f", "-"], _NAT)


def claim_address(host: Path) -> str:
    """A free address, claimed for the host directory ``host`` by an exclusively created file. Raises Temporary."""
    ADDRESSES.mkdir(mode=0o700, parents=True, exist_ok=True)
    claim = ADDRESSES / f".claim.{os.getpid()}.{secrets.token_hex(4)}"
    write_json(claim, _claim(host, ProcessId.of(os.getpid())))
    try:
        for _ in range(1000):
            address = str(NETWORK[secrets.randbelow(NETWORK.num_addresses - 258) + 256])
            try:
                os.link(claim, ADDRESSES / address)  # whole from the first moment, and exclusive
            except FileExistsError:
                continue
            return address
    finally:
        claim.unlink()
    raise Temporary(f"no free address in {NETWORK}", retry_after=30.0)


def note_claim(address: str, host: Path, process: ProcessId | None) -> None:
    """Write down which process answers for an address that ``host`` has claimed."""
    write_json(ADDRESSES / address, _claim(host, process))


def _claim(host: Path, process: ProcessId | None) -> dict[str, object]:
    return {
        "host": str(host),
        "boot": boot_id(),
        "process": [process.pid, process.start] if process else None,
    }


def release_address(address: str, host: Path | None = None) -> None:
    """Free an address if it is claimed (by ``host``, if given)."""
    claim = read_json(ADDRESSES / address)
    if claim and (host is None or claim["host"] == str(host)):
        (ADDRESSES / address).unlink(missing_ok=True)


def abandoned_addresses() -> list[str]:
    """Claimed addresses whose host directory was removed by hand and whose process is gone."""
    found = []
    for path in ADDRESSES.glob(".*claim*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > 60:
                path.unlink()  # of a process killed while it made its claim
    for path in ADDRESSES.glob("198.18.*"):
        claim = read_json(path)
        if claim is None:
            continue  # just released
        if claim["boot"] != boot_id():
            # Names and addresses of an earlier boot mean nothing now, and /run need not be a tmpfs.
            path.unlink(missing_ok=True)
        elif not Path(claim["host"]).exists() and not (
            claim["process"] and ProcessId(*claim["process"]).alive
        ):
            found.append(path.name)
    return found


def short_name(address: str) -> str:
    """Four hex digits that no other living host of this machine has."""
    return f"{int(ipaddress.ip_address(address)) & 0xFFFF:04x}"


def create(record: HostRecord) -> None:
    """Make the host's network namespace with its address, routes and the metadata address. Raises Refused or Temporary."""
    octets = ipaddress.ip_address(record.address).packed
    mac = "02:53:" + ":".join(
        f"{octet:02x}" for octet in octets
    )  # a reused address keeps its neighbours' ARP entries right
    _call(["ip", "netns", "add", record.netns])
    _call(
        ["ip", "-batch", "-"],
        f"link add {record.link} type veth peer name eth0 address {mac} netns {record.netns}\n"
        f"link set {record.link} master {BRIDGE} up\n",
    )
    _call(
        ["ip", "-n", record.netns, "-batch", "-"],
        "link set lo up\n"
        f"addr add {METADATA_ADDRESS}/32 dev lo\n"
        f"addr add {record.address}/{NETWORK.prefixlen} dev eth0\n"
        "link set eth0 up\n"
        f"route add default via {GATEWAY}\n",
    )


def remove(netns: str, link: str) -> None:
    """Remove the veth pair and the namespace's name; the namespace dies with its last process. Raises Temporary."""
    if Path(f"/sys/class/net/{link}").exists():
        try:
            _call(["ip", "link", "del", link])
        except Temporary:
            if Path(f"/sys/class/net/{link}").exists():
                raise
    if Path(f"/run/netns/{netns}").exists():
        try:
            _call(["ip", "netns", "del", netns])
        except Temporary:
            if Path(f"/run/netns/{netns}").exists():
                raise
