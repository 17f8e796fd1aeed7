"""Overload: what is admitted is answered as ever and in time, what is refused is told when to come back, nothing grows."""

import json
import os
import re
import threading
import time

from cluster import SLOW, Cluster, tiny, wait_until

MODEL = tiny("tiny-long")
SECONDS = 6
CLIENTS = 48


def prompt(i):
    return [1] + [30 + (i * 17 + j * 7) % 250 for j in range(2000 + i % 5)]


def body(i, **params):
    return {"prompt": prompt(i), "max_tokens": 12, "temperature": 0, "ignore_eos": True, **params}


def memory_kb(daemon):
    with open(f"/proc/{daemon.proc.pid}/status", encoding="utf-8") as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


def text(data):
    return json.loads(data)["choices"][0]["text"]


def flood(c, seconds, on_answer, headers=lambda i: {}):
    """So many clients at once, each asking again at once, whatever it was told."""
    end = time.monotonic() + seconds

    def client(k):
        i = k
        while time.monotonic() < end:
            t = time.monotonic()
            status, head, data = c.http("/v1/completions", body(i % 7), headers=headers(k))
            on_answer(k, i % 7, status, {n.lower(): v for n, v in head.items()}, data, time.monotonic() - t)
            i += CLIENTS
            if status == 429:
                time.sleep(0.02)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(CLIENTS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def served(c, i):
    """Prompt i's answer. On a machine that others load, the speed just measured may forbid even it, until it is old news."""
    def answer():
        status, _, data = c.http("/v1/completions", body(i))
        assert status in (200, 429), (status, data)
        return text(data) if status == 200 else None
    return wait_until("an answer from an idle cluster", answer, 60)


def refused(c):
    return sum(c.metric_sum("baton_requests_refused_total", reason=r) for r in ("max_ttft", "queue_full"))


def test_overload():
    max_ttft = 0.4 * SLOW
    with Cluster(MODEL, router_opts=["--max-ttft", f"{int(max_ttft * 1000)}ms", "--queue-max", "32"],
                 node=["--prefix-cache", "off"]) as c:
        right = [served(c, i) for i in range(7)]
        refused_before = refused(c)
        before = memory_kb(c.router)
        answers, refusals, waiting = [], [], []
        stop = threading.Event()

        def watch():
            while not stop.is_set():
                waiting.append(c.metric_sum("baton_requests_waiting"))
                time.sleep(0.05)

        def on_answer(_, i, status, head, data, seconds):
            if status == 200:
                assert text(data) == right[i]
                answers.append(seconds)
            else:
                assert status == 429, (status, data)
                assert int(head["retry-after"]) >= 1
                assert json.loads(data)["error"]["code"] == "overloaded"
                refusals.append(seconds)

        watcher = threading.Thread(target=watch)
        watcher.start()
        failed = []

        def checked(*args):
            try:
                on_answer(*args)
            except BaseException as e:  # noqa: BLE001, raised below
                failed.append(e)

        flood(c, SECONDS, checked)
        stop.set()
        watcher.join()
        if failed:
            raise failed[0]
        assert answers and refusals, (len(answers), len(refusals))
        assert max(waiting) <= 32
        assert refused(c) - refused_before == len(refusals)
        assert c.metric_sum("baton_requests_refused_total", reason="queue_timeout") == 0
        # Idle at once: nothing is held, requests are served as before.
        c.wait_idle(5)
        assert served(c, 0) == right[0]
        assert memory_kb(c.router) < before + 64 * 1024
        c.check_logs()
        print(f"{len(answers)} answers, the slowest {max(answers):.2f} s; {len(refusals)} refused, at most {max(waiting):.0f} waited")


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
