"""The request log of a real cluster, and `baton trace` on it."""

import json
import os
import re
import signal
import subprocess
import threading

from cluster import BIN, Cluster, tiny, wait_until

BATON = os.path.join(BIN, "baton")


def trace(*args, **env):
    return subprocess.run([BATON, "trace", *args], capture_output=True, text=True, timeout=30, check=False,
                          env={**os.environ, **env})


def lines(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def line_of(path, request_id):
    def look():
        if not os.path.exists(path):  # After a rotation the next line makes it.
            return None
        return next((o for o in lines(path) if o["request_id"] == request_id), None)

    return wait_until(f"{request_id} in the request log", look, 10)


def test_log_and_trace(tmp_path):
    log = str(tmp_path / "requests.jsonl")
    keys = tmp_path / "keys"
    keys.write_text("sesame alice\n", encoding="utf-8")
    with Cluster(tiny("llama"), prefill=1, decode=2, key="sesame", node=["--log-level", "debug"],
                 router_opts=["--request-log", log, "--api-key-file", str(keys)]) as c:
        body = {"prompt": "The relay begins here and goes on", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        status, _, answer = c.http("/v1/completions", body, headers={"x-request-id": "one", "traceparent": "00-a-b-01"})
        assert status == 200
        usage = json.loads(answer)["usage"]
        one = line_of(log, "one")
        seq = one["sequences"][0]
        assert one["traceparent"] == "00-a-b-01" and one["key"] == "alice" and one["endpoint"] == "/v1/completions"
        assert one["status"] == 200 and one["finish_reason"] == "length" and one["error"] is None
        assert one["prompt_tokens"] == usage["prompt_tokens"] and one["completion_tokens"] == 12
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"])
        assert seq["prefill"] == "prefill-0" and seq["decode"].startswith("decode-")
        assert seq["transferred_tokens"] == usage["prompt_tokens"] and seq["transferred_bytes"] > 0
        for field in ("queue_ms", "prefill_ms", "grant_ms", "transfer_ms", "transfer_tail_ms", "decode_ms"):
            assert seq[field] >= 0, field
        assert 0 < seq["first_token_at_ms"] <= seq["last_token_at_ms"] <= one["duration_ms"]
        assert seq["itl_ms"]["p50"] <= seq["itl_ms"]["p99"] <= seq["itl_ms"]["max"]
        assert seq["n_attempts"] == 1 and seq["attempts"][0]["decode_batch"] >= 1

        r = trace("one", "--log", log)
        assert r.returncode == 0, r.stderr
        for word in ("one", "alice", "tokenize", "prefill", "grant wait", "transfer", "decode", "first token", "prefill-0 -> decode-"):
            assert word in r.stdout, r.stdout
        assert "\x1b" not in r.stdout and max(map(len, r.stdout.splitlines())) <= 80
        assert trace("cmpl-one", BATON_REQUEST_LOG=log).stdout == r.stdout
        narrow = trace("one", "--log", log, COLUMNS="40")
        assert narrow.returncode == 0 and max(len(x) for x in narrow.stdout.splitlines() if "|" in x) <= 40

        # A trace context leads from the client's trace to the lines of both nodes.
        traced = "4bf92f3577b34da6a3ce929d0e0e4736"
        parent = f"00-{traced}-00f067aa0ba902b7-01"
        assert c.http("/v1/completions", body, headers={"x-request-id": "traced", "traceparent": parent})[0] == 200
        assert line_of(log, "traced")["traceparent"] == parent
        for leg in ("prefill", "decode"):
            name = line_of(log, "traced")["sequences"][0][leg]
            c.nodes[name].find(rf"req=traced ticket [0-9a-f]{{8}}: \d+ tokens, trace {traced}\b")
            assert "trace" not in c.nodes[seq[leg]].find(r"req=one (ticket [0-9a-f]{8}: .*)").group(1), "that was none"

        # Refused, and given up by the client.
        assert c.http("/v1/completions", {"prompt": "a", "top_p": 7}, headers={"x-request-id": "bad"})[0] == 400
        assert line_of(log, "bad")["status"] == 400 and "top_p" in line_of(log, "bad")["error"]
        assert "top_p" in trace("bad", "--log", log).stdout

        # Rotation.
        os.rename(log, log + ".1")
        c.router.proc.send_signal(signal.SIGHUP)
        c.router.find("reopened")
        c.http("/v1/completions", body, headers={"x-request-id": "two"})
        assert line_of(log, "two")["completion_tokens"] == 12
        assert [o["request_id"] for o in lines(log + ".1")] == ["one", "traced", "bad"]
        assert "sesame" not in open(log, encoding="utf-8").read() + open(log + ".1", encoding="utf-8").read()
        assert c.metric_sum("baton_request_log_lines_total") == 4 and c.metric_sum("baton_request_log_lost_total") == 0


def test_rotation_without_a_log_harms_nobody():
    with Cluster(tiny("llama")) as c:
        c.router.proc.send_signal(signal.SIGHUP)
        c.router.find("no --request-log")
        assert c.http("/live")[0] == 200


def test_a_lost_node_is_told(tmp_path):
    """The attempt on the node that was killed is in the log, with the reason, and in the drawing."""
    log = str(tmp_path / "requests.jsonl")
    with Cluster(tiny("tiny-long"), prefill=1, decode=2, node=["--log-level", "debug"],
                 router_opts=["--request-log", log, "--log-level", "debug"]) as c:
        result = {}

        def ask():
            result["answer"] = c.http("/v1/completions", {"prompt": "a b c", "max_tokens": 6000, "ignore_eos": True},
                                      headers={"x-request-id": "moved"})

        t = threading.Thread(target=ask)
        t.start()
        victim = wait_until("a decode node to run it", lambda: next(
            (n for n in c.nodes if n.startswith("decode") and c.metric_sum("baton_node_running", node=n) > 0), None))
        c.nodes[victim].kill()
        t.join()
        assert result["answer"][0] == 200
        seq = line_of(log, "moved")["sequences"][0]
        first, last = seq["attempts"][0], seq["attempts"][-1]
        assert seq["n_attempts"] == len(seq["attempts"]) == 2
        assert first["decode"] == victim and first["reason"] == "lost" and victim in first["why"]
        assert last["decode"] != victim and last["end_at_ms"] is None and last["first_index"] > 0
        assert first["end_at_ms"] <= last["start_at_ms"]
        text = trace("moved", "--log", log).stdout
        assert "attempt 1: " in text and "attempt 2: " in text and "lost: " in text
        # Each node's log names the request beside its tickets.
        for name, node in c.nodes.items():
            tickets = re.findall(r" req=moved ticket (\w+): \d+ tokens", node.log())
            assert len(set(tickets)) == (2 if name == "prefill-0" else 1), (name, tickets)
        assert "moved: attempt 1 ended" in c.router.log()


def test_errors(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("", encoding="utf-8")
    for args, code, words in (
            (["x"], 2, "--log"), (["--log", str(empty)], 2, "request id"), (["x", "y", "--log", str(empty)], 2, "one request id"),
            (["x", "--log", str(tmp_path / "none")], 1, "none"), (["x", "--log", str(empty)], 1, 'no request "x"'),
            (["x", "--log", str(tmp_path)], 1, "irectory")):
        r = trace(*args, BATON_REQUEST_LOG="")
        assert r.returncode == code and words in r.stderr and not r.stdout, (args, r)
    r = subprocess.run([os.path.join(BIN, "baton-router"), "--model", tiny("llama"), "--listen", "127.0.0.1:0", "--sessions",
                        "127.0.0.1:0", "--request-log", str(tmp_path / "no" / "log")], capture_output=True, text=True, timeout=30, check=False)
    assert r.returncode == 1 and "--request-log" in r.stderr and "no/log" in r.stderr


def test_a_full_disk_costs_lines_only(tmp_path):
    log = str(tmp_path / "requests.jsonl")
    os.symlink("/dev/full", log)
    with Cluster(tiny("llama"), router_opts=["--request-log", log]) as c:
        for _ in range(5):
            c.complete("a", max_tokens=2)
        wait_until("lost lines to be counted", lambda: c.metric_sum("baton_request_log_lost_total") == 5)
        assert c.router.log().count("lines are lost") == 1
