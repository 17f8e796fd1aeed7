"""A relay whose nodes compute on the CUDA backend, in a build that emulates the device: KV pages cross, answers are one answer
whatever the chunks, and a node of another numerics class is not paired with them."""

import re
import subprocess
import urllib.request

import pytest

from cluster import Cluster, parallel, stream_sse, tiny, wait_until

GREEDY = {"temperature": 0, "ignore_eos": True}
CUDA = ["--backend", "cuda"]
PROMPT = [1, *range(40, 75)]


def answer(cluster, first=False):
    a = cluster.complete(PROMPT, max_tokens=6, logprobs=2, **GREEDY)
    assert not first or a["usage"]["transferred_tokens"] == len(PROMPT)
    return a["choices"]


def staged(node):
    """Shares whose copy to or from pinned memory began, and batches in which they did."""
    host = node.find(r"health.*listening on http://(\S+)").group(1)
    with urllib.request.urlopen(f"http://{host}/metrics", timeout=30) as r:
        text = r.read().decode()
    return [int(float(re.search(rf"(?m)^baton_kv_staged_{what}_total (\S+)", text)[1])) for what in ("shares", "batches")]


def test_one_answer_whatever_the_chunks():
    with Cluster(tiny("llama"), node=[*CUDA, "--health", "127.0.0.1:0"]) as c:
        first = answer(c, first=True)
        assert all(a == first for a in parallel([lambda: answer(c) for _ in range(3)]))
        nodes = c.cluster()["nodes"]
        assert all("cuda" in n["backend"] for n in nodes), nodes
        assert all(n["transport"].endswith((" staged", " registered")) for n in nodes), nodes  # pages lie in device memory
        c.wait_idle(60)
        shares, batches = staged(c.nodes["prefill-0"])  # pages are copied many at once
        assert 0 < batches < shares
        shares, batches = staged(c.nodes["decode-0"])
        assert 0 < batches <= shares  # as they come
        c.check_logs()
    with Cluster(tiny("llama"), node=[*CUDA, "--chunk-tokens", "7", "--prefix-cache", "off"]) as c:
        assert answer(c, first=True) == first
    with Cluster(tiny("llama")) as c:  # other sums: close, and the same tokens
        cpu = answer(c)
    for a, b in zip(cpu[0]["logprobs"]["token_logprobs"], first[0]["logprobs"]["token_logprobs"]):
        assert abs(a - b) < 1e-3
    assert cpu[0]["logprobs"]["tokens"] == first[0]["logprobs"]["tokens"]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_tensor_cores(kv):
    """A model of BF16 takes their class, over pages of 16 and of 8 bits; one answer there too."""
    with Cluster(tiny("llama-bf16"), node=[*CUDA, "--kv-dtype", kv]) as c:
        first = answer(c, first=True)
        assert all(n["numerics"] == "cuda-bf16-emulated" for n in c.cluster()["nodes"])
        c.wait_idle(60)
        c.check_logs()
    with Cluster(tiny("llama-bf16"), node=[*CUDA, "--chunk-tokens", "7", "--prefix-cache", "off", "--kv-dtype", kv]) as c:
        assert answer(c, first=True) == first


def test_cublas():
    """A class of cuBLAS serves, near the own kernels; --deterministic takes these instead."""
    with Cluster(tiny("llama"), node=[*CUDA, "--numerics", "cuda-cublas"]) as c:
        assert all(", class cuda-cublas;" in d.log() for d in c.nodes.values())
        blas = answer(c, first=True)
        c.wait_idle(60)
        c.check_logs()
    with Cluster(tiny("llama"), node=[*CUDA, "--numerics", "cuda-cublas", "--deterministic"]) as c:
        assert all(", class cuda-f32;" in d.log() for d in c.nodes.values())
        own = answer(c, first=True)
    for a, b in zip(blas[0]["logprobs"]["token_logprobs"], own[0]["logprobs"]["token_logprobs"]):
        assert abs(a - b) < 1e-3


LOST = r"cuda device 0 failed: .*: unspecified launch failure \(cudaErrorLaunchFailure\)"


@pytest.mark.parametrize("role,when", [("decode", "answer"), ("decode", "idle"), ("prefill", "idle")])
def test_device_fails(role, when, tmp_path):
    """The device of one node fails for good, while it answers or before a page comes: the node says so and ends, and who asked sees the
    answer that there always is."""
    fault = tmp_path / "fault"
    body = {"prompt": PROMPT, "max_tokens": 24, **GREEDY}
    with Cluster(tiny("llama"), prefill=1, decode=1, node=CUDA) as c:
        want = c.complete(**body)["choices"][0]["text"]
        others = {"prefill": c.nodes["prefill-0"], "decode": c.nodes["decode-0"]}
        c.start_node(role, 1, env={"BT_EMU_DEVICE": f"fault-file={fault}"})
        c.wait_ready(60)
        bad = c.nodes[f"{role}-1"]
        if when == "idle":
            fault.touch()
        for _ in range(8):  # turns: one of them is the bad node's
            texts = []

            def seen(event):
                texts.append(event["choices"][0]["text"] if event["choices"] else "")
                if len(texts) == 3:
                    fault.touch()

            stream_sse(c, "/v1/completions", body, on_event=seen)
            assert "".join(texts) == want
            if bad.proc.poll() is not None:
                break
        wait_until(f"{bad.name} to end", lambda: bad.proc.poll() is not None)
        assert bad.proc.returncode == 1
        what = "a KV page cannot be copied" if role == "decode" and when == "idle" else "a step failed"
        assert re.search(LOST, bad.log()) and f"{what}: device error; this node ends with exit code 1, its requests go on at other nodes" in bad.log(), bad.log()
        assert others[role].proc.poll() is None and c.complete(**body)["choices"][0]["text"] == want


@pytest.mark.parametrize("prefill,decode", [(CUDA, []), ([*CUDA, "--numerics", "cuda-cublas"], CUDA),
                                            ([*CUDA, "--numerics", "cuda-cublas"], [*CUDA, "--numerics", "cuda-cublas-tf32"])])
def test_classes_are_not_paired(prefill, decode):
    def of(options):
        return (options[-1] if "--numerics" in options else "cuda-f32" if options else "cpu-f32") + " "

    with Cluster(tiny("llama"), prefill_opts=prefill, decode_opts=decode, wait=False) as c:
        wait_until("both numerics classes in the router's log",
                   lambda: of(prefill) in c.router.log() and of(decode) in c.router.log(), 60)
        assert c.http("/health")[0] == 503


def test_what_is_refused():
    with Cluster(tiny("llama"), prefill=0, decode=0, wait=False) as c:
        for options, text in ((["--device", "7", "--kv-bytes", "1MiB"], "device 7"), ([], "--kv-bytes"),
                              (["--numerics", "cpu-int8", "--kv-bytes", "1MiB"], "cuda-f32")):
            p = subprocess.run([f"{c.bin}/baton-prefilld", "--router", "127.0.0.1:1", "--model", tiny("llama"), *CUDA, *options],
                               capture_output=True, text=True, timeout=120)
            assert p.returncode != 0 and text in p.stderr + p.stdout, p.stderr
