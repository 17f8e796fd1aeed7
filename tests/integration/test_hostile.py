"""Malformed and extreme input, rude clients, starved pools: daemons live, and answer the next request as before."""

import json
import random
import socket
import struct

import pytest

from cluster import Cluster, parallel, tiny

EXPECTED_LOGS = [" warn xfer gate "]  # strangers at the transfer port
PROBE = {"prompt": [1, *range(40, 75)], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 3}


def probe(cluster):
    return cluster.complete(**PROBE)["choices"]


def address(cluster):
    host, port = cluster.address.rsplit(":", 1)
    return host, int(port)


def send(cluster, data, timeout=5, to=None):
    """What comes back before the other end closes, or until the timeout."""
    out = b""
    with socket.create_connection(to or address(cluster), timeout=timeout) as s:
        try:
            s.sendall(data)
            while True:
                piece = s.recv(65536)
                if not piece:
                    return out
                out += piece
        except OSError:
            return out


def post(cluster, body, path="/v1/completions"):
    """(status, body)"""
    body = body if isinstance(body, bytes) else body.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    out = send(cluster, head.encode() + body, 30)
    assert out.startswith(b"HTTP/1.1 "), (path, body[:200], out[:200])
    return int(out[9:12]), out.partition(b"\r\n\r\n")[2]


def test_values(cluster):
    before = probe(cluster)
    values = ["NaN", "Infinity", "1e400", "-1e400", "-1", "9223372036854775808", "1.5", '"1"', '""', "[]", "{}", "[[]]", "[null]",
              "[1,[2]]", '"\\u0000"', '"\\ud800"', '{"1":1e400}', '{"99999999999":1}', '[""]', "true", "4294967296"]
    names = ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "temperature", "top_p", "min_p", "repetition_penalty",
             "presence_penalty", "stop", "stop_token_ids", "logit_bias", "echo", "stream", "model", "prompt", "messages",
             "stream_options", "chat_template_kwargs"]
    for name in names:
        for value in values:
            for path in ("/v1/completions", "/v1/chat/completions"):
                body = f'{{"prompt":[1,40],"messages":[{{"role":"user","content":"a"}}],"max_tokens":2,"{name}":{value}}}'
                status, answer = post(cluster, body, path)
                assert status in (200, 400, 404), (body, status, answer)
                if b"data: " not in answer:
                    json.loads(answer, parse_constant=lambda c: pytest.fail(f"{c} in the answer to {body}"))
    cluster.wait_idle()
    assert probe(cluster) == before


def test_bodies(cluster):
    before = probe(cluster)
    bodies = [b"", b" ", b"{", b"[]", b"null", b"[" * 100000, b'{"a":' * 100000, b'{"prompt":"\xff\xfe"}', b'{"prompt":"\xed\xa0\x80"}',
              b'{"prompt":"a"}x', b'{"prompt":"a","max_tokens":' + b"9" * 400 + b"}"]
    for body in bodies:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            status, answer = post(cluster, body, path)
            assert status == 400 and json.loads(answer)["error"]["message"], (body[:50], path, status)
    nul = cluster.json("/tokenize", {"prompt": "a\0b"})
    assert cluster.json("/detokenize", {"tokens": nul["tokens"][1:]})["prompt"] == "a\0b"
    assert post(cluster, json.dumps({"prompt": "x " * 2000000, "max_tokens": 1}))[0] == 400
    assert probe(cluster) == before


def test_wire(cluster):
    before = probe(cluster)
    good = b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 30\r\n\r\n{"prompt":[1,4],"max_tokens":2}'[:-1] + b"}"
    h2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    for data in (b"\0\1\2\xff" * 50, b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3" + b"a" * 300, b"GET /" + b"a" * 200000 + b" HTTP/1.1\r\n\r\n",
                 b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n", h2 + b"\0\0\1\1\0\0\0\0\1\x82" + b"\0\0\1\x09\0\0\0\0\1\x84" * 5000,
                 h2 + b"\0\0\x08\6\0\0\0\0\0abcdefgh" * 20000, h2 + b"\xff" * 200):
        send(cluster, data, 0.2)
    rnd = random.Random(5)
    for _ in range(500):
        data = bytearray(rnd.choice((good * 3, h2 + b"\0\0\3\1\5\0\0\0\1\x83\x86\x84")))
        for _ in range(rnd.randint(1, 6)):
            data[rnd.randrange(len(data))] = rnd.randrange(256)
        send(cluster, bytes(data), 0.01)
    cluster.wait_idle()
    assert probe(cluster) == before


def test_resets_and_idle_connections(cluster):
    before = probe(cluster)
    idle = [socket.create_connection(address(cluster), timeout=5) for _ in range(300)]
    body = json.dumps({"prompt": [1, 40], "max_tokens": 400, "n": 8, "stream": True, "ignore_eos": True}).encode()
    for i in range(40):
        s = socket.create_connection(address(cluster), timeout=5)
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        if i % 3:
            s.recv(500)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
    cluster.wait_idle()
    assert probe(cluster) == before
    for s in idle:
        s.close()


def test_strangers_at_the_inner_ports(cluster):
    """Port scanners and other people's protocols."""
    before = probe(cluster)
    transfer = next(n["transfer_address"] for n in cluster.cluster()["nodes"] if n["role"] == "decode")
    for where in (cluster.sessions, transfer):
        host, port = where.rsplit(":", 1)
        for data in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3" + b"a" * 300, b"SSH-2.0-x\r\n"):
            send(cluster, data, 0.1, (host, int(port)))
    assert probe(cluster) == before


STARVED = {
    "decode pages": {"decode_opts": ["--kv-bytes", "330KiB"]},
    "pages of one token": {"node": ["--kv-bytes", "330KiB", "--page-tokens", "1"]},
    "one sequence": {"node": ["--max-seqs", "1"]},
    "batch of one": {"decode_opts": ["--max-batch", "1"]},
    "chunks of one token": {"prefill_opts": ["--chunk-tokens", "1"]},
}


@pytest.fixture(scope="module")
def long_answers(cluster):
    requests = [{"prompt": [1, 5 + i], "max_tokens": 500, "temperature": 1, "seed": i, "ignore_eos": True, "logprobs": 1} for i in range(8)]
    return requests, [cluster.complete(**r)["choices"] for r in requests]


@pytest.mark.parametrize("name", STARVED)
def test_starved(name, long_answers):
    requests, want = long_answers
    with Cluster(tiny("llama"), **STARVED[name]) as c:
        assert parallel([lambda r=r: c.complete(**r)["choices"] for r in requests]) == want
        if name == "decode pages":
            assert c.metric_sum("baton_requests_migrated_total") > 0  # preempted, and brought back
        c.wait_idle()
        c.check_logs()
