"""What every daemon tells Prometheus: names, types, labels, valid text, and numbers that fit what was asked."""

import re
import urllib.request

import pytest

from cluster import Cluster, tiny, wait_until

HISTOGRAM, COUNTER, GAUGE = "histogram", "counter", "gauge"

# Names that tools hold on to, and where they must be.
ROUTER = {
    "baton_time_to_first_token_seconds": HISTOGRAM, "baton_inter_token_latency_seconds": HISTOGRAM,
    "baton_request_seconds": HISTOGRAM, "baton_queue_seconds": HISTOGRAM, "baton_prefill_seconds": HISTOGRAM,
    "baton_kv_transfer_seconds": HISTOGRAM, "baton_requests_total": COUNTER, "baton_requests_refused_total": COUNTER,
    "baton_requests_migrated_total": COUNTER, "baton_requests_running": GAUGE, "baton_requests_waiting": GAUGE,
    "baton_prompt_tokens_total": COUNTER, "baton_generated_tokens_total": COUNTER, "baton_prefix_cached_tokens_total": COUNTER,
    "baton_kv_transferred_tokens_total": COUNTER, "baton_kv_transferred_bytes_total": COUNTER,
    "baton_kv_transfer_failures_total": COUNTER, "baton_kv_pages": GAUGE, "baton_session_up": GAUGE,
}
NODE = {
    "baton_batch_tokens": HISTOGRAM, "baton_requests_running": GAUGE, "baton_requests_waiting": GAUGE,
    "baton_prompt_tokens_total": COUNTER, "baton_generated_tokens_total": COUNTER, "baton_prefix_cached_tokens_total": COUNTER,
    "baton_kv_transfer_seconds": HISTOGRAM, "baton_kv_transfer_shares": HISTOGRAM, "baton_kv_transfer_failures_total": COUNTER,
    "baton_kv_pages": GAUGE, "baton_session_up": GAUGE, "baton_kv_shares_sent_total": COUNTER,
    "baton_kv_shares_received_total": COUNTER, "baton_sealed_heap_calls_total": COUNTER,
}
PREFILL = NODE | {"baton_queue_seconds": HISTOGRAM, "baton_prefill_seconds": HISTOGRAM, "baton_kv_transfer_post_seconds": HISTOGRAM}
DECODE = NODE | {"baton_decode_step_seconds": HISTOGRAM, "baton_kv_transferred_tokens_total": COUNTER,
                 "baton_kv_transferred_bytes_total": COUNTER}

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)+)\})? (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parse(text):
    """{name: type}, {(sample name, labels): value}; fails on what Prometheus would not take."""
    types, samples, current = {}, {}, None
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in types and line.split(" ", 3)[3], line
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current not in types and kind in (HISTOGRAM, COUNTER, GAUGE), line
            types[current] = kind
        else:
            m = SAMPLE.fullmatch(line)
            assert m, line
            base = re.sub("_(bucket|sum|count)$", "", m[1]) if types[current] == HISTOGRAM else m[1]
            assert base == current, f"{line} below the type of {current}"
            assert (types[base] == COUNTER) == base.endswith("_total"), base
            key = (m[1], tuple(sorted(LABEL.findall(m[2] or ""))))
            assert key not in samples, f"twice: {line}"
            samples[key] = float(m[3])
    check_histograms(types, samples)
    return types, samples


def check_histograms(types, samples):
    for name in (n for n, t in types.items() if t == HISTOGRAM):
        series = {}
        for (sample, labels), value in samples.items():
            if sample == name + "_bucket":
                le = dict(labels)["le"]
                series.setdefault(tuple(x for x in labels if x[0] != "le"), []).append((float(le.replace("+Inf", "inf")), value))
        assert series, name
        for labels, buckets in series.items():
            buckets.sort()
            assert buckets[-1][0] == float("inf") and len(buckets) > 5, name
            assert all(a[1] <= b[1] for a, b in zip(buckets, buckets[1:])), f"{name} is not cumulative"
            assert samples[name + "_count", labels] == buckets[-1][1] and (name + "_sum", labels) in samples, name


def total(samples, name, **labels):
    return sum(v for (n, have), v in samples.items() if n == name and labels.items() <= dict(have).items())


def scrape(url):
    with urllib.request.urlopen(url + "/metrics", timeout=30) as r:
        assert r.headers["content-type"].startswith("text/plain; version=0.0.4")
        return parse(r.read().decode())


@pytest.fixture(scope="module")
def scraped():
    """Router, prefill and decode node after four answers and a refusal."""
    health = ["--health", "127.0.0.1:0", "--prefix-cache", "off"]
    with Cluster(tiny("llama"), prefill_opts=health, decode_opts=health) as c:
        prompts = 0
        for n in (3, 9, 27):
            prompts += c.complete("to be or not " * n, max_tokens=10, ignore_eos=True, temperature=0)["usage"]["prompt_tokens"]
        prompts += c.complete("one token", max_tokens=1)["usage"]["prompt_tokens"]
        assert c.http("/v1/completions", {"prompt": "a", "top_p": 7})[0] == 400
        c.wait_idle()
        urls = {name: d.find(r"listening on (http://\S+)").group(1) for name, d in c.nodes.items()}
        wait_until("the last transfer to be counted", lambda: total(
            scrape(urls["prefill-0"])[1], "baton_kv_transfer_shares_count") == 3)
        yield {"router": scrape(c.url), **{name: scrape(url) for name, url in urls.items()}, "prompts": prompts}


@pytest.mark.parametrize("who,want", [("router", ROUTER), ("prefill-0", PREFILL), ("decode-0", DECODE)])
def test_names_and_types(scraped, who, want):
    types, samples = scraped[who]
    for name, kind in want.items():
        assert types.get(name) == kind, f"{who}: {name} is {types.get(name)}, not {kind}"
        assert any(n == name or n == name + "_count" for n, _ in samples), f"{who}: {name} has no sample"


def test_labels(scraped):
    _, router = scraped["router"]
    for name in ("prefill-0", "decode-0"):
        role = name.split("-", maxsplit=1)[0]
        assert total(router, "baton_session_up", node=name, role=role) == 1
        for state in ("free", "cached", "leased", "quarantined"):
            assert ("baton_kv_pages", (("node", name), ("role", role), ("state", state))) in router
        own = scraped[name][1]
        assert total(own, "baton_session_up", role="router") == 1
        for thread in ("engine", "transfer"):
            assert own[("baton_sealed_heap_calls_total", (("thread", thread),))] == 0
        assert total(own, "baton_kv_pages") == total(router, "baton_kv_pages", node=name) > 0
    for reason in ("stop", "length", "cancelled", "error"):
        assert ("baton_requests_total", (("finish_reason", reason),)) in router
    for reason in ("invalid", "unauthenticated", "queue_full", "queue_timeout", "no_node", "draining"):
        assert ("baton_requests_refused_total", (("reason", reason),)) in router


def test_numbers(scraped):
    router, prefill, decode = (scraped[w][1] for w in ("router", "prefill-0", "decode-0"))
    prompts = scraped["prompts"]
    assert total(router, "baton_requests_total") == 4 and total(router, "baton_requests_total", finish_reason="length") >= 3
    assert total(router, "baton_requests_refused_total", reason="invalid") == total(router, "baton_requests_refused_total") == 1
    for name in ("time_to_first_token", "request", "queue", "prefill"):
        assert total(router, f"baton_{name}_seconds_count") == 4, name
    assert total(router, "baton_inter_token_latency_seconds_count") == 27
    assert total(router, "baton_prompt_tokens_total") == total(prefill, "baton_prompt_tokens_total") == prompts
    assert total(router, "baton_generated_tokens_total") == 31
    assert total(decode, "baton_generated_tokens_total") == 27, "first tokens come from the prefill node"
    assert total(router, "baton_requests_running") == total(router, "baton_requests_waiting") == 0
    assert total(router, "baton_requests_migrated_total") == 0

    # The relay: three of four prompts moved, counted by receiver, router and sender alike.
    moved = total(decode, "baton_kv_transferred_tokens_total")
    assert 0 < moved < prompts and moved == total(router, "baton_kv_transferred_tokens_total", node="decode-0")
    assert total(decode, "baton_kv_transferred_bytes_total") == total(prefill, "baton_kv_bytes_sent_total") > 0
    for who in (router, prefill, decode):
        assert total(who, "baton_kv_transfer_seconds_count") == 3
        assert total(who, "baton_kv_transfer_failures_total") == 0
    assert total(prefill, "baton_kv_transfer_post_seconds_count") == 3 and total(prefill, "baton_kv_transfer_post_seconds_sum") > 0
    shares = total(prefill, "baton_kv_shares_sent_total")
    assert shares == total(decode, "baton_kv_shares_received_total") > 0
    assert shares == total(prefill, "baton_kv_transfer_shares_sum") == total(decode, "baton_kv_transfer_shares_sum")

    for node in (prefill, decode):
        assert total(node, "baton_batch_tokens_count") > 0
    assert total(prefill, "baton_batch_tokens_sum") == prompts and total(decode, "baton_batch_tokens_sum") == 27
    assert total(decode, "baton_decode_step_seconds_count") == 27 and total(decode, "baton_decode_step_seconds_sum") > 0


def test_odd_node_names_are_escaped():
    with Cluster(tiny("llama"), prefill=0, decode=0, wait=False) as c:
        c.nodes["odd"] = c.start_node("prefill", 0, ["--name", 'a"b\\c'])
        del c.nodes["prefill-0"]
        wait_until("the node's session", lambda: total(scrape(c.url)[1], "baton_session_up", node='a\\"b\\\\c') == 1)


def test_buckets_are_settable():
    with Cluster(tiny("llama"), router_opts=["--buckets-ttft", "0.5,1,2,3,4,5.5"], decode_opts=["--health", "127.0.0.1:0", "--buckets-seconds",
                 "0.125,1,2,3,4,5"]) as c:
        les = {dict(labels).get("le") for name, labels in scrape(c.url)[1] if name == "baton_time_to_first_token_seconds_bucket"}
        assert les == {"0.5", "1", "2", "3", "4", "5.5", "+Inf"}
        url = c.nodes["decode-0"].find(r"listening on (http://\S+)").group(1)
        les = {dict(labels).get("le") for name, labels in scrape(url)[1] if name == "baton_decode_step_seconds_bucket"}
        assert "0.125" in les and len(les) == 7
