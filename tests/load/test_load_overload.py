"""Overload: what is admitted is answered as ever, what is refused is told when to come back, nothing grows, and seconds
later all is as before. How long first tokens took is printed: tests/unit/router/test_router_forecast.c checks it in
virtual time."""

import json
import os
import re
import signal
import threading
import time

from cluster import SLOW, Cluster, parallel, tiny, wait_until

MODEL = tiny("tiny-long")
SECONDS = float(os.environ.get("BATON_LOAD_SECONDS", "8"))
CLIENTS = 48
LIMIT = 0.4 * SLOW


def prompt(i):
    return [1] + [30 + (i * 17 + j * 7) % 250 for j in range(2000 + i % 5)]


def body(i, **params):
    return {"prompt": prompt(i), "max_tokens": 12, "temperature": 0, "ignore_eos": True, **params}


def memory_kb(daemon):
    with open(f"/proc/{daemon.proc.pid}/status", encoding="utf-8") as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


def text(data):
    return json.loads(data)["choices"][0]["text"]


def served(c, i):
    """Prompt i's answer. On a machine that others load, the speed just measured may forbid even it, until it is old news."""
    def answer():
        status, _, data = c.http("/v1/completions", body(i))
        assert status in (200, 429), (status, data)
        return text(data) if status == 200 else None
    return wait_until("an answer from an idle cluster", answer, 60)


def refused(c):
    return sum(c.metric_sum("baton_requests_refused_total", reason=r) for r in ("max_ttft", "queue_full"))


def flood(c, seconds, on_answer, headers=lambda i: {}):
    """So many clients at once, each asking again at once, whatever it was told."""
    end = time.monotonic() + seconds

    def client(k):
        i = k
        while time.monotonic() < end:
            t = time.monotonic()
            status, head, data = c.http("/v1/completions", body(i % 7), headers=headers(k))
            on_answer(i % 7, status, {n.lower(): v for n, v in head.items()}, data, time.monotonic() - t)
            i += CLIENTS
            if status == 429:
                time.sleep(0.3)  # ten times what the cluster can take, and no busy loop of clients beside it

    parallel([lambda k=k: client(k) for k in range(CLIENTS)])


class Watch(threading.Thread):
    """Samples the queue and the memory of all daemons."""

    def __init__(self, c):
        super().__init__()
        self.c, self.stop = c, threading.Event()
        self.waiting, self.memory = [0], {d.name: [memory_kb(d)] for d in c.daemons()}

    def run(self):
        while not self.stop.wait(0.1):
            self.waiting.append(self.c.metric_sum("baton_requests_waiting"))
            for d in self.c.daemons():
                self.memory[d.name].append(memory_kb(d))

    def grown_kb(self, name):
        """By how much the second half of the time needed more than the first did."""
        m = self.memory[name]
        return max(m[len(m) // 2:]) - max(m[:len(m) // 2 + 1])


def in_time(c, limit):
    """The share of first tokens that came within the limit."""
    bucket = next(v for k, v in c.metrics().items()
                  if k.startswith("baton_time_to_first_token_seconds_bucket") and float(re.search(r'le="([^"]+)"', k).group(1)) == limit)
    return bucket / c.metric_sum("baton_time_to_first_token_seconds_count")


def test_overload():
    buckets = ",".join(f"{LIMIT * x:.3f}" for x in (0.5, 1, 1.1, 2))
    with Cluster(MODEL, router_opts=["--max-ttft", f"{int(LIMIT * 1000)}ms", "--queue-max", "32", "--buckets-ttft", buckets],
                 node=["--prefix-cache", "off"]) as c:
        right = [served(c, i) for i in range(7)]
        refused_before = refused(c)
        answers, refusals = [], []

        def on_answer(i, status, head, data, seconds):
            if status == 200:
                assert text(data) == right[i]
                answers.append(seconds)
            else:
                assert status == 429, (status, data)
                assert int(head["retry-after"]) >= 1
                assert json.loads(data)["error"]["code"] == "overloaded"
                refusals.append(seconds)

        watch = Watch(c)
        watch.start()
        try:
            flood(c, SECONDS, on_answer)
        finally:
            watch.stop.set()
            watch.join()
        assert answers and refusals, (len(answers), len(refusals))
        assert max(watch.waiting) <= 32
        assert refused(c) - refused_before == len(refusals)
        assert c.metric_sum("baton_requests_refused_total", reason="queue_timeout") == 0
        for name in watch.memory:
            assert watch.grown_kb(name) < 32 * 1024, (name, watch.memory[name])
        shares = [f"{100 * in_time(c, round(LIMIT * x, 3)):.0f} % within {x}" for x in (1, 1.1, 2)]
        # Idle at once: nothing is held, requests are served as before.
        c.wait_idle(5)
        assert served(c, 0) == right[0]
        c.check_logs()
        print(f"{len(answers)} answers, {len(refusals)} refused, at most {max(watch.waiting):.0f} waited; first tokens: "
              f"{', '.join(shares)} of the limit; memory, MiB: " +
              ", ".join(f"{n} {m[0] // 1024} to {max(m) // 1024}" for n, m in watch.memory.items()))


def test_keys_take_turns(tmp_path):
    """One key floods; another, that asks for one thing at a time, hardly notices."""
    keys = tmp_path / "keys"
    keys.write_text("greedy\nmodest\n")
    with Cluster(MODEL, key="modest", router_opts=["--api-key-file", os.fspath(keys), "--queue-max", "256"],
                 decode_opts=["--max-batch", "2"]) as c:
        times = {"greedy": [], "modest": []}
        stop = threading.Event()

        def modest():
            while not stop.is_set():
                t = time.monotonic()
                status, _, data = c.http("/v1/completions", body(0))
                assert status == 200, data
                times["modest"].append(time.monotonic() - t)

        flooding = threading.Thread(target=flood, args=(c, 3, lambda *a: times["greedy"].append(a[-1]),
                                                        lambda k: {"authorization": "Bearer greedy"}))
        flooding.start()
        wait_until("a queue", lambda: c.metric_sum("baton_requests_waiting") > 10)
        asking = threading.Thread(target=modest)
        asking.start()
        flooding.join()
        stop.set()
        asking.join()
        greedy, one = sorted(times["greedy"]), sorted(times["modest"])
        assert len(one) > 3
        assert one[len(one) // 2] < greedy[len(greedy) // 2] / 2, (one, greedy[len(greedy) // 2])
        c.wait_idle(5)


def test_reaping_needs_no_arrivals():
    """Nodes stop answering with a full queue, and nobody asks any more: all who wait are told, and all is free again."""
    with Cluster(MODEL, router_opts=["--no-node-grace", "500ms", "--migrate-grace", "500ms"]) as c:
        def ask():
            out.append(c.http("/v1/completions", body(0, max_tokens=4000))[0])

        out = []
        clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for d in c.nodes.values():
            d.proc.send_signal(signal.SIGSTOP)
        for t in clients:
            t.start()
        for t in clients:
            t.join()
        assert len(out) == CLIENTS and set(out) <= {429, 503}, out
        wait_until("nothing to run or wait", lambda: c.metric_sum("baton_requests_running") == 0
                   and c.metric_sum("baton_requests_waiting") == 0)
        for d in c.nodes.values():
            d.proc.send_signal(signal.SIGCONT)
        c.wait_ready()
        c.wait_idle()
        assert c.http("/v1/completions", body(1))[0] == 200
