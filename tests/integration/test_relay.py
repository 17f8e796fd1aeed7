"""The relay's accounts: tokens that moved, pages that came back, answers that crossed the hand-off, cancels at any moment."""

import json
import random
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import SLOW, Cluster, parallel, stream_sse, tiny, wait_until

EOS = 2
IDS = [1, *range(40, 75)]
GREEDY = {"temperature": 0, "ignore_eos": True}


def ask(cluster, prompt=tuple(IDS), max_tokens=8, **params):
    return cluster.complete(list(prompt), max_tokens=max_tokens, **{**GREEDY, **params})


def transferred(cluster):
    return int(cluster.metric_sum("baton_kv_transferred_tokens_total"))


def totals(cluster):
    return {s: cluster.pages(s) for s in ("free", "cached", "leased", "quarantined")}


@pytest.fixture(autouse=True)
def all_pages_come_back(request):
    """After every test each page of the shared cluster is free again."""
    if "cluster" not in request.fixturenames:
        yield
        return
    c = request.getfixturevalue("cluster")
    c.wait_idle()
    before = totals(c)
    yield
    c.wait_idle()
    assert totals(c) == before


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 300])
def test_transferred_tokens_are_the_prompts(cluster, n):
    before = transferred(cluster)
    r = ask(cluster, [1] + [30 + i % 200 for i in range(n - 1)], max_tokens=5, timings=True)
    assert r["usage"]["transferred_tokens"] == r["timings"]["transferred_tokens"] == r["usage"]["prompt_tokens"] == n
    assert r["usage"]["cached_tokens"] == 0 and r["timings"]["transferred_bytes"] > 0
    wait_until("the metric", lambda: transferred(cluster) == before + n, 5)


def test_bytes_are_whole_pages_of_the_prompt(cluster):
    """A page's share of every layer, K and V; the partial page may be sent whole."""
    def size(n):
        return ask(cluster, [1] + [30 + i % 200 for i in range(n - 1)], timings=True)["timings"]["transferred_bytes"]

    page = size(32) - size(16)
    assert page > 0 and size(48) - size(32) == page
    assert size(16) == page and page // 16 <= size(17) - size(16) <= page


def test_n_moves_each_choice(cluster):
    before = transferred(cluster)
    r = ask(cluster, n=4, temperature=1, seed=1)
    assert [c["index"] for c in r["choices"]] == [0, 1, 2, 3]
    assert r["usage"]["completion_tokens"] == 32
    cluster.wait_idle()
    moved = transferred(cluster) - before
    assert moved == r["usage"]["transferred_tokens"] == 4 * len(IDS)


def test_max_tokens_1_starts_nothing_on_d(cluster):
    def state():
        return {k: v for k, v in cluster.metrics().items() if 'node="decode-0"' in k and "seconds" not in k}

    before = state()
    headers = cluster.http("/v1/completions", {"prompt": IDS, "max_tokens": 1, **GREEDY})[1]
    assert "decode-0" not in {k.lower(): v for k, v in headers.items()}.get("x-baton-decode", "")
    cluster.wait_idle()
    assert state() == before


def test_first_token_eos_ends_it(cluster):
    before = transferred(cluster)
    r = cluster.complete(IDS, max_tokens=50, temperature=0, logit_bias={str(EOS): 100}, logprobs=1)
    assert r["choices"][0]["text"] == "" and r["choices"][0]["finish_reason"] == "stop"
    assert r["usage"]["completion_tokens"] == 1 and r["usage"]["transferred_tokens"] == 0
    cluster.wait_idle()
    assert transferred(cluster) - before in (0, len(IDS)), "pages under way when token 0 came count as moved"


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 7])
def test_min_tokens_cross_the_hand_off(cluster, min_tokens):
    r = cluster.complete(IDS, max_tokens=20, min_tokens=min_tokens, temperature=0, logit_bias={str(EOS): 100})
    assert r["usage"]["completion_tokens"] == min_tokens + 1
    r = cluster.complete(IDS, max_tokens=20, min_tokens=min_tokens, temperature=0, logit_bias={"99": 100}, stop_token_ids=[99])
    assert r["usage"]["completion_tokens"] == min_tokens + 1 and r["choices"][0]["finish_reason"] == "stop"


def tokens_of(cluster, text):
    return cluster.json("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def test_stop_strings_cross_the_hand_off(cluster):
    """Token 0 ("r") comes from P, the others ("e", "l") from D: the stop string is made of both."""
    r, e, ell = (tokens_of(cluster, c)[0] for c in "rel")
    force = {"logit_bias": {str(r): 60, str(e): 58, str(ell): 56}, "frequency_penalty": 2, "presence_penalty": 2}
    whole = ask(cluster, max_tokens=6, logprobs=0, **force)
    text = whole["choices"][0]["text"]
    assert len(text) == 6 and set(text) <= set("rel")
    for stop in (text[0], text[0:2], text[0:3], text[1:3], text[2:5]):
        expected = text[:text.index(stop)]
        used = text.index(stop) + len(stop)
        s = ask(cluster, max_tokens=6, stop=[stop], **force)
        assert s["choices"][0]["text"] == expected and s["choices"][0]["finish_reason"] == "stop"
        assert s["usage"]["completion_tokens"] == used
        events = stream_sse(cluster, "/v1/completions", {"prompt": IDS, "max_tokens": 6, "stop": stop, **GREEDY, **force})
        assert "".join(c["text"] for ev in events for c in ev["choices"]) == expected
    s = ask(cluster, max_tokens=6, stop=[text + "r"], **force)
    assert s["choices"][0]["text"] == text and s["choices"][0]["finish_reason"] == "length"


def test_the_first_tokens_logprobs_survive(cluster):
    one = ask(cluster, max_tokens=1, logprobs=20)["choices"][0]["logprobs"]
    many = ask(cluster, max_tokens=9, logprobs=20)["choices"][0]["logprobs"]
    assert len(many["tokens"]) == 9
    assert many["token_logprobs"][0] == one["token_logprobs"][0] and many["top_logprobs"][0] == one["top_logprobs"][0]
    events = stream_sse(cluster, "/v1/completions", {"prompt": IDS, "max_tokens": 9, "logprobs": 20, **GREEDY})
    streamed = [v for e in events for v in e["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == many["token_logprobs"]


def test_two_at_once_are_never_mixed(cluster):
    prompts = [[1, *range(30, 60)], [1, *range(130, 190)]]
    alone = [ask(cluster, p, max_tokens=40)["choices"][0]["text"] for p in prompts]
    assert alone[0] != alone[1]
    for _ in range(10):
        both = parallel([lambda p=p: ask(cluster, p, max_tokens=40)["choices"][0]["text"] for p in prompts])
        assert both == alone


def test_64_streams_complete(cluster):
    prompts = [[1, *(30 + (11 * i + j) % 250 for j in range(3 + 5 * i))] for i in range(64)]
    start = time.monotonic()
    results = parallel([lambda p=p: stream_sse(cluster, "/v1/completions", {
        "prompt": p, "max_tokens": 40, "stream_options": {"include_usage": True}, **GREEDY}) for p in prompts])
    print(f"64 streams of 40 tokens took {time.monotonic() - start:.2f} s")
    for p, events in zip(prompts, results):
        assert events[-1]["usage"]["completion_tokens"] == 40 and events[-1]["usage"]["prompt_tokens"] == len(p)
        assert events[-2]["choices"][0]["finish_reason"] == "length"


def cut_off(cluster, rng):
    """Sends a request and closes the socket at a random moment."""
    host, port = cluster.address.rsplit(":", 1)
    body = json.dumps({"prompt": [1] + [rng.randrange(5, 288) for _ in range(rng.choice((3, 20, 90, 300)))],
                       "max_tokens": rng.choice((2, 20, 150)), "stream": rng.random() < 0.7, "n": rng.choice((1, 1, 1, 2)),
                       "temperature": 1, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((host, int(port)), timeout=60 * SLOW) as s:
        whole = rng.random() < 0.95
        s.sendall(head + body if whole else (head + body)[:rng.randrange(len(head + body))])
        what = rng.random()
        if what < 0.3:
            time.sleep(rng.random() * 0.01)
        elif what < 0.6 and whole:
            s.recv(rng.choice((1, 500)))
        elif what < 0.8:
            time.sleep(rng.random() * 0.1)
        if rng.random() < 0.2:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # RST


def test_1000_requests_with_random_cancels(cluster):
    expected = ask(cluster)["choices"][0]["text"]
    start = time.monotonic()
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda seed: cut_off(cluster, random.Random(seed)), range(1000)))
    cancelled = time.monotonic()
    assert ask(cluster)["choices"][0]["text"] == expected
    after = time.monotonic() - cancelled
    cluster.wait_idle()
    print(f"1000 requests in {cancelled - start:.1f} s; the next one took {after * 1e3:.0f} ms")
    assert after < 5 * SLOW, "the next request is served promptly"


def test_cancel_while_the_prompt_is_computed(cluster):
    """Many long prompts queued at P, all cut off: the next one does not wait for their computation."""
    host, port = cluster.address.rsplit(":", 1)
    body = json.dumps({"prompt": [7] * 480, "max_tokens": 20, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    sockets = []
    for _ in range(60):
        s = socket.create_connection((host, int(port)), timeout=60 * SLOW)
        s.sendall(head + body)
        sockets.append(s)
    for s in sockets:
        s.close()
    start = time.monotonic()
    ask(cluster)
    print(f"the next request took {(time.monotonic() - start) * 1e3:.0f} ms")


def test_a_slow_reader_stalls_only_itself(cluster):
    host, port = cluster.address.rsplit(":", 1)
    body = json.dumps({"prompt": [1, 40], "max_tokens": 480, "n": 16, "stream": True, "logprobs": 20, **GREEDY}).encode()
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect((host, int(port)))
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    start = time.monotonic()
    for _ in range(10):
        assert ask(cluster)["usage"]["completion_tokens"] == 8
    print(f"ten requests beside a client that does not read: {time.monotonic() - start:.2f} s")
    s.settimeout(60 * SLOW)
    data = b""
    while b"data: [DONE]" not in data[-2000:]:
        block = s.recv(1 << 20)
        assert block, "the slow client's stream was cut"
        data += block
    s.close()
    counts = [0] * 16
    for event in re_events(data):
        for c in event["choices"]:
            counts[c["index"]] += len(c["logprobs"]["tokens"])
    assert counts == [480] * 16


def re_events(data):
    """The JSON of every event in a chunked HTTP/1.1 answer."""
    body = data.partition(b"\r\n\r\n")[2]
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        n = int(size or b"0", 16)
        if n == 0:
            break
        out += rest[:n]
        body = rest[n + 2:]
    return [json.loads(e[6:]) for e in out.decode().split("\n\n") if e.startswith("data: {")]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_transports(transport):
    with Cluster(tiny("llama"), node=["--transport", transport, "--prefix-cache", "off"]) as c:
        described = [t["description"] for n in c.cluster()["nodes"] for t in n["transports"]]
        print(f"--transport {transport}: {described}")
        assert described and all(("sysv" in d or "posix" in d) == (transport == "shm") for d in described), described
        texts = [ask(c, [1] + [30 + i % 200 for i in range(n - 1)], max_tokens=12)["choices"][0]["text"] for n in (1, 16, 17, 300)]
        c.wait_idle()
        assert transferred(c) == 1 + 16 + 17 + 300
        c.check_logs()
    seen_texts.setdefault("texts", texts)
    assert seen_texts["texts"] == texts


seen_texts = {}


@pytest.mark.parametrize("dtype", ["f16", "bf16", "fp8"])
def test_kv_types(dtype):
    def answers(prefill, decode):
        with Cluster(tiny("llama"), prefill=prefill, decode=decode, node=["--kv-dtype", dtype]) as c:
            assert all(dtype in n["kv_layout"] for n in c.cluster()["nodes"])
            r = parallel([lambda n=n: ask(c, [1] + [30 + i % 200 for i in range(n - 1)], max_tokens=12, logprobs=2)["choices"]
                          for n in (1, 16, 17, 33, 300)])
            c.wait_idle()
            c.check_logs()
            return r

    assert answers(1, 1) == answers(2, 2)


@pytest.mark.parametrize("page_tokens", [1, 8, 64])
def test_page_sizes(page_tokens):
    """The page size is no part of the answer."""
    with Cluster(tiny("llama"), node=["--page-tokens", str(page_tokens)]) as c:
        texts = [ask(c, [1] + [30 + i % 200 for i in range(n - 1)], max_tokens=12)["choices"][0]["text"] for n in (1, 16, 17, 300)]
        c.wait_idle()
    seen_texts.setdefault("texts", texts)
    assert seen_texts["texts"] == texts


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_idle_cluster_sleeps(cluster):
    """Printed for the record; the limit is loose because the machine may be busy."""
    ask(cluster)
    pids = {d.name: d.proc.pid for d in cluster.daemons()}
    time.sleep(0.5)
    before = {n: cpu_seconds(p) for n, p in pids.items()}
    start = time.monotonic()
    time.sleep(5)
    spent = time.monotonic() - start
    shares = {n: 100 * (cpu_seconds(p) - before[n]) / spent for n, p in pids.items()}
    print("idle cluster, per cent of a CPU:", {n: round(v, 2) for n, v in shares.items()})
    assert sum(shares.values()) < 5


def test_ready_time():
    """Printed for the record: from exec to the first ready node of each kind."""
    start = time.monotonic()
    with Cluster(tiny("llama")) as c:
        print(f"cluster ready {1e3 * (time.monotonic() - start):.0f} ms after the first exec")
        assert ask(c)["usage"]["completion_tokens"] == 8


def test_pool_smaller_than_the_load():
    """D's pool cannot hold all sequences at once: they wait or begin again, and all are answered the same."""
    prompts = [[1] + [30 + (i * 7 + j) % 250 for j in range(120)] for i in range(12)]
    with Cluster(tiny("llama")) as c:
        want = [ask(c, p, max_tokens=100)["choices"][0]["text"] for p in prompts]
        page_bytes = 64 * 1024 * 1024 // max(1, next(n["pages"]["free"] for n in c.cluster()["nodes"] if n["role"] == "decode"))
    with Cluster(tiny("llama"), decode_opts=["--kv-bytes", str(page_bytes * 40)]) as c:
        got = parallel([lambda p=p: ask(c, p, max_tokens=100)["choices"][0]["text"] for p in prompts])
        c.wait_idle()
        print(f"migrated: {c.metric_sum('baton_requests_migrated_total'):.0f}")
    assert got == want


def test_open_files_do_not_grow(cluster):
    def count():
        import os
        return {d.name: len(os.listdir(f"/proc/{d.proc.pid}/fd")) for d in cluster.daemons()}

    for _ in range(3):
        ask(cluster)
    before = count()
    for _ in range(60):
        ask(cluster, max_tokens=2)
    wait_until("connections to close", lambda: all(count()[n] <= before[n] + 3 for n in before), 10)


def test_many_connections(cluster):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    host, port = cluster.address.rsplit(":", 1)
    idle = [socket.create_connection((host, int(port)), timeout=30) for _ in range(400)]
    try:
        assert ask(cluster)["usage"]["completion_tokens"] == 8
    finally:
        for s in idle:
            s.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_aborted_uploads_hold_nothing(cluster):
    host, port = cluster.address.rsplit(":", 1)
    stop = threading.Event()

    def trickle():
        with socket.create_connection((host, int(port)), timeout=60) as s:
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n{\"prompt\":")
            stop.wait(2)

    threads = [threading.Thread(target=trickle) for _ in range(20)]
    for t in threads:
        t.start()
    assert ask(cluster)["usage"]["completion_tokens"] == 8
    stop.set()
    for t in threads:
        t.join()
