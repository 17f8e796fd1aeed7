"""One full relay in a sanitizer build: answers, choices, streams, refusals, cancels, a killed node, a clean end."""

import socket

from cluster import Cluster, parallel, stream_sse, tiny, wait_until

GREEDY = {"temperature": 0, "ignore_eos": True}


def cut_off(cluster, wait):
    host, port = cluster.address.rsplit(":", 1)
    body = b'{"prompt": [1, 40, 41], "max_tokens": 200, "stream": true, "ignore_eos": true}'
    with socket.create_connection((host, int(port)), timeout=60) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if wait:
            s.recv(500)


def relay(cluster):
    prompt = [1, *range(40, 140)]
    first = cluster.complete(prompt, max_tokens=12, logprobs=3, **GREEDY)
    assert first["usage"]["transferred_tokens"] in (len(prompt), 0), "all, or nothing in a second call"
    answers = parallel([lambda: cluster.complete(prompt, max_tokens=12, logprobs=3, **GREEDY) for _ in range(6)])
    assert all(a["choices"] == first["choices"] for a in answers)
    events = stream_sse(cluster, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 10,
                                                          "stop": ["\x01"], "logprobs": True, "top_logprobs": 2, **GREEDY})
    assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    cluster.complete("The relay begins", max_tokens=4, n=3, echo=True, logprobs=1, temperature=1, seed=1)
    assert cluster.complete(prompt, max_tokens=1, **GREEDY)["usage"]["completion_tokens"] == 1
    for body in ({"prompt": ""}, {"prompt": "a", "temperature": -1}, {"prompt": [99999]}, {"prompt": [5] * 5000}):
        assert cluster.http("/v1/completions", body)[0] == 400
    for path in ("/metrics", "/v1/cluster", "/", "/v1/models", "/nope"):
        cluster.http(path)
    cluster.json("/detokenize", {"tokens": cluster.json("/tokenize", {"prompt": "héllo"})["tokens"]})
    parallel([lambda i=i: cut_off(cluster, i % 2) for i in range(8)])
    cluster.wait_idle(20)


def test_relay_over_tcp_and_shared_memory():
    for transport in ("tcp", "shm"):
        with Cluster(tiny("llama"), node=["--transport", transport]) as c:
            relay(c)
            c.check_logs()


def test_relay_after_a_kill():
    with Cluster(tiny("llama"), prefill=2, decode=2, node=["--lease", "2s"]) as c:
        relay(c)
        c.nodes["decode-1"].kill()
        c.nodes["prefill-1"].kill()
        wait_until("the dead nodes to be gone", lambda: sum(n["state"] == "ready" for n in c.cluster()["nodes"]) == 2)
        relay(c)
        for d in c.daemons():
            assert "Sanitizer" not in d.log() and "runtime error" not in d.log(), d.log()[-4000:]
