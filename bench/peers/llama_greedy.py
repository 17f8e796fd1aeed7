#!/usr/bin/env python3
"""What llama.cpp answers, greedily: for comparisons of tokens.

    llama_greedy.py MODEL.gguf --tokens 32 < texts.json

Standard input: a JSON list of texts. Standard output: a JSON list with, for each text, the ids of its tokens (`prompt`), those of
the answer (`ids`), and how far the best logit of each step was above the second (`gaps`). One text after the other, KV in f32."""

import argparse
import ctypes
import json
import sys

import llama_cpp as lc
import numpy as np


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("model")
    p.add_argument("--tokens", type=int, default=32)
    p.add_argument("--threads", type=int, default=1)
    return p.parse_args()


def tokenize(vocab, text):
    data = text.encode()
    room = (lc.llama_token * (len(data) + 8))()
    n = lc.llama_tokenize(vocab, data, len(data), room, len(room), True, False)
    if n < 0:
        raise SystemExit(f"llama.cpp does not tokenize {text!r}")
    return list(room[:n])


def context(model, args, n):
    p = lc.llama_context_default_params()
    p.n_ctx = (n + 255) // 256 * 256
    p.n_batch = p.n_ctx
    p.n_seq_max = 1
    p.n_threads = p.n_threads_batch = args.threads
    p.type_k = p.type_v = lc.GGML_TYPE_F32
    ctx = lc.llama_init_from_model(model, p)
    if not ctx:
        raise SystemExit("llama.cpp makes no context")
    return ctx


def step(ctx, ids, n_vocab):
    """Logits after ids, which follow what the context holds."""
    array = (lc.llama_token * len(ids))(*ids)
    if lc.llama_decode(ctx, lc.llama_batch_get_one(array, len(ids))) != 0:
        raise SystemExit("llama_decode failed")
    return np.ctypeslib.as_array(lc.llama_get_logits_ith(ctx, -1), shape=(n_vocab,))


def answer(model, vocab, args, text):
    prompt, ids, gaps = tokenize(vocab, text), [], []
    ctx = context(model, args, len(prompt) + args.tokens)
    todo = prompt
    for _ in range(args.tokens):
        logits = step(ctx, todo, lc.llama_vocab_n_tokens(vocab))
        second, best = np.argpartition(logits, -2)[-2:]
        second, best = (second, best) if logits[best] > logits[second] else (best, second)
        ids.append(int(best))
        gaps.append(float(logits[best] - logits[second]))
        todo = [int(best)]
    lc.llama_free(ctx)
    return {"prompt": prompt, "ids": ids, "gaps": gaps}


def main():
    args = arguments()
    silent = lc.llama_log_callback(lambda *_: None)
    lc.llama_log_set(silent, ctypes.c_void_p(0))
    lc.llama_backend_init()
    model = lc.llama_model_load_from_file(args.model.encode(), lc.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not load {args.model}")
    vocab = lc.llama_model_get_vocab(model)
    print(json.dumps([answer(model, vocab, args, text) for text in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
