"""Huge requests come and go: the memory that they took comes back."""

import json
import os
import re

from cluster import Cluster, parallel, tiny, wait_until

BODIES = int(os.environ.get("BATON_LOAD_BODIES", "12"))


def memory_mib(daemon):
    with open(f"/proc/{daemon.proc.pid}/status", encoding="utf-8") as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1)) // 1024


def test_huge_bodies():
    with Cluster(tiny("tiny-long")) as c:
        right = c.complete([1, 40], max_tokens=4, temperature=0)["choices"]
        before = memory_mib(c.router)
        # Token ids are the worst: each is an object of the JSON parser. Texts: one long string.
        for prompt in ([5] * 1000000, "a relay has a baton. " * 150000):
            size = len(json.dumps({"prompt": prompt}))
            answers = parallel([lambda: c.http("/v1/completions", {"prompt": prompt, "max_tokens": 1}) for _ in range(BODIES)])
            assert {a[0] for a in answers} == {400}, [a[:1] for a in answers]
            peak = memory_mib(c.router)
            wait_until(f"memory to come back from {peak} MiB to about {before}", lambda: memory_mib(c.router) < before + 32, 30)
            print(f"{BODIES} bodies of {size >> 20} MiB: {before} MiB before, {peak} right after, {memory_mib(c.router)} later")
        assert c.complete([1, 40], max_tokens=4, temperature=0)["choices"] == right
        c.check_logs()
