"""Things die, freeze, disagree or drain under load: answers stay what they were, or the error is clear; nothing hangs."""

import json
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest

from cluster import SLOW, Cluster, parallel, tiny, wait_until
from fire import GREEDY, IDS, LEASE, MODEL, body, stream, under_fire, undisturbed_answers


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_answers()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_kill_one_of_two(undisturbed, victim):
    with Cluster(MODEL, prefill=2, decode=2, node=LEASE) as c:
        under_fire(c, undisturbed, lambda: c.nodes[victim].kill())
        assert (c.metric_sum("baton_requests_migrated_total") > 0) == (victim == "decode-0")
        wait_until("the dead node to be gone", lambda: victim not in {n["name"] for n in c.cluster()["nodes"] if n["state"] == "ready"})
        assert c.metric_sum("baton_session_up", node=victim) == 0
        # it comes back under its name
        c.start_node(victim.split("-")[0], int(victim.split("-")[1]))
        c.wait_ready()
        assert stream(c, body(3)) == undisturbed[3]


def test_kill_prefill_while_prompts_wait(undisturbed):
    """The kill comes before any token: prompts queued and half computed at the dead P."""
    with Cluster(MODEL, prefill=2, decode=1, node=[*LEASE, "--chunk-tokens", "16"]) as c:
        requests = [body(i) for i in range(8)] * 3
        timer = threading.Timer(0.03, c.nodes["prefill-0"].kill)
        timer.start()
        got = parallel([lambda r=r: stream(c, r) for r in requests])
        timer.join()
        assert got == undisturbed * 3
        c.wait_idle(20)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kill_many_times(undisturbed, role):
    """Nodes of one role die and return all the time."""
    with Cluster(MODEL, prefill=2, decode=2, node=LEASE) as c:
        stop = threading.Event()
        errors = []

        def reaper():
            try:
                for i in range(6):
                    name = f"{role}-{i % 2}"
                    if stop.wait(0.15):
                        break
                    c.nodes[name].kill()
                    c.start_node(role, i % 2)
                    c.wait_ready()
            except BaseException as e:  # noqa: BLE001, raised below
                errors.append(e)

        thread = threading.Thread(target=reaper)
        thread.start()
        try:
            for _ in range(3):
                assert parallel([lambda i=i: stream(c, body(i)) for i in range(8)]) == undisturbed
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]
        c.wait_idle(20)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_freeze_and_wake(undisturbed, role):
    with Cluster(MODEL, prefill=2, decode=2, node=LEASE, router_opts=LEASE) as c:
        victim = c.nodes[f"{role}-0"]
        try:
            under_fire(c, undisturbed, lambda: victim.proc.send_signal(signal.SIGSTOP))
        finally:
            victim.proc.send_signal(signal.SIGCONT)
        c.wait_ready()
        assert parallel([lambda i=i: stream(c, body(i)) for i in range(8)]) == undisturbed
        c.wait_idle(20)


def test_kill_the_only_decode_node():
    with Cluster(MODEL, node=LEASE, router_opts=["--queue-timeout", "2s"]) as c:
        progress = []
        failure = []

        def one():
            try:
                stream(c, body(1, max_tokens=60000), progress)
            except BaseException as e:  # noqa: BLE001, looked at below
                failure.append(e)

        thread = threading.Thread(target=one)
        thread.start()
        wait_until("the stream to begin", lambda: len(progress) > 3)
        c.nodes["decode-0"].kill()
        start = time.monotonic()
        thread.join(60 * SLOW)
        assert not thread.is_alive(), "the client hangs"
        print(f"the error came {time.monotonic() - start:.2f} s after the kill: {failure}")
        assert failure, "a truncated stream must not look complete"
        assert "error" in progress[-1], "the last event says why"
        assert progress[-1]["error"]["message"]
        wait_until("503", lambda: c.http("/health")[0] == 503)
        start = time.monotonic()
        status, _, out = c.http("/v1/completions", {"prompt": IDS, "max_tokens": 5})
        assert status == 503 and json.loads(out)["error"]["message"], (status, out)
        print(f"{status} after {time.monotonic() - start:.2f} s: {out.decode()}")
        c.start_node("decode", 0)
        c.wait_ready()
        assert c.complete(IDS, max_tokens=5, **GREEDY)["usage"]["completion_tokens"] == 5
        c.wait_idle(20)


def test_router_dies_and_returns(undisturbed):
    with Cluster(MODEL, node=LEASE) as c:
        progress = []
        thread = threading.Thread(target=lambda: pytest.raises(Exception, stream, c, body(1, max_tokens=60000), progress))
        thread.start()
        wait_until("the stream to begin", lambda: len(progress) > 3)
        c.router.kill()
        thread.join(60 * SLOW)
        assert not thread.is_alive()
        c.start_router(listen=c.address, sessions=c.sessions)
        c.wait_ready()
        c.wait_idle(20)
        assert stream(c, body(3)) == undisturbed[3]


def test_sigterm_drains_a_node(undisturbed):
    """A draining node finishes what it has and leaves with exit code 0; nothing changes for the clients."""
    with Cluster(MODEL, prefill=2, decode=2) as c:
        codes = []

        def fire():
            for name in ("prefill-0", "decode-0"):
                c.nodes[name].proc.send_signal(signal.SIGTERM)

        under_fire(c, undisturbed, fire)
        for name in ("prefill-0", "decode-0"):
            codes.append(c.nodes[name].proc.wait(60 * SLOW))
        assert codes == [0, 0]
        assert stream(c, body(2)) == undisturbed[2]


def test_sigterm_drains_the_router(undisturbed):
    with Cluster(MODEL) as c:
        progress = []
        result = []
        thread = threading.Thread(target=lambda: result.append(stream(c, body(1), progress)))
        thread.start()
        wait_until("the stream to begin", lambda: len(progress) > 3)
        c.router.proc.send_signal(signal.SIGTERM)
        thread.join(60 * SLOW)
        assert result == [undisturbed[1]], "admitted streams finish"
        assert c.router.proc.wait(60 * SLOW) == 0


def test_drain_timeout_ends_streams_with_an_error():
    with Cluster(MODEL, router_opts=["--drain-timeout", "300ms"]) as c:
        progress = []
        thread = threading.Thread(target=lambda: pytest.raises(Exception, stream, c, body(1, max_tokens=60000), progress))
        thread.start()
        wait_until("the stream to begin", lambda: len(progress) > 3)
        c.router.proc.send_signal(signal.SIGTERM)
        thread.join(60 * SLOW)
        assert "shutting down" in progress[-1]["error"]["message"], progress[-1]
        assert c.router.proc.wait(20 * SLOW) == 0


def test_second_sigterm_quits():
    with Cluster(MODEL) as c:
        progress = []
        thread = threading.Thread(target=lambda: pytest.raises(Exception, stream, c, body(1, max_tokens=60000), progress))
        thread.start()
        wait_until("the stream to begin", lambda: len(progress) > 3)
        start = time.monotonic()
        for d in c.daemons():
            d.proc.send_signal(signal.SIGTERM)
            d.find("draining|stopped|drained")  # two pending signals would be one
            d.proc.send_signal(signal.SIGTERM)
        for d in c.daemons():
            d.proc.wait(20 * SLOW)
        thread.join(60 * SLOW)
        print(f"everything was down after {time.monotonic() - start:.2f} s")


def test_different_page_tokens_are_never_paired():
    with Cluster(MODEL, wait=False, prefill_opts=["--page-tokens", "16"], decode_opts=["--page-tokens", "32"]) as c:
        def told():
            nodes = c.cluster()["nodes"]
            return len(nodes) == 2 and any("mismatch" in n["state"] for n in nodes) and nodes

        nodes = wait_until("the mismatch to be told", told)
        assert {n["role"]: n["page_tokens"] for n in nodes} == {"prefill": 16, "decode": 32}
        state = next(n["state"] for n in nodes if "mismatch" in n["state"])
        assert "16" in state and "32" in state, state
        status, _, out = c.http("/v1/completions", {"prompt": IDS, "max_tokens": 5})
        assert status == 503 and json.loads(out)["error"]["message"]
        assert c.http("/health")[0] == 503
        assert "16" in c.router.log() and "32" in c.router.log()
        c.start_node("decode", 1, extra=["--page-tokens", "16"])
        wait_until("the matching pair", lambda: c.http("/health")[0] == 200)
        assert c.complete(IDS, max_tokens=5, **GREEDY)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("option,values", [("--kv-dtype", ("f32", "f16")), ("--kv-dtype", ("fp8", "bf16")), ("--numerics", ("cpu-f32", "cpu-int8")),
                                           ("--numerics", ("cpu-int8", "cpu-f32")), ("--numerics", ("cpu-f32", "cpu-bf16"))])
def test_other_mismatches(option, values):
    with Cluster(MODEL, wait=False, prefill_opts=[option, values[0]], decode_opts=[option, values[1]]) as c:
        state = wait_until("the mismatch", lambda: next((n["state"] for n in c.cluster()["nodes"] if "mismatch" in n["state"]), None))
        assert all(v in state for v in values), state
        status, _, out = c.http("/v1/completions", {"prompt": IDS, "max_tokens": 5})
        assert status == 503 and json.loads(out)["error"]["message"]
        c.start_node("decode", 1, extra=[option, values[0]])
        wait_until("the matching pair", lambda: c.http("/health")[0] == 200)
        assert c.complete(IDS, max_tokens=5, **GREEDY)["usage"]["completion_tokens"] == 5


def test_another_model_is_never_paired():
    with Cluster(MODEL, wait=False, decode=0) as c:
        c.model = tiny("llama")
        c.start_node("decode", 0)
        state = wait_until("the mismatch", lambda: next((n["state"] for n in c.cluster()["nodes"] if "mismatch" in n["state"]), None))
        fingerprints = {n["fingerprint"] for n in c.cluster()["nodes"]}
        assert len(fingerprints) == 2 and any(f in state for f in fingerprints), state
        assert c.http("/health")[0] == 503


def test_queue_timeout_and_full_queue():
    with Cluster(MODEL, prefill=1, decode=0, wait=False, router_opts=["--queue-timeout", "1s"]) as c:
        status, _, out = c.http("/v1/completions", {"prompt": IDS, "max_tokens": 5})
        assert status == 503, (status, out)


def test_health_endpoints_of_daemons():
    with Cluster(MODEL, node=["--health", "127.0.0.1:0"]) as c:
        for name in ("prefill-0", "decode-0"):
            url = c.nodes[name].find(r"health.*listening on (http://\S+)").group(1)
            for path in ("/live", "/ready", "/metrics"):
                with urllib.request.urlopen(url + path, timeout=30) as r:
                    text = r.read().decode()
                    assert r.status == 200
            assert "baton_kv_pages" in text
            with pytest.raises(urllib.error.HTTPError) as e:
                urllib.request.urlopen(url + "/live", data=b"x", timeout=30)
            assert e.value.code == 405 and e.value.headers["allow"] == "GET, HEAD"
