#!/usr/bin/env python3
"""Times llama.cpp as bench-engine times Baton's engine: prompts of N tokens, decode steps of B sequences with C tokens each.

    llama_bench.py MODEL.gguf --threads 1 --prefill 512 --decode 1@512,8@512

Prints one JSON object with the fields of `bench-engine --json` that comparisons read. Through llama-cpp-python's low-level
calls, no sampling (which only helps llama.cpp), KV cache in f16 unless told otherwise, its own choice of attention."""

import ctypes
import json
import statistics
import time

import llama_cpp as lc

from peer_cases import WARM_STEPS, decode_case, decodes, made_up_tokens, parser, prefill_case, prefills


class Context:
    def __init__(self, model, args, n_seq, tokens_each):
        p = lc.llama_context_default_params()
        each = (tokens_each + 255) // 256 * 256
        p.n_ctx = n_seq * each
        p.n_batch = 2048
        p.n_ubatch = 512
        p.n_seq_max = n_seq
        p.kv_unified = False
        p.n_threads = p.n_threads_batch = args.threads
        p.type_k = p.type_v = {"f32": lc.GGML_TYPE_F32, "f16": lc.GGML_TYPE_F16, "bf16": 30}[args.kv_dtype]
        self.ctx = lc.llama_init_from_model(model, p)
        if not self.ctx:
            raise SystemExit("llama.cpp makes no context")
        self.memory = lc.llama_get_memory(self.ctx)
        self.batch = lc.llama_batch_init(2048, 0, 1)

    def decode(self, tokens):
        """tokens: (token, position, sequence, wants logits)."""
        b = self.batch
        b.n_tokens = len(tokens)
        for i, (token, pos, seq, out) in enumerate(tokens):
            b.token[i] = token
            b.pos[i] = pos
            b.n_seq_id[i] = 1
            b.seq_id[i][0] = seq
            b.logits[i] = out
        if lc.llama_decode(self.ctx, b) != 0:
            raise SystemExit("llama_decode failed")
        lc.llama_synchronize(self.ctx)

    def prompt(self, tokens, seq=0):
        for at in range(0, len(tokens), 2048):
            part = tokens[at:at + 2048]
            self.decode([(t, at + i, seq, at + i + 1 == len(tokens)) for i, t in enumerate(part)])

    def close(self):
        lc.llama_batch_free(self.batch)
        lc.llama_free(self.ctx)


def prefill(model, args, n, vocab):
    c = Context(model, args, 1, n + 1)
    tokens = made_up_tokens(n, vocab)
    c.prompt(tokens[:512])
    times = []
    for _ in range(args.repeat):
        lc.llama_memory_clear(c.memory, False)
        start = time.perf_counter()
        c.prompt(tokens)
        times.append(time.perf_counter() - start)
    c.close()
    return prefill_case(n, statistics.median(times))


def decode(model, args, batch, context, vocab):
    c = Context(model, args, batch, context + args.steps + WARM_STEPS + 1)
    tokens = made_up_tokens(context, vocab)
    c.prompt(tokens)
    for seq in range(1, batch):
        lc.llama_memory_seq_cp(c.memory, 0, seq, -1, -1)
    times = []
    for step in range(args.steps + WARM_STEPS):
        todo = [(tokens[(seq + step) % context], context + step, seq, True) for seq in range(batch)]
        start = time.perf_counter()
        c.decode(todo)
        times.append(time.perf_counter() - start)
    c.close()
    return decode_case(batch, context, statistics.median(times[WARM_STEPS:]))


def main():
    args = parser(__doc__, "MODEL.gguf", choices=["f32", "f16", "bf16"], default="f16").parse_args()
    silent = lc.llama_log_callback(lambda *_: None)
    lc.llama_log_set(silent, ctypes.c_void_p(0))
    lc.llama_backend_init()
    start = time.perf_counter()
    model = lc.llama_model_load_from_file(args.model.encode(), lc.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not load {args.model}")
    ready = time.perf_counter() - start
    vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    cases = [prefill(model, args, n, vocab) for n in prefills(args)]
    cases += [decode(model, args, batch, context, vocab) for batch, context in decodes(args)]
    info = lc.llama_print_system_info().decode().strip(" |")
    print(json.dumps({"version": f"{lc.__version__} ({info})", "ready_s": ready, "cases": cases}))


if __name__ == "__main__":
    main()
