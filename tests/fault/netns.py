"""Daemons in network namespaces of their own on one switch, so that the network between two of them can be cut, slowed
down and healed while everything else goes on. Needs to be root; available() says why not.

The thread that enters the router's namespace, and threads and processes that it starts, are in it too: tests talk to the
router over its loopback.
"""

import contextlib
import ctypes
import os
import subprocess

from cluster import BIN, Cluster, Daemon

CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
SUBNET = "10.77.0"


def ip(*args):
    subprocess.run(["ip", *args], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def available():
    """None, or why there are no namespaces here."""
    name = f"bt{os.getpid()}probe"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as e:
        return f"no network namespaces: {getattr(e, 'stderr', None) or e}"
    try:
        ip("-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        ip("-n", name, "link", "add", "b0", "type", "bridge")
    except subprocess.CalledProcessError as e:
        return f"no veth or bridge: {e.stderr}"
    finally:
        ip("netns", "del", name)
    return None


class Network:
    """One namespace for each name, with the addresses 10.77.0.N and fd77::N on eth0."""

    def __init__(self, names):
        self.prefix = f"bt{os.getpid()}"
        self.switch = f"{self.prefix}sw"
        self.address = {n: f"{SUBNET}.{i + 1}" for i, n in enumerate(names)}
        self.address6 = {n: f"fd77::{i + 1}" for i, n in enumerate(names)}
        self.mac = {n: f"02:00:00:77:00:{i + 1:02x}" for i, n in enumerate(names)}
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.made = []
        try:
            self._add(self.switch)
            ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
            for n in names:
                self._plug(n)
        except BaseException:
            self.close()
            raise

    def ns(self, name):
        return f"{self.prefix}{name}"

    def _add(self, ns):
        ip("netns", "add", ns)
        self.made.append(ns)
        ip("-n", ns, "link", "set", "lo", "up")

    def _plug(self, name):
        ns, port = self.ns(name), f"port-{name}"
        self._add(ns)
        ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "address", self.mac[name], "netns", ns)
        ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
        ip("-n", ns, "addr", "add", f"{self.address[name]}/24", "dev", "eth0")
        ip("-n", ns, "link", "set", "eth0", "up")
        with contextlib.suppress(subprocess.CalledProcessError):  # IPv6 may be switched off
            ip("-n", ns, "addr", "add", f"{self.address6[name]}/64", "dev", "eth0", "nodad")

    def enter(self, name):
        """The calling thread, and what it starts from now on, is in the namespace."""
        fd = self.home if name is None else os.open(f"/run/netns/{self.ns(name)}", os.O_RDONLY)
        try:
            if LIBC.setns(fd, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            if name is not None:
                os.close(fd)

    @contextlib.contextmanager
    def inside(self, name, back):
        self.enter(name)
        try:
            yield
        finally:
            self.enter(back)

    def cut(self, a, b):
        """Packets between the two vanish, both ways, without a word; connections do not notice."""
        for here, there in ((a, b), (b, a)):
            ip("-n", self.ns(here), "neigh", "replace", self.address[there], "lladdr", "02:00:00:ff:ff:ff", "nud", "permanent",
               "dev", "eth0")

    def heal(self, a, b):
        for here, there in ((a, b), (b, a)):
            ip("-n", self.ns(here), "neigh", "replace", self.address[there], "lladdr", self.mac[there], "nud", "permanent", "dev", "eth0")

    def slow(self, name, rate):
        """What leaves the node goes at this rate, e.g. "4mbit"."""
        subprocess.run(["tc", "-n", self.ns(name), "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "16k",
                        "limit", "4m"], check=True)

    def fast(self, name):
        subprocess.run(["tc", "-n", self.ns(name), "qdisc", "del", "dev", "eth0", "root"], check=True)

    def reset(self, a, b):
        """Every TCP connection between the two ends with an error at both ends. False: this kernel cannot."""
        out = subprocess.run(["ss", "-N", self.ns(a), "-K", "-tnH", "dst", self.address[b]], check=False, capture_output=True, text=True)
        return out.returncode == 0 and out.stdout.strip() != ""

    def close(self):
        for ns in reversed(self.made):
            subprocess.run(["ip", "netns", "del", ns], check=False)
        os.close(self.home)


class NetCluster(Cluster):
    """A cluster whose router is in the namespace "r" with the caller, and each node in the one of its name: p0, d1.

    v6: KV pages go over IPv6.
    """

    def __init__(self, net, model, v6=False, **kw):
        self.net = net
        self.v6 = v6
        super().__init__(model, **kw)

    def start_router(self, listen="127.0.0.1:0", sessions=None):
        super().start_router(listen, sessions or f"{self.net.address['r']}:0")

    def start_node(self, role, i, extra=()):
        place = f"{role[0]}{i}"
        name = f"{role}-{i}"
        program = "baton-prefilld" if role == "prefill" else "baton-decoded"
        transfer = f"[{self.net.address6[place]}]" if self.v6 else self.net.address[place]
        opts = self.prefill_opts if role == "prefill" else [*self.decode_opts, "--transfer", transfer]
        self.nodes[name] = Daemon(name, ["ip", "netns", "exec", self.net.ns(place), os.path.join(BIN, program), "--router",
                                         self.sessions, "--model", self.model, "--name", name, *self.node_opts, *opts, *extra],
                                  self.dir)
        return self.nodes[name]
