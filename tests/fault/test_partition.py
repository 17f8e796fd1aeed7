"""The network between daemons is cut, slowed down, reset; nodes stand still or are replaced. Whatever happens, answers
are those of an undisturbed run, every page is free again, and the next request is served."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time

import pytest

from cluster import SLOW, Cluster, parallel, wait_until
from fire import MODEL, body, stream, under_fire, undisturbed_answers
from netns import NetCluster, Network, available

LEASE = ["--lease", "500ms", "--heartbeat", "100ms"]
N = 4  # streams at once
WHY_NOT = available()
needs_net = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_answers(N)


@pytest.fixture(scope="module")
def net():
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    n = Network(["r", "p0", "p1", "d0", "d1", "x"])
    n.enter("r")
    try:
        yield n
    finally:
        n.enter(None)
        n.close()


def cluster_on(net, prefill=1, decode=2, node=(), **kw):
    return NetCluster(net, MODEL, prefill=prefill, decode=decode, node=[*LEASE, *node], router_opts=LEASE, **kw)


def state(cluster, name):
    return next((n for n in cluster.cluster()["nodes"] if n["name"] == name), {"state": "gone"})


def links(cluster, name):
    """The decode nodes that a prefill node is connected to."""
    return {t["peer"] for t in state(cluster, name).get("transports") or []}


def after(cluster, undisturbed):
    """Quiet, everything free, and at once ready for more."""
    start = time.monotonic()
    cluster.wait_idle(20)
    print(f"all pages were free {time.monotonic() - start:.2f} s after the last answer")
    assert stream(cluster, body(3)) == undisturbed[3]
    cluster.wait_idle(20)


@needs_net
def test_prefill_and_decode_cannot_reach_each_other(net, undisturbed):
    """Sessions stay up: the pair is avoided, d0 finishes what has landed there, d1 takes the rest."""
    with cluster_on(net) as c:
        try:
            def fire():
                net.cut("p0", "d0")
                wait_until("the pair to be given up", lambda: "decode-0" not in links(c, "prefill-0"))

            under_fire(c, undisturbed, fire)
            assert parallel([lambda i=i: stream(c, body(i)) for i in range(N)]) == undisturbed, "with d1 alone"
            assert state(c, "decode-0")["state"] != "gone", "its session was never cut"
        finally:
            net.heal("p0", "d0")
        c.wait_ready()
        after(c, undisturbed)


@needs_net
def test_router_and_decode_cannot_reach_each_other(net, undisturbed):
    with cluster_on(net) as c:
        try:
            def fire():
                net.cut("r", "d0")
                wait_until("the node to be given up", lambda: state(c, "decode-0")["state"] != "ready")

            under_fire(c, undisturbed, fire)
        finally:
            net.heal("r", "d0")
        c.nodes["decode-0"].find("is silent|lost|is gone")
        c.wait_ready()
        after(c, undisturbed)


@needs_net
def test_slow_link(net, undisturbed):
    """Nothing is given up because it is slow."""
    try:
        net.slow("p0", "6mbit")
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no traffic shaping: {e}")
    try:
        with cluster_on(net, decode=1, node=["--lease", "5s", "--prefix-cache", "off"]) as c:
            long = {**body(3), "prompt": [1] + [30 + j % 250 for j in range(3000)], "max_tokens": 40}
            start = time.monotonic()
            slow = stream(c, long)
            print(f"3,000 tokens at 6 Mbit/s: {time.monotonic() - start:.2f} s")
            assert parallel([lambda i=i: stream(c, body(i)) for i in range(N)]) == undisturbed
            assert c.metric_sum("baton_requests_migrated_total") == 0
            net.fast("p0")
            assert stream(c, long) == slow
            after(c, undisturbed)
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            net.fast("p0")


@needs_net
def test_connections_break(net, undisturbed):
    """UCX endpoints end with errors, again and again; both sides connect again by themselves."""
    with cluster_on(net) as c:
        if not net.reset("p0", "d0"):
            pytest.skip("this kernel cannot end other people's connections (ss -K)")
        c.wait_ready()

        def fire():
            for _ in range(3):
                net.reset("p0", "d0")
                net.reset("d1", "p0")
                wait_until("both to be connected again", lambda: len(links(c, "prefill-0")) == 2)

        under_fire(c, undisturbed, fire)
        c.wait_ready()
        after(c, undisturbed)


@needs_net
def test_replacement_on_the_same_host_and_port(net, undisturbed):
    """The old one is cut off, so nobody hears of its death; the new one has its address, and serves at once."""
    port = ["--transfer", f"{net.address['d0']}:7100"]
    with cluster_on(net, decode=0, wait=False) as c:
        c.start_node("decode", 0, extra=port)
        c.wait_ready()
        old = state(c, "decode-0")["instance"]
        progress = []
        result = []
        thread = threading.Thread(target=lambda: result.append(stream(c, body(2), progress)))
        thread.start()
        wait_until("the stream to begin", lambda: len(progress) > 3)
        net.cut("p0", "d0")
        c.nodes["decode-0"].kill()
        net.heal("p0", "d0")
        c.start_node("decode", 0, extra=port)
        wait_until("the new one to be there", lambda: state(c, "decode-0").get("instance") not in (None, old))
        thread.join(60 * SLOW)
        assert result == [undisturbed[2]]
        c.wait_ready()
        after(c, undisturbed)


@needs_net
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_stopped_for_longer_than_the_lease(net, undisturbed, victim):
    """What it still sends when it wakes lands nowhere; it comes back with new sessions and connections."""
    with cluster_on(net, prefill=2) as c:
        proc = c.nodes[victim].proc
        try:
            def fire():
                proc.send_signal(signal.SIGSTOP)
                wait_until("it to be given up", lambda: state(c, victim)["state"] != "ready")

            under_fire(c, undisturbed, fire)
        finally:
            proc.send_signal(signal.SIGCONT)
        c.wait_ready()
        assert parallel([lambda i=i: stream(c, body(i)) for i in range(N)]) == undisturbed
        after(c, undisturbed)


@needs_net
@pytest.mark.parametrize("v6", [False, True], ids=["IPv4", "IPv6"])
def test_nobody_else_reaches_ucx_while_nodes_arrive(net, undisturbed, v6):
    """In the seconds in which a peer may connect to UCX's ports, another machine may not."""
    if v6 and not os.path.exists("/proc/sys/net/ipv6"):
        pytest.skip("no IPv6 here")
    with cluster_on(net, decode=1, v6=v6) as c:
        for name, place in (("decode-0", "d0"), ("prefill-0", "p0")):
            host = net.address6[place] if v6 else net.address[place]
            gate = state(c, name).get("transfer_address")
            ports = listening(c.nodes[name].proc.pid, v6)
            assert ports
            with net.inside("x", back="r"):
                for port in ports:
                    address = f"[{host}]:{port}" if v6 else f"{host}:{port}"
                    try:
                        socket.create_connection((host, port), 0.3).close()
                        assert address == gate, f"{name}: port {port} is open to strangers"
                    except TimeoutError:
                        assert address != gate
        assert stream(c, body(0)) == undisturbed[0]


def listening(pid, v6):
    """TCP ports that somebody in the process's namespace listens on, but on IPv4's loopback."""
    with open(f"/proc/{pid}/net/tcp{'6' if v6 else ''}", encoding="ascii") as f:
        lines = [line.split() for line in f.readlines()[1:]]
    return [int(x[1].split(":")[1], 16) for x in lines if x[3] == "0A" and not x[1].startswith("0100007F")]


# ---- without namespaces too ----


class Proxy:
    """A TCP proxy that can stop carrying anything, silently."""

    def __init__(self, to):
        host, port = to.rsplit(":", 1)
        self.to = (host, int(port))
        self.open = threading.Event()
        self.open.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                a, _ = self.listener.accept()
                b = socket.create_connection(self.to)
                for x, y in ((a, b), (b, a)):
                    threading.Thread(target=self._carry, args=(x, y), daemon=True).start()

    def _carry(self, x, y):
        with contextlib.suppress(OSError):
            while data := x.recv(65536):
                self.open.wait()
                y.sendall(data)
        for s in (x, y):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.open.set()
        self.listener.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_session_is_cut_by_a_proxy(undisturbed, role):
    other = "decode" if role == "prefill" else "prefill"
    with Cluster(MODEL, prefill=0, decode=0, node=LEASE, router_opts=LEASE, wait=False) as c:
        proxy = Proxy(c.sessions)
        try:
            direct, c.sessions = c.sessions, proxy.address
            c.start_node(role, 0)
            c.sessions = direct
            c.start_node(role, 1)
            c.start_node(other, 0)
            c.wait_ready()

            def fire():
                proxy.open.clear()
                wait_until("the node to be given up", lambda: state(c, f"{role}-0")["state"] != "ready")

            under_fire(c, undisturbed, fire)
            proxy.open.set()
            c.wait_ready()
            after(c, undisturbed)
        finally:
            proxy.close()


PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000


def thread_named(pid, name):
    for tid in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{tid}/comm", encoding="ascii") as f:
            if f.read().strip() == name:
                return int(tid)
    raise AssertionError(f"no thread {name}")


@contextlib.contextmanager
def thread_stopped(tid):
    """One thread of a process stands still, the others go on: as when a device hangs."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(PTRACE_SEIZE, tid, None, None) != 0:
        pytest.skip(f"cannot stop a thread here: {os.strerror(ctypes.get_errno())}")
    try:
        assert libc.ptrace(PTRACE_INTERRUPT, tid, None, None) == 0
        os.waitpid(tid, WALL)
        yield
    finally:
        libc.ptrace(PTRACE_DETACH, tid, None, None)


@pytest.mark.parametrize("thread", ["engine", "xfer"])
def test_a_transfer_that_never_completes(undisturbed, thread):
    """P stops in the middle of a prompt, while its session goes on: the transfer's own deadline, or the lease, ends it."""
    long = {**body(4), "prompt": [1] + [30 + (7 * j) % 250 for j in range(12000)], "max_tokens": 30}
    with Cluster(MODEL, prefill=2, decode=1, node=["--transfer-deadline", "500ms", "--prefix-cache", "off"],
                 prefill_opts=["--chunk-tokens", "64"]) as c:
        want = stream(c, long)
        c.wait_idle(20)
        result = []
        client = threading.Thread(target=lambda: result.append(stream(c, long)))
        client.start()

        def moving():
            nodes = c.cluster()["nodes"]
            landing = any(n["role"] == "decode" and n["pages"]["leased"] for n in nodes)
            return landing and next((n["name"] for n in nodes if n["role"] == "prefill" and n["running"]), None)

        victim = wait_until("pages to land", moving)
        with thread_stopped(thread_named(c.nodes[victim].proc.pid, thread)):
            client.join(120 * SLOW)
            assert result == [want]
        c.wait_ready()
        after(c, undisturbed)
