"""Talks to net_demo with grpcio and httpx: the clients that users have. usage: net_interop.py PROGRAM
Exits 77 where these packages are missing."""

import concurrent.futures
import signal
import subprocess
import sys
import threading
import time

try:
    import grpc
    import httpx
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
    from google.protobuf import descriptor_pb2
except ImportError as e:
    print("skipped:", e)
    sys.exit(77)

SERVICE = "/baton.test.Echo/"


def code_of(fn):
    try:
        fn()
    except grpc.RpcError as e:
        return e
    raise AssertionError("call did not fail")


def check_unary(ch):
    unary = ch.unary_unary(SERVICE + "Unary")
    for size in (0, 1, 5, 16379, 16384, 100000, 3 << 20):
        body = bytes(size)
        assert unary(body) == body, size
    e = code_of(lambda: unary(bytes(5 << 20)))
    assert e.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "limit" in e.details(), e
    e = code_of(lambda: ch.unary_unary(SERVICE + "Nope")(b""))
    assert e.code() == grpc.StatusCode.UNIMPLEMENTED, e
    e = code_of(lambda: unary(b"x" * 1000, compression=grpc.Compression.Gzip))
    assert e.code() == grpc.StatusCode.UNIMPLEMENTED, e


def check_errors(ch):
    fail = ch.unary_unary(SERVICE + "Fail")
    for n in (1, 3, 8, 14, 16):
        e = code_of(lambda: fail(str(n).encode()))
        assert e.code().value[0] == n and e.details() == "müde 100%", e
        md = {k: v for k, v in e.trailing_metadata()}
        assert md["grpc-retry-pushback-ms"] == "1500" and md["retry-after"] == "2", md


def check_streams(ch):
    count = ch.unary_stream(SERVICE + "Count")
    assert [int(m) for m in count(b"1000")] == list(range(1000))
    chat = ch.stream_stream(SERVICE + "Chat")
    messages = [b"m%d" % i * 100 for i in range(500)]
    call = chat(iter(messages))
    assert list(call) == messages
    assert ("x-echo", "bye") in call.trailing_metadata()
    flood = ch.unary_stream(SERVICE + "Flood")
    assert sum(len(m) for m in flood(b"")) == 64 << 20
    # one that does not read stalls only itself
    slow = flood(b"")
    next(slow)
    assert [int(m) for m in count(b"10")] == list(range(10))
    slow.cancel()


def check_cancel_and_deadline(ch):
    hang = ch.unary_stream(SERVICE + "Hang")
    call = hang(b"x")
    time.sleep(0.05)
    call.cancel()
    t = time.time()
    e = code_of(lambda: list(hang(b"x", timeout=0.2)))
    assert e.code() == grpc.StatusCode.DEADLINE_EXCEEDED and time.time() - t < 2, e


def check_many(ch):
    unary = ch.unary_unary(SERVICE + "Unary")
    count = ch.unary_stream(SERVICE + "Count")
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        list(pool.map(lambda i: unary(b"%d" % i) == b"%d" % i or 1 / 0, range(2000)))
        list(pool.map(lambda i: len(list(count(b"100"))) == 100 or 1 / 0, range(64)))


def check_health(ch, proc):
    stub = health_pb2_grpc.HealthStub(ch)
    req = health_pb2.HealthCheckRequest
    assert stub.Check(req(service="")).status == 1
    assert stub.Check(req(service="baton.test.Echo")).status == 1
    assert code_of(lambda: stub.Check(req(service="x"))).code() == grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(req(service="baton.test.Echo"))
    assert next(watch).status == 1
    proc.send_signal(signal.SIGUSR1)
    assert next(watch).status == 2
    proc.send_signal(signal.SIGUSR1)
    assert next(watch).status == 1
    watch.cancel()
    watch = stub.Watch(req(service="y"))
    assert next(watch).status == 3
    watch.cancel()


def check_reflection(ch):
    stub = reflection_pb2_grpc.ServerReflectionStub(ch)
    req = reflection_pb2.ServerReflectionRequest
    asks = [
        req(list_services=""),
        req(file_containing_symbol="grpc.health.v1.Health"),
        req(file_containing_symbol="grpc.health.v1.HealthCheckResponse.ServingStatus"),
        req(file_containing_symbol="grpc.health.v1.Health.Check"),
        req(file_by_filename="grpc/reflection/v1/reflection.proto"),
        req(file_containing_symbol="grpc.health.v1.Nope"),
        req(all_extension_numbers_of_type="grpc.health.v1.Health"),
    ]
    r = list(stub.ServerReflectionInfo(iter(asks)))
    names = [s.name for s in r[0].list_services_response.service]
    assert "grpc.health.v1.Health" in names and "baton.test.Echo" in names, names
    for i in (1, 2, 3, 4):
        f = descriptor_pb2.FileDescriptorProto.FromString(r[i].file_descriptor_response.file_descriptor_proto[0])
        assert f.service, f
    assert r[5].error_response.error_code == 5 and r[6].error_response.error_code == 5
    assert r[1].original_request == asks[1]


def check_http(url):
    for h2 in (False, True):
        with httpx.Client(http1=not h2, http2=h2) as c:
            assert c.get(url + "/x").text == "hello\n"
            body = bytes(range(256)) * 3000
            assert c.post(url + "/echo", content=body).content == body
            assert c.post(url + "/echo", content=(body[i : i + 7777] for i in range(0, 300000, 7777))).status_code == 200
            r = c.get(url + "/chunks?n=10000")
            assert r.text.count("data: ") == 10000 and r.headers["content-type"] == "text/event-stream"
            assert len(c.get(url + "/flood").content) == 64 << 20
            assert c.get(url + "/", headers={f"h{i}": "v" for i in range(200)}).status_code == 431
        with httpx.Client(http1=not h2, http2=h2) as c:
            assert c.post(url + "/echo", content=bytes(2 << 20)).status_code == 413


def main():
    proc = subprocess.Popen([sys.argv[1]], stdout=subprocess.PIPE, text=True)
    port = int(proc.stdout.readline())
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]) as ch:
            check_unary(ch)
            check_errors(ch)
            check_streams(ch)
            check_cancel_and_deadline(ch)
            check_many(ch)
            check_health(ch, proc)
            check_reflection(ch)
        check_http(f"http://127.0.0.1:{port}")
        time.sleep(0.1)
    finally:
        proc.send_signal(signal.SIGTERM)
        print(proc.stdout.read().strip())
    assert proc.wait(10) == 0, proc.returncode
    print("ok")


if __name__ == "__main__":
    main()
