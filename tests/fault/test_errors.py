"""What a client is told: which node, in which phase, and what to do; over HTTP and over gRPC, before and in a stream."""

import json
import random

import grpc
import pytest

import grpc_stubs
from cluster import SLOW, Cluster, wait_until
from fire import MODEL, Background, body, frozen, stream_error
from rogue import RogueDaemon, RogueRouter, pb

inference, stubs = grpc_stubs.load()
PATIENT = ["--lease", "120s"]
IMPATIENT = [*PATIENT, "--migrate-grace", "300ms", "--no-node-grace", "300ms"]
LONG = {"prompt": [1] + [random.Random(6).randrange(5, 288) for _ in range(15999)], "max_tokens": 200, "ignore_eos": True}
AGAIN = "try again later"


def grpc_error(c, ids, max_tokens=60000):
    with grpc.insecure_channel(c.address) as channel:
        try:
            for _ in stubs.InferenceStub(channel).Generate(inference.GenerateRequest(
                    token_ids=inference.TokenIds(ids=ids), sampling=inference.SamplingParams(
                        max_tokens=max_tokens, ignore_eos=True)), timeout=120 * SLOW):
                pass
        except grpc.RpcError as e:
            return e.code(), e.details()
    raise AssertionError("it was answered")


def says(text, *words):
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"


def test_the_only_decode_node_dies_in_decode():
    with Cluster(MODEL, node=PATIENT, router_opts=IMPATIENT) as c:
        progress = []
        http = Background(lambda: stream_error(c, body(1, max_tokens=60000), progress))
        rpc = Background(lambda: grpc_error(c, [1, 40, 41]))
        wait_until("both to decode", lambda: len(progress) > 3 and c.metric_sum("baton_node_running", node="decode-0") == 2)
        c.nodes["decode-0"].kill()
        want = ("no decode node is connected", "decode node decode-0 was lost", "(in decode, after ", " tokens)", AGAIN)
        says(http.result(), *want)
        code, text = rpc.result()
        assert code == grpc.StatusCode.UNAVAILABLE
        says(text, *want)
        status, head, data = c.http("/v1/completions", {"prompt": [1, 40], "max_tokens": 4})
        assert status == 503
        says(json.loads(data)["error"]["message"], "no decode node is connected", AGAIN)
        assert c.metric_sum("baton_requests_total", finish_reason="error") >= 2


def test_the_only_prefill_node_dies_in_prefill():
    with Cluster(MODEL, node=PATIENT, router_opts=IMPATIENT) as c:
        with frozen(c.nodes["prefill-0"]):
            http = Background(lambda: c.http("/v1/completions", LONG))
            wait_until("it to be sent", lambda: c.metric_sum("baton_requests_running") == 1)
            c.nodes["prefill-0"].kill()
        status, _, data = http.result()
        assert status == 503
        says(json.loads(data)["error"]["message"], "no prefill node is connected", "prefill node prefill-0 was lost", "(in prefill)", AGAIN)


def test_the_only_decode_node_dies_in_the_transfer():
    with Cluster(MODEL, node=PATIENT, router_opts=IMPATIENT) as c:
        progress = []
        with frozen(c.nodes["decode-0"]):
            http = Background(lambda: stream_error(c, LONG, progress))
            wait_until("the first token", lambda: progress, 120)
            c.nodes["decode-0"].kill()
        # The router notices it, or is told by the prefill node first: both name it.
        says(http.result(), "decode node decode-0", "lost", "(in the transfer)", AGAIN)


@pytest.mark.parametrize("n", [1, 3])
def test_the_limit_of_attempts(n):
    """A node that fails every attempt: the request fails after --attempts, each of them but the first a migration."""
    with RogueRouter() as r, Cluster(MODEL, prefill=0, decode=1, wait=False, router_opts=[*IMPATIENT, "--attempts", str(n)]) as c:
        wanted = c.sessions
        c.sessions = f"{c.sessions},{r.address}"
        c.start_node("decode", 1)
        hello = pb.Hello()
        hello.CopyFrom(r.session("decode-1").hello)
        c.sessions = wanted
        hello.role, hello.name, hello.instance = "prefill", "liar", 12345
        with RogueDaemon(c.sessions) as d:
            d.send(hello=hello)
            d.wait_for("peers")
            http = Background(lambda: c.http("/v1/completions", {"prompt": [1, 40], "max_tokens": 4}))
            for i in range(n):
                s = d.wait_for("submit", i + 1)[i]
                d.send(attempt_end=pb.AttemptEnd(ticket=s.ticket, reason=2, text="it fell over"))
            status, _, data = http.result()
            assert status == 503
            says(json.loads(data)["error"]["message"], f"{n} attempt", "prefill node liar, for decode node ", ": it fell over", "(in prefill)", AGAIN)
            assert len(d.of_kind("submit")) == n
            assert c.metric_sum("baton_requests_migrated_total") == n - 1


def test_deadlines():
    with Cluster(MODEL, node=PATIENT, router_opts=[*PATIENT, "--request-timeout", "4s"]) as c:
        says(stream_error(c, body(1, max_tokens=60000)), "the deadline passed in decode, after ", "on decode-0")
        with frozen(c.nodes["prefill-0"]):
            status, _, data = c.http("/v1/completions", LONG)
            assert status == 408
            says(json.loads(data)["error"]["message"], "the deadline passed in prefill", "on prefill-0")
        c.wait_idle(30)


def test_no_room():
    with Cluster(MODEL, node=PATIENT, router_opts=[*PATIENT, "--queue-timeout", "1s", "--queue-max", "1"]) as c:
        with frozen(c.nodes["prefill-0"]):
            running = [Background(lambda: c.http("/v1/completions", LONG)) for _ in range(6)]
            wait_until("one to have waited", lambda: any(
                "no node had room within 1000 ms" in json.loads(r.value[2])["error"]["message"] for r in running if r.value))
            for status, head, data in [r.value for r in running if r.value]:
                assert status == 429 and int({k.lower(): v for k, v in head.items()}["retry-after"]) >= 1
                says(json.loads(data)["error"]["message"], AGAIN)
        assert sum(r.result()[0] == 200 for r in running) >= 1
        c.wait_idle(30)
