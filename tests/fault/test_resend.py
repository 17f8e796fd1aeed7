"""A prompt is computed once, whatever becomes of its decode node; a node whose time to drain is over gives back what it has."""

import re
import signal
import threading
import urllib.request

import pytest

from cluster import SLOW, Cluster, parallel, wait_until
from fire import MODEL, body, stream

LONG = 6000  # tokens
PROMPT = 14000
# Nothing may come from a cache, and each prompt takes many steps.
NODE = ["--health", "127.0.0.1:0", "--prefix-cache", "off", "--chunk-tokens", "32", "--lease", "15s"]


def long_prompt(i):
    return body(i, 40, prompt=[1] + [5 + (i * 17 + j * j) % 280 for j in range(PROMPT - 1)])


class Watched(Cluster):
    """One prefill node, two decode nodes."""

    def __init__(self):
        super().__init__(MODEL, prefill=1, decode=2, node=NODE)

    def own_metric(self, node, name):
        """Of the node itself, as it is now."""
        url = self.nodes[node].find(r"health.*listening on (http://\S+)").group(1)
        with urllib.request.urlopen(url + "/metrics", timeout=30 * SLOW) as r:
            return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", r.read().decode(), re.M))

    def computed(self):
        return self.own_metric("prefill-0", "baton_prompt_tokens_total")

    def landing_at(self):
        """The decode node that has leased pages and received some of them."""
        return next((n for n in ("decode-0", "decode-1") if self.own_metric(n, "baton_kv_shares_received_total") > 0), None)



@pytest.fixture(scope="module")
def undisturbed():
    with Cluster(MODEL) as c:
        return [stream(c, body(i, LONG)) for i in range(4)]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_drain_timeout_gives_back(undisturbed, victim):
    """The node leaves with exit code 0 long before its streams would have ended; they go on elsewhere, unchanged."""
    with Cluster(MODEL, prefill=2, decode=2, node=["--drain-timeout", "0s"]) as c:
        progress = [[] for _ in undisturbed]

        def drain():
            wait_until("the streams to begin", lambda: all(len(p) >= 2 for p in progress), 60)
            c.nodes[victim].proc.send_signal(signal.SIGTERM)
            return c.nodes[victim].proc.wait(60 * SLOW)

        *got, code = parallel([*[lambda i=i: stream(c, body(i, LONG), progress[i]) for i in range(len(undisturbed))], drain])
        assert code == 0
        assert got == undisturbed
        if victim == "decode-0":
            assert "go back to their routers" in c.nodes[victim].log()
            assert c.metric_sum("baton_requests_migrated_total") > 0
        c.wait_idle(20)
        c.check_logs(allow=[r"drain timed out", r"session", r"transfer", r"was lost", r"cannot reach", r"is not used"])


def under_fire(fire):
    """One long prompt; fire(cluster, victim, progress) while its pages move. The answer, and what P computed."""
    with Watched() as c:
        progress = []

        def shoot():
            victim = wait_until("pages to arrive", c.landing_at, 60)
            if progress or c.computed() == PROMPT:
                return False
            fire(c, victim, progress)
            return True

        got, in_time = parallel([lambda: stream(c, long_prompt(1), progress), shoot])
        c.wait_idle(20)
        return in_time, got, {"computed": c.computed(), "resent": c.own_metric("prefill-0", "baton_prompts_resent_total"),
                              "router": c.metric_sum("baton_prompts_resent_total"),
                              "dropped": c.own_metric("prefill-0", "baton_prompts_kept_dropped_total")}


def check_computed_once(fire, long_answer):
    for _ in range(4):  # a busy machine may look too late
        in_time, got, metrics = under_fire(fire)
        assert got == long_answer
        if in_time:
            assert metrics == {"computed": PROMPT, "resent": 1, "router": 1, "dropped": 0}, metrics
            return
    raise AssertionError("always too late: the prompt is too short for this machine")


@pytest.fixture(scope="module")
def long_answer():
    with Watched() as c:
        answer = stream(c, long_prompt(1))
        assert c.computed() == PROMPT
        return answer


def test_decode_node_dies_while_the_prompt_is_computed(long_answer):
    check_computed_once(lambda c, victim, progress: c.nodes[victim].kill(), long_answer)


def test_decode_node_dies_before_it_confirms(long_answer):
    """Stopped first, so that the first token comes from P while D has not all pages."""
    def fire(c, victim, progress):
        c.nodes[victim].proc.send_signal(signal.SIGSTOP)
        wait_until("the first token", lambda: progress, 120)
        c.nodes[victim].kill()

    check_computed_once(fire, long_answer)


def test_prefill_pool_full_of_what_nobody_takes():
    """D stands still: P's pages fill with prompts that wait for it, P starts no more and says so, the rest waits in the router."""
    requests = [body(i, 30, prompt=[1] + [5 + (i * 17 + j * j) % 280 for j in range(199)]) for i in range(8)]
    lease = ["--lease", "60s"]
    with Cluster(MODEL, node=[*lease, "--prefix-cache", "off"], prefill_opts=["--kv-bytes", "128KiB"], router_opts=lease) as c:
        want = [stream(c, r) for r in requests]
        c.wait_idle()
        d = c.nodes["decode-0"].proc
        d.send_signal(signal.SIGSTOP)
        full = threading.Event()
        try:
            def late(r):
                full.wait(60 * SLOW)
                return stream(c, r)

            def wake():
                wait_until("the load report to say so", lambda: c.metric_sum("baton_node_pages_short", node="prefill-0") == 1)
                full.set()
                wait_until("the rest to wait in the router", lambda: c.metric_sum("baton_requests_waiting") >= 3)
                d.send_signal(signal.SIGCONT)

            *got, _ = parallel([*[lambda r=r: stream(c, r) for r in requests[:4]], *[lambda r=r: late(r) for r in requests[4:]], wake])
        finally:
            d.send_signal(signal.SIGCONT)
        assert got == want
        c.wait_idle(20)
        assert c.metric_sum("baton_node_pages_short", node="prefill-0") == 0
