"""A prefill node that takes much longer over a prompt than a transfer may stand still: it is served, once, all the same."""

import json

import pytest

from cluster import Cluster
from fire import MODEL, stream

DEADLINE = 3
PATIENT = ["--lease", "120s"]
LONG = {"prompt": [1] + [30 + (7 * j) % 250 for j in range(30000)], "max_tokens": 30, "temperature": 1, "seed": 5,
        "ignore_eos": True, "logprobs": 1}


def test_a_prompt_that_takes_longer_than_the_transfer_deadline(tmp_path):
    """The decode node has nearly all of it in its prefix cache, the prefill node nothing: no page comes until the end."""
    log = tmp_path / "requests.json"
    with Cluster(MODEL, node=[*PATIENT, "--transfer-deadline", f"{DEADLINE}s"],
                 prefill_opts=["--prefix-cache", "off", "--chunk-tokens", "64"], router_opts=[*PATIENT, "--request-log", str(log)]) as c:
        want = stream(c, LONG)
        c.wait_idle(30)
        assert stream(c, LONG) == want
        c.wait_idle(30)
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        first, again = (line["sequences"][0]["attempts"] for line in lines)
        assert len(first) == len(again) == 1, f"it was given up and begun again: {first} {again}"
        print(f"computed in {again[0]['prefill_ms'] / 1000:.1f} s, {again[0]['transferred_tokens']} tokens sent at the end of it")
        if again[0]["prefill_ms"] < 1000 * DEADLINE:
            pytest.skip("this machine computes it within the deadline")
        assert c.metric_sum("baton_requests_migrated_total") == 0
        c.check_logs()
