"""A prompt is computed once, whatever becomes of its decode node; a node whose time to drain is over gives back what it has."""

import signal

import pytest

from cluster import SLOW, Cluster, parallel, wait_until
from fire import MODEL, body, stream

LONG = 6000  # tokens


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
