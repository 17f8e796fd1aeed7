"""A real model, where it lies in a cache already: one chat over each transport. The rest is in tests/long."""

import time

import pytest

from cluster import Cluster, smollm2


def test_smollm2_answers():
    model = smollm2()
    if model is None:
        pytest.skip("SmolLM2 is not in a cache: `baton up` or tests/run.sh --long fetches it")
    start = time.monotonic()
    with Cluster(model, threads=2, kv_bytes="128MiB") as c:
        print(f"ready {time.monotonic() - start:.2f} s after the first exec")
        r = c.json("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 2+2?"}],
                                            "max_tokens": 16, "temperature": 0, "timings": True}, timeout=200)
        assert "4" in r["choices"][0]["message"]["content"], r
        assert r["usage"]["transferred_tokens"] == r["usage"]["prompt_tokens"]
        print(r["choices"][0]["message"]["content"], r["timings"])
        c.wait_idle()
        c.check_logs()
