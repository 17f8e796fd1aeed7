"""Clients that hold a connection and do little with it: they cost the others nothing, and are let go."""

import json
import resource
import select
import socket
import threading
import time

import pytest

from cluster import Cluster, tiny, wait_until
from netns import Network, available

HARD_LIMIT = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
IDLE = min(2000, HARD_LIMIT - 300)  # descriptors, here and in the router
WHY_NOT = available()
PROBE = {"prompt": [1, 40, 41, 42], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster():
    resource.setrlimit(resource.RLIMIT_NOFILE, (HARD_LIMIT, HARD_LIMIT))
    with Cluster(tiny("tiny-long"), router_opts=["--idle-timeout", "4s", "--write-timeout", "1s"]) as c:
        yield c
        c.wait_idle()
        c.check_logs()


def probe(c):
    return c.complete(**PROBE)["choices"]


def connect(c, receive_bytes=0):
    host, port = c.address.rsplit(":", 1)
    s = socket.socket()
    if receive_bytes:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    s.settimeout(60)
    s.connect((host, int(port)))
    return s


def request(body):
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(data) + data


def has_news(s):
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(s, select.POLLIN)
    return bool(poll.poll(0))


def is_closed(s):
    """The other side has closed or reset it."""
    if not has_news(s):
        return False
    try:
        return s.recv(65536) == b""
    except OSError:
        return True


def test_idle_connections(cluster):
    if IDLE < 2000:
        print(f"only {IDLE} connections: the limit of open files is {HARD_LIMIT}")
    before = probe(cluster)
    idle = [connect(cluster) for _ in range(IDLE)]
    try:
        for _ in range(20):
            assert probe(cluster) == before
        open_ones = list(idle)

        def all_closed():
            left = [s for s in open_ones if not is_closed(s)]
            open_ones[:] = left
            return not left

        wait_until("all idle connections to be closed", all_closed)
        assert probe(cluster) == before
    finally:
        for s in idle:
            s.close()


def test_half_a_request(cluster):
    """Half of the headers, half of a body: others are served, then it ends."""
    before = probe(cluster)
    whole = request(PROBE)
    ends = [connect(cluster) for _ in range(20)]
    for i, s in enumerate(ends):
        s.sendall(whole[:30] if i % 2 else whole[:-10])
    assert probe(cluster) == before
    left = set(ends)

    def gone():
        for s in list(left):
            if has_news(s):
                try:
                    data = s.recv(65536)
                except OSError:
                    data = b""
                if data == b"":
                    left.discard(s)
                else:
                    assert data.startswith(b"HTTP/1.1 408 "), data[:100]
        return not left

    wait_until("half requests to be given up", gone, 60)
    for s in ends:
        s.close()
    assert probe(cluster) == before


def test_a_byte_at_a_time(cluster):
    """Whoever sends slowly, but does, is answered."""
    before = probe(cluster)
    whole = request(PROBE)
    s = connect(cluster)
    s.sendall(whole[:40])
    for b in whole[40:]:
        s.sendall(bytes([b]))
        time.sleep(0.02)
    answer = b""
    while b"}]" not in answer:
        piece = s.recv(65536)
        assert piece, answer
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads("{" + answer.partition(b"\r\n\r\n{")[2].decode())["choices"] == before
    s.close()


def test_a_byte_a_second(cluster):
    """Headers that do not come to an end are not waited for."""
    before = probe(cluster)
    s = connect(cluster)
    ended = threading.Event()

    def trickle():
        for b in request(PROBE):
            if is_closed(s):
                ended.set()
                return
            try:
                s.sendall(bytes([b]))
            except OSError:
                ended.set()
                return
            time.sleep(1)

    t = threading.Thread(target=trickle)
    t.start()
    assert probe(cluster) == before
    t.join()
    assert ended.is_set()
    s.close()
    assert probe(cluster) == before


def test_stops_reading(cluster):
    """Its sequences end, though it stays connected; the answers of others go on meanwhile."""
    before = probe(cluster)
    cancelled = cluster.metric_sum("baton_requests_total", finish_reason="cancelled")
    rude = [connect(cluster, 4096) for _ in range(4)]
    for s in rude:
        s.sendall(request({"prompt": [1, 50], "max_tokens": 4000, "n": 8, "ignore_eos": True, "stream": True, "logprobs": 5}))
    for _ in range(5):
        assert probe(cluster) == before
    wait_until("their answers to be cancelled", lambda: cluster.metric_sum("baton_requests_total", finish_reason="cancelled")
               >= cancelled + len(rude), 60)
    cluster.wait_idle()
    for s in rude:
        s.close()
    assert probe(cluster) == before


class Reachable(Cluster):
    """A cluster in one network namespace whose router listens for others."""

    def __init__(self, net, model, **kw):
        self.host = net.address["r"]
        super().__init__(model, **kw)

    def start_router(self, listen=None, sessions="127.0.0.1:0"):
        super().start_router(listen or f"{self.host}:0", sessions)


@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_half_open():
    """The network behind a client is cut without a word in the middle of its answer: no packet tells the router."""
    net = Network(["r", "c"])
    net.enter("r")
    try:
        with Reachable(net, tiny("tiny-long"), router_opts=["--write-timeout", "1s"]) as c:
            before = probe(c)
            with net.inside("c", "r"):
                s = connect(c)
            s.sendall(request({"prompt": [1, 50], "max_tokens": 7000, "n": 16, "ignore_eos": True, "stream": True}))
            assert s.recv(4096)
            net.cut("r", "c")
            wait_until("its answer to be cancelled", lambda: c.metric_sum("baton_requests_total", finish_reason="cancelled") == 16, 60)
            c.wait_idle()
            assert probe(c) == before
            s.close()
            c.check_logs()
    finally:
        net.enter(None)
        net.close()
