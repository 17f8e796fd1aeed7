"""Tokens beside llama.cpp: greedy answers of real models in every weight type, and files of `baton quantize` in the peer.

Both read the same file and text; answers may part where our two best tokens are close, and nowhere else: at the first step that
differs, what the peer chose must be within NEAR of our choice (natural logarithms of probabilities). llama.cpp rounds activations
too (to 8 bits for quantised weights, to 16 for 16-bit weights), in another way than we do in either class, so the limit is what such
rounding moves, not zero. Needs the peer that `bench/peers.sh` builds; skipped without.
"""

import array
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys

import grpc
import pytest

import grpc_stubs
from cluster import BIN, ROOT, SLOW, Cluster, parallel, tiny

pb, stubs = grpc_stubs.load()
PEER = os.path.join(ROOT, "build", "peers", "venv", "bin", "python")
GREEDY = os.path.join(ROOT, "bench", "peers", "llama_greedy.py")
N_TOKENS = 32
NEAR = {"f32": 0.02, "f16": 0.02, "bf16": 0.1}  # by weight type
NEAR_BLOCKS = 0.5
TYPES = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "bf16", "f16", "f32"]
CLASSES = ["cpu-f32", "cpu-int8"]
TEXTS = [
    "The quick brown fox",
    "The capital of France is",
    "one, two, three, four,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Es war einmal ein König, der",
    "Shopping list:\n- milk\n- eggs\n-",
    "In the beginning the Universe was created.",
    "Water boils at a temperature of",
    "#include <stdio.h>\n\nint main(void)\n{\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet of the solar system?\nA:",
    "La Révolution française a commencé en",
    "SELECT name, age FROM people WHERE",
    "The three primary colours are red,",
    "Once upon a time, in a village by the sea, there lived",
    "E = mc",
    "To bake bread you need flour, water,",
    "import numpy as np\n\nx = np.",
    "Monday, Tuesday, Wednesday,",
    "The relay race is the oldest team event in track and field. " * 45 + "In the final leg,",
]


@pytest.fixture(scope="module", autouse=True)
def peer():
    if not os.path.exists(PEER):
        pytest.skip("llama.cpp is not here: bench/peers.sh --help builds it (minutes)")


def theirs(model, texts, n_tokens=N_TOKENS):
    p = subprocess.run([PEER, GREEDY, model, "--tokens", str(n_tokens)], input=json.dumps(texts), capture_output=True, text=True,
                       check=False, timeout=900 * SLOW)
    assert p.returncode == 0, f"{model}: {p.stderr[-1000:]}"
    return json.loads(p.stdout)


def ask(stub, prompt, n_tokens):
    """[(id, [(id, log-probability) of the best])] for each step."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), logprobs=10,
                                 sampling=pb.SamplingParams(max_tokens=n_tokens, ignore_eos=True, temperature=0.0))
    messages = list(stub.Generate(request, timeout=900 * SLOW))
    return [(t.chosen.id, [(x.id, x.logprob) for x in t.top]) for m in messages for t in m.logprobs]


def ours(model, numerics, want, texts, n_tokens=N_TOKENS):
    with Cluster(model, kv_bytes="512MiB", node=["--numerics", numerics]) as c, grpc.insecure_channel(c.address) as channel:
        for text, w in zip(texts, want):
            ids = c.json("/tokenize", {"prompt": text, "add_special_tokens": True})["tokens"]
            assert ids == w["prompt"], f"{text!r} is other tokens for llama.cpp"
        stub = stubs.InferenceStub(channel)
        answers = parallel([lambda w=w: ask(stub, w["prompt"], n_tokens) for w in want])
        c.wait_idle(30)
        c.check_logs()
    return answers


def parting(answer, want):
    """(step, gap of our two best, what the peer's choice is behind ours), or None where all tokens are the same."""
    for step, ((mine, best), other) in enumerate(zip(answer, want["ids"])):
        if mine != other:
            at = dict(best).get(other, -99.0)
            return step, best[0][1] - best[1][1], best[0][1] - at
    return None


def compare(name, model, near, texts, classes, n_tokens=N_TOKENS):
    want = theirs(model, texts, n_tokens)
    wrong = []
    for numerics in classes:
        answers = ours(model, numerics, want, texts, n_tokens)
        assert all(len(a) == n_tokens for a in answers)
        parted = [(i, p) for i, p in enumerate(parting(a, w) for a, w in zip(answers, want)) if p is not None]
        behind = max((p[2] for _, p in parted), default=0)
        print(f"{name}, {numerics}: {len(texts) - len(parted)} of {len(texts)} answers of {n_tokens} tokens are the same; where the others part, "
              f"our two best are {sorted(round(p[1], 4) for _, p in parted)} apart; the peer's choice is at most {behind:.4f} behind ours")
        wrong += [(numerics, texts[i][:40], p) for i, p in parted if p[2] > near]
    assert not wrong, f"{name}: apart where it is no near-tie (limit {near}): {wrong}"


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    """SmolLM2's values as a Hugging Face directory of f32 weights."""
    folder = str(tmp_path_factory.mktemp("hf") / "SmolLM2")
    subprocess.run([os.path.join(BIN, "baton"), "quantize", model, "--to", "f32", "--hf", folder], check=True, capture_output=True)
    return folder


def quantize(source, kind, folder):
    out = os.path.join(folder, f"{os.path.basename(source)}-{kind}.gguf")
    p = subprocess.run([os.path.join(BIN, "baton"), "quantize", source, "--to", kind, "--out", out], capture_output=True, text=True, check=False)
    assert p.returncode == 0, p.stderr
    return out


def test_smollm2(model):
    compare("SmolLM2 Q4_1", model, NEAR_BLOCKS, TEXTS, CLASSES)


@pytest.mark.parametrize("kind", TYPES)
def test_quantized_smollm2(directory, kind, tmp_path):
    path = quantize(directory, kind, tmp_path)
    compare(f"SmolLM2 {kind}", path, NEAR.get(kind, NEAR_BLOCKS), TEXTS, CLASSES if kind not in NEAR else CLASSES[:1])
    os.remove(path)


def test_gemma3():
    """K-quants, a vocabulary of 262,144, sliding windows of 512 tokens."""
    p = subprocess.run([sys.executable, os.path.join(ROOT, "bench", "peers", "fetch_gemma.py"), os.path.join(ROOT, "build", "peers", "models")],
                       stdout=subprocess.PIPE, text=True, check=False)
    if p.returncode != 0:
        pytest.skip("Gemma 3 270M cannot be fetched: offline? (its messages are above)")
    compare("Gemma 3 270M Q4_K_M", p.stdout.strip(), NEAR_BLOCKS, TEXTS, CLASSES)


SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
# What llama.cpp takes for granted in Gemma 3: every sixth layer sees all, and scores are divided by the root of the head's size.
MADE = {"qwen2": {"max_window_layers": 6}, "qwen3": {"max_window_layers": 6},
        "gemma3": {"sliding_window": 16, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32}}


def made_shapes(name):
    """(tensor, shape); norms and biases have one number."""
    q, kv, dim, ffn = 128, 64, 128, 128
    layer = {"self_attn.q_proj.weight": (q, dim), "self_attn.k_proj.weight": (kv, dim), "self_attn.v_proj.weight": (kv, dim),
             "self_attn.o_proj.weight": (dim, q), "mlp.gate_proj.weight": (ffn, dim), "mlp.up_proj.weight": (ffn, dim),
             "mlp.down_proj.weight": (dim, ffn), "input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
    if name == "qwen2":
        layer.update({"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)})
    else:
        layer.update({"self_attn.q_norm.weight": (32,), "self_attn.k_norm.weight": (32,)})
    if name == "gemma3":
        layer.update({"pre_feedforward_layernorm.weight": (dim,), "post_feedforward_layernorm.weight": (dim,)})
    yield "model.embed_tokens.weight", (288, dim)
    yield "model.norm.weight", (dim,)
    for i in range(SIZES["num_hidden_layers"]):
        for tensor, shape in layer.items():
            yield f"model.layers.{i}.{tensor}", shape


def made(name, folder):
    """A Hugging Face directory with a fixture's tokenizer and random weights whose rows are whole blocks."""
    source = tiny(name)
    for f in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(os.path.join(source, f), folder)
    with open(os.path.join(source, "config.json"), encoding="utf-8") as f:
        config = {**json.load(f), **SIZES, **MADE[name]}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    rng, header, data = random.Random(name), {}, array.array("f")
    for tensor, shape in made_shapes(name):
        start, n = 4 * len(data), math.prod(shape)
        mean = 1.0 if len(shape) == 1 and "norm" in tensor and name != "gemma3" else 0.0
        spread = 0.2 if len(shape) == 1 else shape[1] ** -0.5 if "layers" in tensor else 0.3
        data.extend(rng.gauss(mean, spread) for _ in range(n))
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [start, 4 * len(data)]}
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data.tobytes())
    return folder


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", MADE)
def test_quantized_made_model(name, kind, tmp_path):
    """Random weights: the logits are of no language, but the same ones."""
    folder = tmp_path / name
    folder.mkdir()
    path = quantize(made(name, str(folder)), kind, tmp_path)
    compare(f"{name} {kind}", path, NEAR.get(kind, NEAR_BLOCKS), TEXTS[:19], CLASSES if kind not in NEAR else CLASSES[:1], 16)
