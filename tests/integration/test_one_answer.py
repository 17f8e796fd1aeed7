"""One answer: bytes and log-probabilities do not depend on the cluster's shape, threads, kernels, chunks or batch-mates.

Every prompt is answered once, alone, by the plainest cluster; every other cluster must repeat it, all prompts at once.
The clusters are chosen so that each property takes each of its values for both models, mixed inside one cluster too.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import Cluster, isas, longer, shared_models, tiny

PAGE = 16
N_VOCAB = 288
LENGTHS = [1, 2, 3, 7, 8, 9, 11, 15, 16, 17, 19, 20, 21, 29, 31, 32, 33, 39, 40, 41, 47, 48, 49, 63, 64, 65, 79, 80, 81, 100,
           127, 128, 129, 200, 255, 257, 400, 511, 513, 900]
SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 77, "top_p": 0.9, "top_k": 50},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.3, "seed": 2**53 - 1, "min_p": 0.02, "frequency_penalty": 0.4},
]
MODELS = ["llama", "mistral-swa"]


def prompts():
    rng = random.Random(20240611)
    out = []
    for i, n in enumerate(LENGTHS):
        ids = [1] + [rng.randrange(5, N_VOCAB) for _ in range(n - 1)]
        out.append({"prompt": ids, "max_tokens": 12 + i % 5, "logprobs": 3, "ignore_eos": i % 3 != 0, **SAMPLINGS[i % 5]})
    return out


def ask(cluster, request):
    answer = cluster.json("/v1/completions", request)
    choice = answer["choices"][0]
    assert answer["usage"]["prompt_tokens"] == len(request["prompt"])
    return choice["text"], choice["finish_reason"], choice["logprobs"]


def ask_all(cluster, requests, at_once):
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda r: ask(cluster, r), requests))


def first_difference(got, want):
    if got[0] != want[0] or got[1] != want[1]:
        return f"text {got[:2]} instead of {want[:2]}"
    for i, (a, b) in enumerate(zip(got[2]["token_logprobs"], want[2]["token_logprobs"])):
        if a != b:
            return f"log-probability of token {i}: {a!r} instead of {b!r}"
    return f"{got[2]} instead of {want[2]}"


def compare(name, got, want, requests):
    wrong = [(r, g, w) for r, g, w in zip(requests, got, want) if g != w]
    for r, g, w in wrong[:3]:
        sampling = {k: v for k, v in r.items() if k not in ("prompt", "logprobs")}
        print(f"{name}: prompt of {len(r['prompt'])} tokens, {sampling}: {first_difference(g, w)}")
    lengths = [len(r["prompt"]) for r, _, _ in wrong]
    assert not wrong, f"{name}: {len(wrong)} of {len(requests)} answers differ, prompts of {lengths} tokens"


def best(*wanted):
    """The first instruction set that this machine has."""
    return next(i for i in (*wanted, "plain") if i in isas())


def node(isa, threads, chunk):
    return ["--isa", isa, "--threads", str(threads), "--chunk-tokens", str(chunk)]


def clusters():
    """(name, prefill nodes, decode nodes, how many requests at once, options of the router, nodes that do both)"""
    avx2, avx512 = best("avx2"), best("avx512", "avx2")
    return [
        ("2P:1D", [node(avx2, 2, 16), node(avx2, 1, 64)], [node(avx2, 2, 512)], 32, []),
        ("1P:2D", [node("plain", 1, 64)], [node("plain", 2, 512), node(avx512, 1, 512)], 32, []),
        ("3P:2D", [node("plain", 2, 16), node(avx2, 1, 512), node(avx512, 2, 64)], [node(avx512, 2, 512), node("plain", 1, 512)], 32, []),
        ("1P:1D", [node(avx512, 2, 512)], [node(avx512, 2, 512)], 4, []),
        ("one for all", [], [], 32, [], [node(avx2, 2, 16)]),
        ("1P:1D, 2 both", [node("plain", 1, 64)], [node(avx512, 1, 512)], 32, [], [node(avx2, 1, 16), node("plain", 2, 64)]),
        ("local", [], [node(avx2, 2, 16), node("plain", 1, 64)], 32, ["--local-prefill", "always"]),
        ("some local", [node(avx512, 1, 64)], [node(avx2, 2, 64), node("plain", 1, 512)], 32, ["--local-prefill", "48"]),
    ]


def start(model, prefill, decode, router=(), both=()):
    c = Cluster(model, prefill=0, decode=0, kv_bytes="32MiB", router_opts=router, wait=False)
    try:
        for role, nodes in (("prefill", prefill), ("decode", decode), ("both", both)):
            for i, opts in enumerate(nodes):
                c.start_node(role, i, extra=opts)
        c.wait_ready()
    except BaseException:
        c.close(check=False)
        raise
    return c


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return longer(tiny(request.param), 2048, str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def reference(model):
    """Each prompt alone on 1P:1D, one thread; then all at once on the same nodes."""
    requests = prompts()
    with start(model, [node("auto", 1, 512)], [node("auto", 1, 512)]) as c:
        answers = ask_all(c, requests, 1)
        compare("all at once on the same nodes", ask_all(c, requests[::-1], 32), answers[::-1], requests[::-1])
        c.wait_idle()
        c.check_logs()
    return requests, answers


@pytest.mark.parametrize("shape", clusters(), ids=lambda s: s[0])
def test_one_answer(model, reference, shape):
    name, prefill, decode, at_once, router, *both = shape
    requests, answers = reference
    order = list(range(len(requests)))
    random.Random(name).shuffle(order)
    begin = time.monotonic()
    with start(model, prefill, decode, router, *both) as c:
        got = ask_all(c, [requests[i] for i in order], at_once)
        c.wait_idle()
        c.check_logs()
        local = c.metric_sum("baton_local_prefill_total")
    assert (local > 0) == bool(router or both), f"{name}: {local:.0f} prompts were computed by decode nodes"
    print(f"{name}: {time.monotonic() - begin:.1f} s")
    compare(name, got, [answers[i] for i in order], [requests[i] for i in order])


def test_streamed_choices_are_the_same(model, reference):
    """n > 1: each choice is what a request of its own would be, and repeating the request repeats it."""
    with start(model, [node("auto", 1, 64)] * 2, [node("auto", 1, 64)] * 2) as c:
        body = {"prompt": [1, *range(50, 90)], "max_tokens": 10, "temperature": 1, "seed": 9, "n": 4, "logprobs": 1}
        first = c.json("/v1/completions", body)["choices"]
        assert c.json("/v1/completions", body)["choices"] == first
        single = c.json("/v1/completions", {**body, "n": 1})["choices"][0]
        assert single == first[0]


FAMILIES = {
    "committed": ["gemma2", "gemma3", "qwen3", "qwen3-moe", "mixtral", "phi3", "llama-bf16"],
    "shared": ["tiny-gemma2", "tiny-gemma3", "tiny-mixtral", "tiny-qwen3-moe", "tiny-llama-bf16"],
}


def check_family(path, numerics="cpu-f32"):
    """Fewer prompts for the other families: one batch against one at a time, mixed kernels and chunks, KV pages of f32 and of the
    class's own type. Returns the answers."""
    requests = [r for r in prompts() if len(r["prompt"]) in (1, 16, 17, 33, 65, 257, 400)]

    def nodes(*shapes, kv="auto"):
        return [[*node(*s), "--numerics", numerics, "--kv-dtype", kv] for s in shapes]

    with start(path, nodes(("auto", 1, 512), kv="f32"), nodes(("auto", 1, 512), kv="f32")) as c:
        answers = ask_all(c, requests, 1)
    with start(path, nodes(("plain", 2, 16), (best("avx2"), 1, 64)), nodes(("plain", 1, 512), (best("avx512", "avx2"), 2, 512))) as c:
        own = "f32" if numerics == "cpu-f32" else "bf16"
        assert all(f"dtype={own} " in n["kv_layout"] for n in c.cluster()["nodes"])
        got = ask_all(c, requests * 4, 28)
    compare(path, got, answers * 4, requests * 4)
    return answers


@pytest.mark.parametrize("name", FAMILIES["committed"])
def test_families(name):
    check_family(tiny(name))


@pytest.mark.parametrize("name", FAMILIES["shared"])
def test_shared_families(name):
    if name not in shared_models():
        pytest.skip(f"../shared/data/models/{name} is not here")
    check_family(shared_models()[name])


@pytest.mark.parametrize("name", ["gguf-q4_0", "gguf-q8_0", "gguf-q4_k"])
def test_integer_class(name):
    """One answer there too, and another one than in cpu-f32."""
    path = os.path.join(tiny(name), "model.gguf")
    assert check_family(path, "cpu-int8") != check_family(path)


@pytest.mark.parametrize("name", ["llama-bf16", "gguf-bf16"])
def test_bf16_class(name):
    """The same where activations are rounded to bf16; plain C, AVX2 and AVX512-BF16 in one cluster."""
    path = os.path.join(tiny(name), "model.gguf") if name.startswith("gguf") else tiny(name)
    assert check_family(path, "cpu-bf16") != check_family(path)
