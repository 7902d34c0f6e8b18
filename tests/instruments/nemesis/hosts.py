"""Hosts of their own on one machine: network namespaces on a bridge, and what can befall them.

Needs root, iproute2 and iptables. A rule is made in the host that it strikes, so that each direction of each link can
be cut by itself. All processes of a host, and no others, are in its namespace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from nemesis.clock import Clock, build

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAMS: Final = ("ip", "iptables", "nsenter", "mount", "umount", "tc")
SUBNET: Final = "10.213.7"
_NAMESPACES: Final = Path("/run/netns")


def missing() -> str:
    """Return what this machine lacks for hosts, as a line for a person; empty if nothing."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (apt-get install iproute2 iptables util-linux)" if absent else ""


def run(*command: str, check: bool = True) -> str:
    """Run a program; return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """A bridge with hosts on it; this process is on it too, at ``observer``. As a context manager it leaves nothing.

    Two networks at once need two of ``subnet``, which differ in their third number.
    """

    def __init__(self, folder: Path, subnet: str = SUBNET) -> None:
        self.folder = folder
        self.mark = f"ne{subnet.rpartition('.')[2]}-"
        self.subnet = subnet
        self.clocks = build(folder)
        self.observer = f"{subnet}.1"
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        self._remove()
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.observer}/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        return self

    def __exit__(self, *_error: object) -> None:
        for host in self.hosts.values():
            host.remove()
        self._remove()

    @property
    def _bridge(self) -> str:
        return f"{self.mark}br"

    def _remove(self) -> None:
        """Take away what this or an interrupted run has made."""
        for line in run("ip", "netns", "list").splitlines():
            name = line.split()[0]
            if name.startswith(self.mark):
                for pid in run("ip", "netns", "pids", name).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                run("ip", "netns", "delete", name, check=False)
        for link in re.findall(rf"^\d+: ({self.mark}(?:\d+|br))[@:]", run("ip", "link"), re.MULTILINE):
            run("ip", "link", "delete", link, check=False)

    def host(self, name: str, *, disk: str = "") -> Host:
        """Add a host; ``disk`` is the size of a file system of its own, as `mount` takes it."""
        self.hosts[name] = host = Host(self, name, f"{self.subnet}.{10 + len(self.hosts)}", self._bridge, disk)
        return host


class Host:
    """One host. ``folder`` is its disk, ``skew`` by how many seconds its wall clock is wrong all the time."""

    def __init__(self, network: Network, name: str, address: str, bridge: str, disk: str) -> None:
        self.network = network
        self.name = name
        self.address = address
        self._space = f"{network.mark}{name}"
        self.clock = Clock(network.clocks, network.folder / f"{name}.clock") if network.clocks else None
        self.skew = 0.0
        self.folder = network.folder / name
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        self._mounted = bool(disk)
        if disk:
            run("mount", "-t", "tmpfs", "-o", f"size={disk},mode=755", "tmpfs", str(self.folder))
        outer = f"{network.mark}{address.rpartition('.')[2]}"
        run("ip", "netns", "add", self._space)
        run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", self._space)
        run("ip", "link", "set", outer, "master", bridge, "up")
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "address", "add", f"{address}/24", "dev", "eth0")
        self._inside("ip", "link", "set", "eth0", "up")
        # what arrives or leaves passes these two chains, which hold the faults
        for chain, hook in (("FAULTS_IN", "INPUT"), ("FAULTS_OUT", "OUTPUT")):
            self._iptables("-N", chain)
            self._iptables("-A", hook, "-j", chain)

    def __repr__(self) -> str:
        return self.name

    def command(self, command: Sequence[str], uid: int | None = None, gid: int | None = None) -> list[str]:
        """Return a command as it runs on this host."""
        account = () if uid is None else ("-S", str(uid), "-G", str(gid))
        clock = ("env", *self.clock.environment) if self.clock else ()
        return ["nsenter", f"--net={_NAMESPACES / self._space}", *account, "--", *clock, *command]

    # ---- faults

    def cut(self, peer: str, *, to: bool = True, come: bool = True) -> None:
        """Drop what goes ``to`` an address or network, or what should ``come`` from it, or both."""
        if come:
            self._iptables("-A", "FAULTS_IN", "-s", peer, "-j", "DROP")
        if to:
            self._iptables("-A", "FAULTS_OUT", "-d", peer, "-j", "DROP")

    def lose(self, share: float) -> None:
        """Lose a share of the packets, in both directions."""
        for chain in ("FAULTS_IN", "FAULTS_OUT"):
            chance = ("-m", "statistic", "--mode", "random", "--probability", str(share))
            self._iptables("-A", chain, "!", "-i" if chain.endswith("IN") else "-o", "lo", *chance, "-j", "DROP")

    def slow(self, rate: str) -> None:
        """Let out no more than ``rate``, as `tc` writes it: what exceeds it queues for up to two seconds."""
        self._inside("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s")

    def connect(self) -> None:
        """End every fault of the network."""
        for chain in ("FAULTS_IN", "FAULTS_OUT"):
            self._iptables("-F", chain)
        self._inside("tc", "qdisc", "delete", "dev", "eth0", "root", check=False)

    def pause(self) -> None:
        """Stop every process."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let every process go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End every process at once, as a loss of power does, but for the disk's cache; returns when all are gone."""
        while self.pids():
            self._signal(signal.SIGKILL)

    def fill_disk(self) -> None:
        """Leave no space on the host's disk."""
        assert self._mounted, f"{self.name} has no disk of its own"
        facts = os.statvfs(self.folder)
        with (self.folder / "ballast").open("wb") as ballast, suppress(OSError):
            os.posix_fallocate(ballast.fileno(), 0, facts.f_bavail * facts.f_bsize)

    def free_disk(self) -> None:
        """Give the space back."""
        (self.folder / "ballast").unlink(missing_ok=True)

    def set_clock(self, seconds: float) -> None:
        """Set the wall clock so many seconds ahead of the host's ``skew``, or behind if negative."""
        if self.clock:
            self.clock.shift(self.skew + seconds)

    def heal(self) -> None:
        """End every fault but death."""
        self.connect()
        self.set_clock(0)
        self.resume()
        self.free_disk()

    # ---- the means

    def pids(self) -> list[int]:
        """Return the processes of this host."""
        return [int(pid) for pid in run("ip", "netns", "pids", self._space).split()]

    def _signal(self, number: signal.Signals) -> None:
        seen: set[int] = set()
        # again, until none is new: a process may fork while others are signalled
        while fresh := set(self.pids()) - seen:
            for pid in fresh:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            seen |= fresh

    def _inside(self, *command: str, check: bool = True) -> str:
        return run(*self.command(command), check=check)

    def _iptables(self, *rule: str) -> None:
        self._inside("iptables", "-w", *rule)

    def remove(self) -> None:
        """End its processes, and unmount its disk; what its servers have logged stays."""
        with suppress(RuntimeError):
            self.kill()
        if self._mounted:
            # Kafka calls its segments logs, too: their names are numbers
            logs = {path: path.read_bytes() for path in self.folder.rglob("*.log") if not path.stem.isdigit()}
            run("umount", "-l", str(self.folder), check=False)
            for path, log in logs.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(log)

    def rules(self) -> int:
        """Return how many packets its faults have dropped so far: a fault that drops none has not struck."""
        listed = self._inside("iptables", "-w", "-vnxL")
        return sum(int(found) for found in re.findall(r"^\s*(\d+)\s+\d+\s+DROP", listed, re.MULTILINE))
