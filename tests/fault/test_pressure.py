"""Pools too small on either side: refusals, preemption, back-pressure; every answer is the undisturbed one, nothing is stuck.

The two routers of some tests do not know of each other's load, so a decode node must refuse what one of them sends.
"""

import json
import random
import time

import pytest

from cluster import Cluster, parallel, wait_until
from fire import MODEL, Background, TwoRouters, frozen, stream

PATIENT = ["--lease", "120s"]
ROUTER = [*PATIENT, "--queue-timeout", "600s"]
SMALL = "330KiB"  # 82 pages, 1312 tokens


def request(i, n_prompt, max_tokens):
    rng = random.Random(i)
    return {"prompt": [1] + [rng.randrange(5, 288) for _ in range(n_prompt - 1)], "max_tokens": max_tokens, "temperature": 1,
            "seed": i, "ignore_eos": True, "logprobs": 1}


def answers(requests):
    with Cluster(MODEL) as c:
        return [stream(c, r) for r in requests]


def failed_attempts(path):
    with open(path, encoding="utf-8") as f:
        return [a for line in f for s in json.loads(line)["sequences"] for a in s["attempts"] if a.get("reason")]


@pytest.mark.parametrize("cache", ["on", "off"])
def test_decode_node_refuses(tmp_path, cache):
    """Prompts that fill half of its pool come from two routers at once: what finds no room is refused, and comes again."""
    requests = [request(i, 500, 40) for i in range(16)]
    right = answers(requests)
    log = str(tmp_path / "requests.json")
    with TwoRouters(MODEL, node=[*PATIENT, "--prefix-cache", cache], decode_opts=["--kv-bytes", SMALL],
                    router_opts=[*ROUTER, "--request-log", log]) as c:
        assert parallel([lambda i=i: stream((c, c.other)[i % 2], requests[i]) for i in range(16)]) == right
        c.wait_idle(30)
        wait_until("all lines", lambda: len(open(log, encoding="utf-8").readlines()) == 16)
        reasons = {(a["reason"], a["why"]) for a in failed_attempts(log)}
        print(reasons)
        assert any(reason == "refused" and "decode-0" in why for reason, why in reasons), reasons
        assert c.metric_sum("baton_requests_migrated_total") == 0  # a refusal is not a migration
        c.check_logs()


def test_decode_pool_fills_after_the_hand_off(tmp_path):
    """All land, all grow: the newest are preempted and come back."""
    requests = [request(i, 30, 600) for i in range(12)]
    right = answers(requests)
    log = str(tmp_path / "requests.json")
    with TwoRouters(MODEL, node=PATIENT, decode_opts=["--kv-bytes", SMALL], router_opts=[*ROUTER, "--request-log", log]) as c:
        assert parallel([lambda i=i: stream((c, c.other)[i % 2], requests[i]) for i in range(12)]) == right
        c.wait_idle(30)
        migrated = sum(x.metric_sum("baton_requests_migrated_total") for x in (c, c.other))
        assert migrated > 0
        wait_until("all lines", lambda: len(open(log, encoding="utf-8").readlines()) == 12)
        assert "preempted" in {a["reason"] for a in failed_attempts(log)}
        c.check_logs()


def test_prefill_pool_full_of_what_nobody_grants():
    """The decode node stands still: the prefill node computes what fits, starts no more, and goes on when grants come."""
    requests = [request(i, 500, 40) for i in range(8)]
    right = answers(requests)
    with Cluster(MODEL, node=[*PATIENT, "--prefix-cache", "off"], prefill_opts=["--kv-bytes", SMALL], router_opts=ROUTER) as c:
        with frozen(c.nodes["decode-0"]):
            progress = [[] for _ in requests]
            got = [Background(lambda i=i: stream(c, requests[i], progress[i])) for i in range(8)]
            wait_until("the pool to fill", lambda: c.metric_sum("baton_node_held") == 2)
            wait_until("the others to wait", lambda: c.metric_sum("baton_node_waiting", node="prefill-0")
                       + c.metric_sum("baton_requests_waiting") == 6)
            assert sum(bool(p) for p in progress) == 2
            assert c.metric_sum("baton_kv_pages", node="prefill-0", state="free") < 32
        assert [g.result() for g in got] == right
        c.wait_idle(30)
        assert c.metric_sum("baton_requests_migrated_total") == 0
        c.check_logs()


def test_what_nobody_grants_is_given_up():
    """A decode node that never answers holds a prefill node's pages no longer than --transfer-deadline: another one is served."""
    requests = [request(i, 500, 40) for i in range(8)]
    right = answers(requests)
    with Cluster(MODEL, decode=2, node=[*PATIENT, "--prefix-cache", "off", "--transfer-deadline", "1s"],
                 prefill_opts=["--kv-bytes", SMALL], router_opts=ROUTER) as c:
        start = time.monotonic()
        with frozen(c.nodes["decode-0"]):
            assert parallel([lambda r=r: stream(c, r) for r in requests]) == right
        print(f"eight answers beside a silent decode node in {time.monotonic() - start:.1f} s")
        c.wait_idle(30)
        assert c.metric_sum("baton_requests_migrated_total") > 0
        assert stream(c, requests[0]) == right[0]
        c.wait_idle(30)
