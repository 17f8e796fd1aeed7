"""Everything at once, from a seed: mixed requests, clients that leave, nodes that die, freeze, drain and return.

BATON_CHAOS_SEED and BATON_CHAOS_SECONDS choose another run. An answer that arrives must be the undisturbed one; an
error is allowed only where no pair was left; at the end nothing may be held anywhere.
"""

import json
import os
import random
import signal
import socket
import threading
import time

from cluster import SLOW, Cluster, tiny, wait_until

SEED = int(os.environ.get("BATON_CHAOS_SEED", "1"))
SECONDS = float(os.environ.get("BATON_CHAOS_SECONDS", "12"))
N_REQUESTS = 24


def requests():
    rng = random.Random(20 + SEED)
    out = []
    for i in range(N_REQUESTS):
        shared = [1] + [40 + j % 100 for j in range(64)] if i % 3 == 0 else [1]  # some prefixes are cached
        prompt = shared + [rng.randrange(5, 288) for _ in range(rng.choice((1, 15, 16, 40, 200, 700)))]
        out.append({"prompt": prompt, "max_tokens": rng.choice((1, 2, 30, 300, 1500)), "n": rng.choice((1, 1, 1, 3)),
                    "temperature": rng.choice((0, 1)), "seed": i, "logprobs": 2, "ignore_eos": rng.random() < 0.7,
                    "stop": ["th"] if rng.random() < 0.2 else None})
    return out


def leave_early(cluster, request, rng):
    host, port = cluster.address.rsplit(":", 1)
    body = json.dumps({**request, "stream": True}).encode()
    with socket.create_connection((host, int(port)), timeout=60 * SLOW) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(rng.random() * 0.1)


class Chaos:
    def __init__(self, cluster, answers):
        self.c = cluster
        self.answers = answers
        self.end = time.monotonic() + SECONDS * SLOW
        self.served = self.refused = self.left = self.events = 0
        self.wrong = []

    def client(self, number):
        rng = random.Random(SEED * 1000 + number)
        while time.monotonic() < self.end and not self.wrong:
            i = rng.randrange(N_REQUESTS)
            request = requests()[i]
            if rng.random() < 0.25:
                leave_early(self.c, request, rng)
                self.left += 1
                continue
            status, _, data = self.c.http("/v1/completions", request, timeout=120)
            if status == 200:
                self.served += 1
                if json.loads(data)["choices"] != self.answers[i]:
                    self.wrong.append((i, data))
            elif status in (429, 503):
                self.refused += 1
                assert json.loads(data)["error"]["message"]
            else:
                self.wrong.append((i, status, data))

    def disturb(self):
        rng = random.Random(SEED)
        frozen = {}
        while time.monotonic() < self.end and not self.wrong:
            time.sleep(rng.random() * 0.6)
            name = rng.choice(sorted(self.c.nodes))
            node = self.c.nodes[name]
            role, number = name.split("-")
            what = rng.choice(("kill", "kill", "freeze", "drain"))
            self.events += 1
            if name in frozen or node.proc.poll() is not None:
                continue
            if what == "freeze":
                node.proc.send_signal(signal.SIGSTOP)
                frozen[name] = node
                threading.Timer(rng.random() * 3, lambda n=name: frozen.pop(n).proc.send_signal(signal.SIGCONT)).start()
                continue
            if what == "drain":
                node.proc.send_signal(signal.SIGTERM)
                time.sleep(rng.random() * 0.2)
            node.kill()
            self.c.start_node(role, int(number))
        wait_until("the frozen nodes to wake", lambda: not frozen)


def test_chaos():
    with Cluster(tiny("tiny-long")) as c:
        answers = [c.json("/v1/completions", r)["choices"] for r in requests()]
    options = ["--lease", "1s", "--chunk-tokens", "64"]
    with Cluster(tiny("tiny-long"), prefill=2, decode=2, node=options, kv_bytes="8MiB", router_opts=["--lease", "1s"]) as c:
        chaos = Chaos(c, answers)
        threads = [threading.Thread(target=chaos.client, args=(i,)) for i in range(8)]
        threads.append(threading.Thread(target=chaos.disturb))
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        print(f"seed {SEED}: {chaos.served} served, {chaos.refused} refused, {chaos.left} clients left, {chaos.events} events, "
              f"{c.metric_sum('baton_requests_migrated_total'):.0f} migrated")
        assert not chaos.wrong, chaos.wrong[0]
        assert chaos.served > 20
        wait_until("four nodes", lambda: sum(n["state"] == "ready" for n in c.cluster()["nodes"]) == 4)
        c.wait_ready()
        for i, r in enumerate(requests()):
            assert c.json("/v1/completions", r)["choices"] == answers[i], f"request {i} afterwards"
        c.wait_idle(20)
        for d in c.daemons():
            assert "Sanitizer" not in d.log() and "runtime error" not in d.log() and "assert" not in d.log().lower(), d.log()[-3000:]
