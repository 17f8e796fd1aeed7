"""Nothing happens for many leases; then a request is served at its first attempt, whatever was lost meanwhile."""

import http.client
import json
import time

from cluster import Cluster, tiny, wait_until

QUIET = 6  # seconds: four leases, and longer than idle connections are kept
# A lease that a busy machine does not cost: each request must be served at its first attempt.
TIMES = ["--lease", "1500ms", "--heartbeat", "100ms"]
BODY = {"prompt": [1, 40, 41, 42], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def attempts(path):
    with open(path, encoding="utf-8") as f:
        return [s["n_attempts"] for line in f for s in json.loads(line)["sequences"]]


def ask(connection):
    connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_after_a_long_time(tmp_path):
    log = str(tmp_path / "requests.jsonl")
    with Cluster(tiny("tiny-long"), prefill=2, decode=2, node=TIMES,
                 router_opts=[*TIMES, "--idle-timeout", "2s", "--request-log", log]) as c:
        right = c.complete(**BODY)["choices"]
        kept = http.client.HTTPConnection(*c.address.rsplit(":", 1))
        assert ask(kept)[1]["choices"] == right
        time.sleep(QUIET)
        # A new connection, and one that the router has closed meanwhile: clients dial again by themselves.
        assert c.complete(**BODY)["choices"] == right
        try:
            status, answer = ask(kept)
        except (http.client.HTTPException, OSError):
            kept.close()
            status, answer = ask(kept)
        assert status == 200 and answer["choices"] == right
        kept.close()
        assert c.metric_sum("baton_session_up") == 4
        wait_until("the request log", lambda: len(attempts(log)) >= 3)
        assert set(attempts(log)) == {1}
        assert c.metric_sum("baton_requests_migrated_total") == 0
        c.check_logs()


def test_after_a_quiet_loss(tmp_path):
    """A node dies and is replaced while nothing runs: no dead connection is in the way of the next request."""
    log = str(tmp_path / "requests.jsonl")
    with Cluster(tiny("tiny-long"), node=TIMES, router_opts=[*TIMES, "--request-log", log]) as c:
        right = c.complete(**BODY)["choices"]
        for role in ("decode", "prefill"):
            c.nodes[f"{role}-0"].kill()
            wait_until("its loss to be known", lambda: c.metric_sum("baton_session_up") == 1)
            c.start_node(role, 0)
            c.wait_ready()
            time.sleep(3)  # two leases
            assert c.complete(**BODY)["choices"] == right
        wait_until("the request log", lambda: len(attempts(log)) == 3)
        assert set(attempts(log)) == {1}
