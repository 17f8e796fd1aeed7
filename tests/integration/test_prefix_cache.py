"""The prefix cache: what a node has is neither computed nor sent again, and no answer shows it."""

import json
import random
import socket

import pytest

from cluster import SLOW, Cluster, longer, parallel, tiny, wait_until

PAGE = 16
SAMPLING = {"logprobs": 3, "temperature": 0.9, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return longer(tiny("llama"), 4096, str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def cached(model):
    with Cluster(model) as c:
        yield c
        c.wait_idle()
        c.check_logs()


@pytest.fixture(scope="module")
def plain(model):
    """The same without caches: the answers to compare with."""
    with Cluster(model, node=["--prefix-cache", "off"]) as c:
        yield c
        c.wait_idle()
        assert c.pages("cached") == 0
        c.check_logs()


def ids(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(5, 288) for _ in range(n)]


def ask(cluster, prompt, max_tokens=10, **params):
    return cluster.complete(prompt, max_tokens=max_tokens, **{**SAMPLING, **params})


def whole_pages(n):
    return n // PAGE * PAGE


def not_computed(n):
    """Tokens of a prompt that P does not compute again: all but the last one, as far as it has full pages."""
    return n - 1 if n % PAGE == 0 else whole_pages(n - 1)


def moved_again(n, max_tokens=10):
    """Tokens of a prompt that move to D again: none if its answer filled the prompt's last page."""
    return n - whole_pages(n) if whole_pages(n + max_tokens - 1) < n else 0


def transferred(cluster):
    return int(cluster.metric_sum("baton_kv_transferred_tokens_total"))


def moves(cluster, tokens, what):
    """what(), after which the nodes' count of moved tokens must have grown by that much."""
    before = transferred(cluster)
    result = what()
    cluster.wait_idle()
    wait_until("the metric", lambda: transferred(cluster) == before + tokens, 5)
    return result


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 1000])
def test_the_same_prompt_again(cached, plain, n):
    prompt = ids(n, n)
    first = moves(cached, n, lambda: ask(cached, prompt))
    assert first["usage"]["cached_tokens"] == 0 and first["usage"]["transferred_tokens"] == n
    before = cached.metrics()
    again = moves(cached, moved_again(n), lambda: ask(cached, prompt, timings=True))
    # P computes at least the last token; D may have all of it.
    assert again["usage"]["cached_tokens"] == not_computed(n)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == not_computed(n)
    assert again["usage"]["transferred_tokens"] == moved_again(n)
    assert again["timings"]["prefill_tokens"] == n - not_computed(n)
    assert first["choices"] == again["choices"] == ask(plain, prompt)["choices"]
    name = "baton_prefix_cached_tokens_total"
    assert cached.metrics()[name] == before.get(name, 0) + not_computed(n)


def test_a_conversation(cached, plain):
    """P has the last prompt, D its answer too."""
    rng = random.Random(8)
    prompt = ids("chat", 150)
    n_p = n_d = 0  # tokens that P and D have computed or received
    for turn in range(6):
        n = len(prompt)
        force = {"logit_bias": {str(100 + turn): 100}}  # so that the answer's tokens are known
        a = moves(cached, n - whole_pages(n_d), lambda: ask(cached, prompt, 37, **force))
        assert a["choices"] == ask(plain, prompt, 37, **force)["choices"]
        assert a["usage"]["cached_tokens"] == whole_pages(n_p)
        n_p, n_d = n, n + 36  # the last token's KV is never stored
        prompt = prompt + [100 + turn] * 37 + [rng.randrange(5, 288) for _ in range(20)]


def test_many_at_once_that_begin_alike(cached, plain):
    system = ids("system", 200)
    prompts = [system[:200 - 9 * (i % 4)] + ids(i, 5 + i)[1:] for i in range(16)]
    want = [ask(plain, p, 30)["choices"] for p in prompts]
    for _ in range(2):
        assert [r["choices"] for r in parallel([lambda p=p: ask(cached, p, 30) for p in prompts])] == want
    last = parallel([lambda p=p: ask(cached, p, 30) for p in prompts])
    # More where the prompt ends inside a page that another one has filled.
    assert all(not_computed(len(p)) <= r["usage"]["cached_tokens"] < len(p) for r, p in zip(last, prompts))
    cached.wait_idle()


def test_other_parameters_share_pages(cached, plain):
    """Pages depend on tokens alone."""
    prompt = ids("parameters", 90)
    for params in ({"seed": 1}, {"seed": 2, "temperature": 1.4}, {"temperature": 0, "repetition_penalty": 1.3},
                   {"logit_bias": {"77": 5}}, {"max_tokens": 1}, {"n": 3}, {"min_tokens": 9}):
        assert ask(cached, prompt, **params)["choices"] == ask(plain, prompt, **params)["choices"]
    assert ask(cached, prompt)["usage"]["cached_tokens"] == 80


def test_choices_compute_the_prompt_once(cached, plain):
    name = "baton_prefix_cached_tokens_total"
    prompt = ids("choices", 300)
    before = cached.metrics().get(name, 0)
    assert ask(cached, prompt, n=4)["choices"] == ask(plain, prompt, n=4)["choices"]
    assert cached.metrics()[name] == before + 3 * not_computed(300)


def test_echo_computes_the_whole_prompt(cached, plain):
    prompt = ids("echo", 70)
    ask(cached, prompt)
    r = ask(cached, prompt, echo=True)
    assert r["usage"]["cached_tokens"] == 0
    assert r["choices"] == ask(plain, prompt, echo=True)["choices"]
    assert ask(cached, prompt)["usage"]["cached_tokens"] == 64


def cut_off(cluster, rng):
    host, port = cluster.address.rsplit(":", 1)
    body = json.dumps({"prompt": ids(rng.randrange(4), 300)[:rng.choice((17, 64, 250, 300))] + [9] * rng.randrange(3),
                       "max_tokens": rng.choice((2, 20, 150)), "stream": True, "ignore_eos": True}).encode()
    with socket.create_connection((host, int(port)), timeout=60 * SLOW) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if rng.random() < 0.5:
            s.recv(rng.choice((1, 300)))


def test_cancels_leave_nothing(cached, plain):
    prompts = [ids(i, 300) for i in range(4)]
    want = [ask(plain, p)["choices"] for p in prompts]
    for i in range(10):
        parallel([lambda seed=seed: cut_off(cached, random.Random(seed)) for seed in range(20 * i, 20 * i + 20)])
        got = parallel([lambda p=p: ask(cached, p)["choices"] for p in prompts])
        assert got == want
    cached.wait_idle()


def test_small_pools(model, plain):
    """More than the pools hold, again and again: cached pages make room, running ones wait, all answers stay."""
    prompts = [ids(i % 5, 150)[:150 - i] + ids(f"tail{i}", 30) for i in range(15)]
    want = [ask(plain, p, 60)["choices"] for p in prompts]
    page = 64 * 1024 * 1024 // next(n["pages"]["free"] + n["pages"]["cached"] for n in plain.cluster()["nodes"])
    with Cluster(model, kv_bytes=str(page * 45)) as c:
        for order in (prompts, prompts[::-1], prompts):
            got = parallel([lambda p=p: ask(c, p, 60)["choices"] for p in order])
            assert got == (want if order is prompts else want[::-1])
        c.wait_idle()
        assert c.pages("cached") > 0 and c.pages("free") + c.pages("cached") == 2 * 45
        c.check_logs()


def test_a_prompt_that_ends_inside_a_page(cached, plain):
    long = ids("inside", 200)
    ask(cached, long)
    for n, have in ((100, 99), (98, 97), (97, 96), (90, 89), (50, 49)):
        r = ask(cached, long[:n])
        assert r["choices"] == ask(plain, long[:n])["choices"]
        assert r["usage"]["cached_tokens"] == have and r["usage"]["transferred_tokens"] == 0
    # Another end: what the page has of it is used too, but for very few tokens.
    r = ask(cached, long[:76] + [3] * 30)
    assert r["choices"] == ask(plain, long[:76] + [3] * 30)["choices"]
    assert r["usage"]["cached_tokens"] == 76 and r["usage"]["transferred_tokens"] == 106 - 64
    assert ask(cached, long[:66] + [4] * 30)["usage"]["cached_tokens"] == 64


@pytest.mark.parametrize("name", ["mistral-swa", "gemma2", "gemma3"])
def test_sliding_windows(name):
    prompts = [ids(f"window{i}", n) for i, n in enumerate((20, 48, 60))]
    turns = [prompts[2] + [40 + i] * 9 + ids("more", 12 * i) for i in range(3)]
    with Cluster(tiny(name), node=["--prefix-cache", "off"]) as c:
        want = [ask(c, p, 20)["choices"] for p in prompts + turns]
    with Cluster(tiny(name)) as c:
        assert [ask(c, p, 20)["choices"] for p in prompts + turns] == want
        for p, choices in zip(prompts + turns, want):
            r = ask(c, p, 20)
            assert r["choices"] == choices
            assert r["usage"]["cached_tokens"] >= not_computed(len(p))
            assert r["usage"]["transferred_tokens"] <= moved_again(len(p), 20)
        got = parallel([lambda p=p: ask(c, p, 20)["choices"] for p in prompts + turns])
        assert got == want
        c.wait_idle()
        assert c.pages("cached") > 0
        c.check_logs()


def test_one_side_only(model, plain):
    prompt = ids("sides", 100)
    want = ask(plain, prompt)["choices"]
    with Cluster(model, prefill_opts=["--prefix-cache", "off"]) as c:
        assert ask(c, prompt)["choices"] == want
        r = ask(c, prompt)
        assert r["choices"] == want
        assert r["usage"]["cached_tokens"] == 0 and r["usage"]["transferred_tokens"] == 4
    with Cluster(model, decode_opts=["--prefix-cache", "off"]) as c:
        assert ask(c, prompt)["choices"] == want
        r = ask(c, prompt)
        assert r["choices"] == want
        assert r["usage"]["cached_tokens"] == 96 and r["usage"]["transferred_tokens"] == 100


def test_a_new_router_is_told_what_nodes_have(model):
    with Cluster(model, prefill=2, decode=2) as c:
        prompts = [ids(f"told{i}", 320 + i) for i in range(6)]
        want = [ask(c, p)["choices"] for p in prompts]
        c.wait_idle()
        c.router.stop()
        c.start_router(listen=c.address, sessions=c.sessions)
        c.wait_ready()
        # Each told once in its first reports; they come every 250 ms.
        wait_until("every node to show cached pages", lambda: all(n["pages"]["cached"] > 0 for n in c.cluster()["nodes"]), 5)
        for p, choices in zip(prompts, want):
            r = ask(c, p)
            assert r["choices"] == choices
            assert r["usage"]["cached_tokens"] == not_computed(len(p))
            assert r["usage"]["transferred_tokens"] == moved_again(len(p))
        c.wait_idle()


def test_the_router_finds_the_node_that_has_it(model, plain):
    with Cluster(model, prefill=2, decode=2) as c:
        prompts = [ids(f"place{i}", 320 + i) for i in range(6)]
        first = [ask(c, p)["choices"] for p in prompts]
        wait_until("every node to show cached pages", lambda: all(n["pages"]["cached"] > 0 for n in c.cluster()["nodes"]), 5)
        for p, want in zip(prompts, first):
            r = ask(c, p)
            assert r["choices"] == want == ask(plain, p)["choices"]
            assert r["usage"]["cached_tokens"] == not_computed(len(p))
            assert r["usage"]["transferred_tokens"] == moved_again(len(p))
        c.wait_idle()
        c.check_logs()
