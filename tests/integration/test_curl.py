"""curl and raw sockets: HTTP/1.1 and HTTP/2 as other people's programs speak them."""

import json
import re
import socket
import subprocess

import pytest

from cluster import SLOW

BODY = json.dumps({"prompt": "The relay begins", "max_tokens": 6, "temperature": 0, "ignore_eos": True})


def curl(*args, data=None):
    """(status, headers as sent, body)"""
    r = subprocess.run(["curl", "-sS", "-i", "--max-time", str(60 * SLOW), *args], input=data, capture_output=True, timeout=90 * SLOW)
    assert r.returncode == 0, r.stderr.decode()
    head, _, body = r.stdout.partition(b"\r\n\r\n")
    while re.match(rb"HTTP/[\d.]+ 100", head):
        head, _, body = body.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), body


def post(cluster, *args, body=BODY, path="/v1/completions", **kw):
    return curl("-H", "content-type: application/json", *args, "-d", body, cluster.url + path, **kw)


def text_of(body):
    return json.loads(body)["choices"][0]["text"]


@pytest.fixture(scope="module")
def expected(cluster):
    return cluster.complete("The relay begins", max_tokens=6, temperature=0, ignore_eos=True)["choices"][0]["text"]


def test_http1(cluster, expected):
    status, head, body = post(cluster, "--http1.1")
    assert status == 200 and head.startswith("http/1.1 200") and "content-length:" in head
    assert text_of(body) == expected


def test_http2_prior_knowledge(cluster, expected):
    status, head, body = post(cluster, "--http2-prior-knowledge")
    assert status == 200 and head.startswith("http/2 200")
    assert text_of(body) == expected


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
def test_stream(cluster, expected, version):
    body = json.dumps({**json.loads(BODY), "stream": True})
    status, head, out = post(cluster, version, "-N", body=body)
    assert status == 200 and "content-type: text/event-stream" in head
    events = out.decode().split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    assert all(e.startswith("data: {") for e in events[:-2])
    assert "".join(json.loads(e[6:])["choices"][0]["text"] for e in events[:-2]) == expected


def test_http1_upgrade_is_ignored_or_taken(cluster, expected):
    status, _, body = post(cluster, "--http2")  # cleartext: curl offers an upgrade
    assert status == 200 and text_of(body) == expected


def test_chunked_body(cluster, expected):
    status, _, body = curl("-H", "transfer-encoding: chunked", "-H", "content-type: application/json", "--data-binary", "@-",
                           cluster.url + "/v1/completions", data=BODY.encode())
    assert status == 200 and text_of(body) == expected


def test_expect_100_continue(cluster):
    big = json.dumps({**json.loads(BODY), "user": "x" * 5000})
    r = subprocess.run(["curl", "-sS", "-v", "-H", "expect: 100-continue", "--expect100-timeout", "30", "-d", big,
                        cluster.url + "/v1/completions"], capture_output=True, timeout=60 * SLOW)
    assert b"< HTTP/1.1 100 Continue" in r.stderr and b"< HTTP/1.1 200" in r.stderr


def test_head(cluster):
    for path in ("/health", "/v1/models", "/metrics"):
        status, head, body = curl("-I", cluster.url + path)
        assert status == 200 and body == b"" and "content-length:" in head


def test_get_endpoints(cluster):
    for path, kind in (("/", "text/html"), ("/metrics", "text/plain"), ("/v1/cluster", "application/json"),
                       ("/v1/models", "application/json"), ("/live", ""), ("/health", "")):
        status, head, body = curl(cluster.url + path)
        assert status == 200 and f"content-type: {kind}" in head and body, path


def test_wrong_path_and_method(cluster):
    for args, want in ((("/nope",), 404), (("/v1/completions",), 405), (("/v1/models", "-d", "{}"), 405)):
        status, head, body = curl(*args[1:], cluster.url + args[0])
        assert status == want and json.loads(body)["error"]["message"], args


def test_bad_json_is_400(cluster):
    for body in ("{", "[]", '{"prompt": "a", "max_tokens": 1e999}', '{"prompt": "\\ud800"}'):
        status, _, out = post(cluster, body=body)
        assert status == 400 and json.loads(out)["error"]["type"] == "invalid_request_error", body


def test_large_body_is_413(cluster, tmp_path):
    big = tmp_path / "big"
    with open(big, "wb") as f:
        f.truncate(300 << 20)
    r = subprocess.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "content-type: application/json", "-X", "POST",
                        "-T", str(big), cluster.url + "/v1/completions"], capture_output=True, text=True, timeout=120 * SLOW)
    assert r.stdout.endswith("413"), r
    assert cluster.http("/live")[0] == 200


@pytest.mark.parametrize("version", ["--http1.1", "--http2-prior-knowledge"])
def test_long_headers_are_431(cluster, version):
    args = [x for i in range(40) for x in ("-H", f"x-filler-{i}: {'y' * 6000}")]
    r = subprocess.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", version, *args, cluster.url + "/v1/models"],
                       capture_output=True, text=True, timeout=60 * SLOW)
    # HTTP/2 may also refuse the stream or close the connection, which curl reports as no status at all
    assert r.stdout == "431" or (version != "--http1.1" and r.returncode != 0), r
    assert cluster.http("/live")[0] == 200


def test_keep_alive(cluster):
    r = subprocess.run(["curl", "-sS", "-w", "\\nconnections made: %{num_connects}\\n", *[cluster.url + "/v1/models"] * 3],
                       capture_output=True, text=True, timeout=60 * SLOW)
    assert re.findall("connections made: ([0-9]+)", r.stdout) == ["1", "0", "0"], r
    assert r.stdout.count('"object"') >= 3


def raw(cluster, data, until_closed=False, seconds=30):
    host, port = cluster.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=seconds * SLOW) as s:
        s.sendall(data)
        if not until_closed:
            s.shutdown(socket.SHUT_WR)
        out = b""
        while True:
            block = s.recv(65536)
            if not block:
                return out
            out += block


def test_pipelined_requests(cluster, expected):
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s"
    one = head % (len(BODY), "", BODY)
    last = head % (len(BODY), "Connection: close\r\n", BODY)
    out = raw(cluster, (one + "GET /live HTTP/1.1\r\nHost: a\r\n\r\n" + last).encode(), until_closed=True)
    assert out.count(b"HTTP/1.1 200") == 3
    assert out.count(json.dumps(expected).encode()) + out.decode().count(expected) >= 2


def test_http_1_0(cluster):
    out = raw(cluster, b"GET /v1/models HTTP/1.0\r\n\r\n", until_closed=True)
    assert out.startswith(b"HTTP/1.") and b" 200 " in out.split(b"\r\n")[0]


def test_header_order_and_odd_spelling(cluster):
    body = BODY.encode()
    out = raw(cluster, b"POST /v1/completions HTTP/1.1\r\nCONTENT-length: %d\r\naccept: */*\r\nCONNECTION: Close\r\n"
                       b"X-Request-ID: odd-1\r\nhOST: x\r\n\r\n" % len(body) + body, until_closed=True)
    assert b" 200 " in out.split(b"\r\n")[0] and b"odd-1" in out


def test_garbage_closes_only_its_connection(cluster):
    for junk in (b"\x00\x01\x02\x03" * 100, b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                 b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200,
                 b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
        raw(cluster, junk)
    assert cluster.http("/live")[0] == 200
