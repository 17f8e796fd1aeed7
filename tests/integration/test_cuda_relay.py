"""A relay whose nodes compute on the CUDA backend, in a build that emulates the device: KV pages cross, answers are one answer
whatever the chunks, and a node of another numerics class is not paired with them."""

import subprocess

import pytest

from cluster import Cluster, parallel, tiny, wait_until

GREEDY = {"temperature": 0, "ignore_eos": True}
CUDA = ["--backend", "cuda"]
PROMPT = [1, *range(40, 75)]


def answer(cluster, first=False):
    a = cluster.complete(PROMPT, max_tokens=6, logprobs=2, **GREEDY)
    assert not first or a["usage"]["transferred_tokens"] == len(PROMPT)
    return a["choices"]


def test_one_answer_whatever_the_chunks():
    with Cluster(tiny("llama"), node=CUDA) as c:
        first = answer(c, first=True)
        assert all(a == first for a in parallel([lambda: answer(c) for _ in range(3)]))
        nodes = c.cluster()["nodes"]
        assert all("cuda" in n["backend"] for n in nodes), nodes
        assert all(n["transport"].endswith((" staged", " direct")) for n in nodes), nodes  # pages lie in device memory
        c.wait_idle(60)
        c.check_logs()
    with Cluster(tiny("llama"), node=[*CUDA, "--chunk-tokens", "7", "--prefix-cache", "off"]) as c:
        assert answer(c, first=True) == first
    with Cluster(tiny("llama")) as c:  # other sums: close, and the same tokens
        cpu = answer(c)
    for a, b in zip(cpu[0]["logprobs"]["token_logprobs"], first[0]["logprobs"]["token_logprobs"]):
        assert abs(a - b) < 1e-3
    assert cpu[0]["logprobs"]["tokens"] == first[0]["logprobs"]["tokens"]


def test_tensor_cores():
    """A model of BF16 takes their class, over 16-bit pages; one answer there too."""
    with Cluster(tiny("llama-bf16"), node=[*CUDA, "--kv-dtype", "bf16"]) as c:
        first = answer(c, first=True)
        assert all(n["numerics"] == "cuda-bf16-emulated" for n in c.cluster()["nodes"])
        c.wait_idle(60)
        c.check_logs()
    with Cluster(tiny("llama-bf16"), node=[*CUDA, "--chunk-tokens", "7", "--prefix-cache", "off", "--kv-dtype", "bf16"]) as c:
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
