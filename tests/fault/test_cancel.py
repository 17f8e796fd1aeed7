"""Clients that leave at any moment, in every way a client can: nothing stays behind, nobody else notices.

BATON_CANCELS sets how many leave; BATON_CANCEL_SEED another order.
"""

import json
import os
import random
import signal
import socket
import struct
import threading
import time

import grpc
import pytest

import grpc_stubs
from cluster import SLOW, Cluster, parallel, wait_until
from fire import MODEL, body, frozen, node_metrics, stream, undisturbed_answers

pb, stubs = grpc_stubs.load()
CANCELS = int(os.environ.get("BATON_CANCELS", "100"))
SEED = int(os.environ.get("BATON_CANCEL_SEED", "1"))
LONG = 30000
FOREVER = 60000
# Stopped for a moment, a daemon must not count as lost, however slow this machine is.
PATIENT = ["--lease", "120s"]


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_answers()


def prompt(rng, n):
    return [1] + [rng.randrange(5, 288) for _ in range(n - 1)]


class Leaving:
    """One request, and the ways of leaving it: each returns once the client has seen the end or gone away."""

    def __init__(self, c, stub, rng, number):
        self.c, self.stub, self.rng = c, stub, rng
        self.id = f"leaving-{number}"
        n, max_tokens = rng.choice(((LONG, 50), (6000, 2000), (6000, 2000), (1500, 2000), (20, FOREVER - 100)))
        self.prompt, self.max_tokens = prompt(rng, n), max_tokens
        self.n = rng.choice((1, 1, 1, 2))
        self.moment = rng.choice(("at once", "in time", "first token", "later token"))
        if n == LONG:  # left while queued or half computed: a whole one takes seconds, and others wait behind it
            self.moment = "in time"
        self.seconds = rng.random() * {"at once": 0.01}.get(self.moment, 1.0)

    def request(self):
        return pb.GenerateRequest(request_id=self.id, token_ids=pb.TokenIds(ids=self.prompt), sampling=pb.SamplingParams(
            max_tokens=self.max_tokens, ignore_eos=True, n=self.n))

    def n_events(self):
        return {"first token": 1, "later token": self.rng.randrange(2, 200)}.get(self.moment, 0)

    def by_connection(self, reset):
        data = json.dumps({"prompt": self.prompt, "max_tokens": self.max_tokens, "n": self.n, "ignore_eos": True,
                           "stream": True}).encode()
        host, port = self.c.address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=120 * SLOW) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            got, want = b"", self.n_events()
            if not want:
                time.sleep(self.seconds)
            while got.count(b"data: ") < want and b"[DONE]" not in got:
                more = s.recv(65536)
                got += more
                assert more and got.startswith(b"HTTP/1.1 200 OK"), got[-500:]
            if reset:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def some_of(self, call):
        """Waits for the moment."""
        want = self.n_events()
        if not want:
            time.sleep(self.seconds)
        for _ in range(want):
            next(call, None)

    def ended(self, call, *codes):
        try:
            for _ in call:
                pass
        except grpc.RpcError as e:
            assert e.code() in codes, e
            return
        # It may have been over before it was left: the answer is complete then.
        assert self.max_tokens < FOREVER - 100, "an endless answer ended"

    def by_grpc_cancel(self):
        call = self.stub.Generate(self.request(), timeout=120 * SLOW)
        self.some_of(call)
        call.cancel()
        self.ended(call, grpc.StatusCode.CANCELLED)

    def by_abort(self):
        call = self.stub.Generate(self.request(), timeout=120 * SLOW)
        self.some_of(call)
        while not self.stub.Abort(pb.AbortRequest(request_id=self.id), timeout=60 * SLOW).found:
            if call.done():
                break  # it was over before, or has failed
            time.sleep(0.002)  # overtaken by the abort
        self.ended(call, grpc.StatusCode.CANCELLED)

    def by_deadline(self):
        call = self.stub.Generate(self.request(), timeout=max(self.seconds, 0.001))
        self.ended(call, grpc.StatusCode.DEADLINE_EXCEEDED)

    def leave(self):
        way = self.rng.choice((lambda: self.by_connection(False), lambda: self.by_connection(True), self.by_grpc_cancel,
                               self.by_abort, self.by_deadline))
        way()


def test_cancel_at_any_moment(undisturbed):
    with Cluster(MODEL, node=PATIENT, router_opts=[*PATIENT, "--queue-timeout", "600s"]) as c, grpc.insecure_channel(c.address) as channel:
        stub = stubs.InferenceStub(channel)
        left = iter(range(CANCELS))
        lock = threading.Lock()
        leaving = threading.Event()

        def leave():
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                Leaving(c, stub, random.Random(SEED * 1000003 + number), number).leave()

        def stay(i):
            n = 0
            while not leaving.is_set() or n == 0:
                assert stream(c, body(i)) == undisturbed[i], f"answer {i} changed"
                n += 1
            return n

        def all_leave():
            try:
                parallel([leave] * 6)
            finally:
                leaving.set()

        start = time.monotonic()
        rounds = parallel([all_leave, *(lambda i=i: stay(i) for i in range(2))])[1:]
        quiet = time.monotonic()
        c.wait_idle(30)
        print(f"{CANCELS} cancels beside {sum(rounds)} answers in {quiet - start:.1f} s; idle {time.monotonic() - quiet:.2f} s after")
        assert [stream(c, body(i)) for i in range(8)] == undisturbed
        c.wait_idle(10)
        c.check_logs()


def leave_in(c, when, request):
    """Streams a request and leaves when(events so far) is true."""
    host, port = c.address.rsplit(":", 1)
    data = json.dumps({**request, "stream": True}).encode()
    with socket.create_connection((host, int(port)), timeout=120 * SLOW) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        s.settimeout(0.02)
        seen = 0
        end = time.monotonic() + 120 * SLOW
        while not when(seen):
            assert time.monotonic() < end, "the moment to leave does not come"
            try:
                seen += s.recv(65536).count(b"data: ")
            except TimeoutError:
                pass


def leased(c, node):
    return c.metric_sum("baton_kv_pages", node=node, state="leased") + c.metric_sum("baton_kv_pages", node=node, state="quarantined")


def probe(c, undisturbed):
    """Nothing is left, and the next one is served."""
    c.wait_idle(30)
    assert stream(c, body(0)) == undisturbed[0]
    c.wait_idle(30)
    c.check_logs()


def test_cancel_while_queued_at_a_node(undisturbed):
    """The prefill node does not even read: the decode node and the router let go at once, it does later."""
    with Cluster(MODEL, node=PATIENT, router_opts=PATIENT) as c:
        with frozen(c.nodes["prefill-0"]):
            leave_in(c, lambda seen: c.metric_sum("baton_requests_running") == 1, {"prompt": prompt(random.Random(1), LONG)})
            wait_until("the router to let go", lambda: c.metric_sum("baton_requests_running") == 0)
        probe(c, undisturbed)


def test_cancel_between_prefill_and_grant(undisturbed):
    """The first token is there, the decode node has not answered: the prefill node frees its pages without it."""
    with Cluster(MODEL, node=PATIENT, router_opts=PATIENT) as c:
        with frozen(c.nodes["decode-0"]):
            leave_in(c, lambda seen: seen > 0, {"prompt": prompt(random.Random(2), 2000), "max_tokens": 100, "ignore_eos": True})
            wait_until("the prefill node to free the pages", lambda: leased(c, "prefill-0") == 0)
        probe(c, undisturbed)


def test_cancel_in_the_transfer(undisturbed):
    """Some pages have landed, more are on the way to a decode node that has stopped reading."""
    with Cluster(MODEL, node=PATIENT, router_opts=PATIENT) as c:
        stop = []

        def when(seen):
            if not stop and c.metric_sum("baton_node_landing") > 0:
                stop.append(frozen(c.nodes["decode-0"]))
                stop[0].__enter__()
            return seen > 0

        try:
            leave_in(c, when, {"prompt": prompt(random.Random(3), LONG), "max_tokens": 100, "ignore_eos": True})
            wait_until("the router to let go", lambda: c.metric_sum("baton_requests_running") == 0)
            assert stop, "it was over before the transfer was seen"
        finally:
            for f in stop:
                f.__exit__(None, None, None)
        probe(c, undisturbed)


def test_ten_cancelled_prompts_delay_nobody(undisturbed):
    """What is computed after the cancel is at most the step it hit: told by the node's own count of tokens."""
    chunk = 8192  # a step takes long enough to be hit
    with Cluster(MODEL, node=[*PATIENT, "--prefix-cache", "off", "--health", "127.0.0.1:0", "--chunk-tokens", str(chunk)],
                 router_opts=PATIENT) as c:
        p = c.nodes["prefill-0"]

        def computed():
            return node_metrics(p)["baton_prompt_tokens_total"]

        rng = random.Random(4)
        host, port = c.address.rsplit(":", 1)
        clients = []
        for _ in range(10):
            data = json.dumps({"prompt": prompt(rng, LONG), "max_tokens": 100}).encode()
            s = socket.create_connection((host, int(port)), timeout=60 * SLOW)
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            clients.append(s)
        wait_until("a prompt to be half computed", lambda: computed() > 0)
        with frozen(p):
            for s in clients:
                s.close()
            wait_until("the router to let go of all", lambda: c.metric_sum("baton_requests_running")
                       + c.metric_sum("baton_requests_waiting") == 0)
        at_cancel = computed()  # the node has read nothing of it yet, or just now
        assert stream(c, body(0)) == undisturbed[0]
        after = computed() - at_cancel
        print(f"{at_cancel:.0f} tokens computed at the cancel, {after:.0f} after it")
        assert after <= chunk + len(body(0)["prompt"])
        probe(c, undisturbed)
