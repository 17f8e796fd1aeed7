"""grpcio with generated stubs, reflection and health, against 1P:1D clusters of tiny models."""

import os
import threading
import time

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import grpc_stubs
from cluster import SLOW, Cluster, parallel, tiny, wait_until

pb, stubs = grpc_stubs.load()
EOS = 2
IDS = [1, *range(40, 75)]
TIMEOUT = 60 * SLOW


@pytest.fixture(scope="module")
def channel(cluster):
    with grpc.insecure_channel(cluster.address) as ch:
        yield ch


@pytest.fixture(scope="module")
def stub(channel):
    return stubs.InferenceStub(channel)


@pytest.fixture(scope="module")
def slow():
    """(cluster, stub) of a model whose answers may be so long that they never end before the test does."""
    with Cluster(tiny("tiny-long")) as c, grpc.insecure_channel(c.address) as ch:
        yield c, stubs.InferenceStub(ch)
        c.wait_idle()
        c.check_logs()


FOREVER = 60000


def request(ids=tuple(IDS), max_tokens=8, ignore_eos=True, temperature=0.0, request_id="", logprobs=None, timings=False,
            **sampling):
    return pb.GenerateRequest(
        request_id=request_id, token_ids=pb.TokenIds(ids=ids), logprobs=logprobs, timings=timings,
        sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=temperature, **sampling))


def generate(stub, req, **kw):
    kw.setdefault("timeout", TIMEOUT)
    return list(stub.Generate(req, **kw))


def test_generate(stub, cluster):
    messages = generate(stub, request(logprobs=2, timings=True))
    ids = [i for m in messages for i in m.token_ids]
    last = messages[-1]
    assert len(ids) == 8 and [m.finish_reason for m in messages[:-1]] == [""] * (len(messages) - 1)
    assert last.finish_reason == "length"
    assert last.usage.prompt_tokens == len(IDS) and last.usage.completion_tokens == 8
    assert last.usage.cached_tokens == 0 and last.usage.transferred_tokens == len(IDS)
    assert last.timings.prefill_ms > 0 and last.timings.first_token_ms > 0
    entries = [t for m in messages for t in m.logprobs]
    assert len(entries) == 8
    for i, entry in zip(ids, entries):
        assert entry.chosen.id == i == entry.top[0].id and len(entry.top) == 2
        assert entry.chosen.logprob == entry.top[0].logprob <= 0
    http = cluster.complete(IDS, max_tokens=8, temperature=0, ignore_eos=True)
    assert http["choices"][0]["text"] == "".join(m.text for m in messages)


def test_text_and_chat(stub):
    text = generate(stub, pb.GenerateRequest(text="The relay begins", sampling=pb.SamplingParams(
        max_tokens=4, temperature=0, ignore_eos=True)))
    assert text[-1].usage.completion_tokens == 4
    chat = generate(stub, pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.Message(role="user", content="Go")]),
        sampling=pb.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))
    assert chat[-1].usage.completion_tokens == 4


def test_max_tokens_absent_fills_the_context(stub, cluster):
    req = pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), sampling=pb.SamplingParams(ignore_eos=True, temperature=0))
    usage = generate(stub, req)[-1].usage
    assert usage.prompt_tokens + usage.completion_tokens == cluster.cluster()["context"]


def test_n_and_stop(stub):
    messages = generate(stub, request(n=3, seed=4, temperature=1.0, max_tokens=10))
    ids = {0: [], 1: [], 2: []}
    finished = []
    for m in messages:
        ids[m.index] += m.token_ids
        if m.finish_reason:
            finished.append(m.index)
    assert sorted(finished) == [0, 1, 2] and [len(v) for v in ids.values()] == [10] * 3
    assert messages[-1].usage.completion_tokens == 30 and not any(m.HasField("usage") for m in messages[:-1])
    whole = "".join(m.text for m in generate(stub, request(max_tokens=30)))
    stop = whole[9:12]
    stopped = generate(stub, request(max_tokens=30, stop=[stop]))
    assert "".join(m.text for m in stopped) == whole[:whole.index(stop)]
    assert stopped[-1].finish_reason == "stop"


def test_eos(stub):
    first = generate(stub, request(ignore_eos=False, logit_bias={EOS: 100}))
    assert first[-1].finish_reason == "stop" and first[-1].usage.completion_tokens == 1
    assert "".join(m.text for m in first) == ""
    later = generate(stub, request(ignore_eos=False, logit_bias={EOS: 100}, min_tokens=3))
    assert later[-1].usage.completion_tokens == 4


def test_tokenize_and_detokenize(stub):
    text = "The relay begins: héllo <|eos|>\n"
    ids = stub.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=True), timeout=TIMEOUT).ids
    assert ids[0] == 1 and EOS not in ids, "text that spells a special token is text"
    special = stub.Tokenize(pb.TokenizeRequest(text=text, parse_special=True), timeout=TIMEOUT).ids
    assert special[0] != 1 and EOS in special
    assert stub.Detokenize(pb.DetokenizeRequest(ids=ids, skip_special_tokens=True), timeout=TIMEOUT).text == text
    assert stub.Detokenize(pb.DetokenizeRequest(ids=special), timeout=TIMEOUT).text == text
    with pytest.raises(grpc.RpcError) as e:
        stub.Detokenize(pb.DetokenizeRequest(ids=[99999]), timeout=TIMEOUT)
    assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "99999" in e.value.details()


def test_list_models_and_cluster(stub, cluster):
    models = stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT).models
    assert [m.id for m in models] == [os.path.basename(cluster.model)] and models[0].context > 0
    status = stub.GetCluster(pb.GetClusterRequest(), timeout=TIMEOUT)
    assert {(n.name, n.role, n.state) for n in status.nodes} == {("prefill-0", "prefill", "ready"),
                                                                  ("decode-0", "decode", "ready")}
    for n in status.nodes:
        assert n.page_tokens == 16 and n.pages_free > 0 and len(n.instance) == 16
    assert next(n for n in status.nodes if n.role == "prefill").transports[0].description


def test_abort(slow):
    _, stub = slow
    call = stub.Generate(request(ids=[1, 40], max_tokens=FOREVER, request_id="to-abort"), timeout=TIMEOUT)
    next(call)
    with pytest.raises(grpc.RpcError) as e:
        generate(stub, request(request_id="to-abort"))
    assert "to-abort" in e.value.details(), "an id in use is refused"
    assert stub.Abort(pb.AbortRequest(request_id="to-abort"), timeout=TIMEOUT).found
    with pytest.raises(grpc.RpcError) as e:
        list(call)
    assert e.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
    assert not stub.Abort(pb.AbortRequest(request_id="to-abort"), timeout=TIMEOUT).found
    assert generate(stub, request(request_id="to-abort"))[-1].finish_reason == "length"


def test_deadline(slow):
    cluster, stub = slow
    with pytest.raises(grpc.RpcError) as e:
        generate(stub, request(ids=[1, 40], max_tokens=FOREVER), timeout=0.3)
    assert e.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_idle()


def test_cancel(slow):
    cluster, stub = slow
    for taken in (0, 1, 5):
        call = stub.Generate(request(ids=[1, 40], max_tokens=FOREVER), timeout=TIMEOUT)
        for _ in range(taken):
            next(call)
        call.cancel()
        with pytest.raises(grpc.RpcError) as e:
            list(call)
        assert e.value.code() == grpc.StatusCode.CANCELLED
    cluster.wait_idle()


@pytest.mark.parametrize("change,word", [
    ({"temperature": -1.0}, "temperature"), ({"top_p": 2.0}, "top_p"), ({"n": 0}, "n"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 100000}, "100000"), ({"logprobs": 21}, "logprobs"), ({"ids": ()}, "prompt"), ({"ids": (1, 99999)}, "99999"),
    ({"min_tokens": 50}, "min_tokens"), ({"stop_token_ids": [99999]}, "stop_token_ids"), ({"logit_bias": {99999: 1}}, "logit_bias"),
])
def test_invalid_argument(stub, change, word):
    with pytest.raises(grpc.RpcError) as e:
        generate(stub, request(**change))
    assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert word in e.value.details()


def test_no_input_and_unknown_model(stub):
    with pytest.raises(grpc.RpcError) as e:
        generate(stub, pb.GenerateRequest())
    assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as e:
        generate(stub, pb.GenerateRequest(model="other", text="a"))
    assert e.value.code() == grpc.StatusCode.NOT_FOUND and "other" in e.value.details()


def test_unknown_method_and_service(channel):
    for path in ("/baton.v1.Inference/Nothing", "/no.such.Service/Generate"):
        call = channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as e:
            call(b"", timeout=TIMEOUT)
        assert e.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_garbage_message(channel):
    call = channel.unary_stream("/baton.v1.Inference/Generate", request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as e:
        list(call(b"\xff\xff\xff\x07garbage", timeout=TIMEOUT))
    assert e.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_reflection(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    services = database.get_services()
    assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= set(services)
    service = DescriptorPool(database).FindServiceByName("baton.v1.Inference")
    assert {m.name for m in service.methods} == {"Generate", "Abort", "Tokenize", "Detokenize", "ListModels", "GetCluster"}


def test_health_check(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "baton.v1.Inference"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as e:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=TIMEOUT)
    assert e.value.code() == grpc.StatusCode.NOT_FOUND


def test_health_watch_follows_the_nodes():
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    with Cluster(tiny("llama"), prefill=0, decode=0) as c, grpc.insecure_channel(c.address) as ch:
        health = health_pb2_grpc.HealthStub(ch)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT).status == serving, "alive"
        seen = []

        def watch():
            try:
                for reply in health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Inference"), timeout=TIMEOUT):
                    seen.append(reply.status)
            except grpc.RpcError:
                pass

        thread = threading.Thread(target=watch)
        thread.start()
        wait_until("the first state", lambda: seen == [not_serving])
        assert c.http("/health")[0] == 503
        with pytest.raises(grpc.RpcError) as e:
            generate(stubs.InferenceStub(ch), request())
        assert e.value.code() == grpc.StatusCode.UNAVAILABLE
        assert stubs.InferenceStub(ch).Tokenize(pb.TokenizeRequest(text="a"), timeout=TIMEOUT).ids
        c.start_node("prefill", 0)
        c.start_node("decode", 0)
        wait_until("SERVING", lambda: seen[-1] == serving)
        assert c.http("/health")[0] == 200
        c.nodes["decode-0"].stop()
        wait_until("NOT_SERVING", lambda: seen[-1] == not_serving)
    thread.join()


def test_unauthenticated(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-1 alice\n", encoding="utf-8")
    with Cluster(tiny("llama"), router_opts=["--api-key-file", str(keys)], key="secret-1") as c, grpc.insecure_channel(c.address) as ch:
        stub = stubs.InferenceStub(ch)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "secret-1"),)):
            with pytest.raises(grpc.RpcError) as e:
                generate(stub, request(), metadata=metadata)
            assert e.value.code() == grpc.StatusCode.UNAUTHENTICATED
        good = (("authorization", "Bearer secret-1"),)
        assert generate(stub, request(), metadata=good)[-1].finish_reason == "length"
        check = health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert check.status == health_pb2.HealthCheckResponse.SERVING, "probes carry no key"


def test_resource_exhausted():
    with Cluster(tiny("llama"), router_opts=["--queue-max", "1"], node=["--max-seqs", "1"]) as c, \
            grpc.insecure_channel(c.address) as ch:
        stub = stubs.InferenceStub(ch)
        refused = []

        def one():
            try:
                generate(stub, request(ids=[1, 40], max_tokens=400))
            except grpc.RpcError as e:
                refused.append(e)

        parallel([one] * 24)
        assert refused, "24 requests cannot fit one sequence and one place in the queue"
        for e in refused:
            assert e.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, e
            assert any("retry" in key for key, _ in e.trailing_metadata()), e.trailing_metadata()
        results = parallel([lambda: c.http("/v1/completions", {"prompt": [1, 40], "max_tokens": 400, "ignore_eos": True})] * 24)
        late = [r for r in results if r[0] != 200]
        assert late and all(s == 429 and int({k.lower(): v for k, v in h.items()}["retry-after"]) >= 1 for s, h, _ in late)
        c.wait_idle()


def test_64_concurrent_streams(stub, cluster):
    prompts = [[1, *(40 + (7 * i + j) % 200 for j in range(5 + 3 * i))] for i in range(64)]
    alone = {i: [t for m in generate(stub, request(ids=prompts[i], max_tokens=30)) for t in m.token_ids] for i in (0, 31, 63)}
    start = time.monotonic()
    results = parallel([lambda p=p: generate(stub, request(ids=p, max_tokens=30)) for p in prompts])
    print(f"64 streams of 30 tokens took {time.monotonic() - start:.2f} s")
    for i, messages in enumerate(results):
        ids = [t for m in messages for t in m.token_ids]
        assert len(ids) == 30 and messages[-1].finish_reason == "length"
        assert messages[-1].usage.transferred_tokens == len(prompts[i])
        if i in alone:
            assert ids == alone[i]
    cluster.wait_idle()
