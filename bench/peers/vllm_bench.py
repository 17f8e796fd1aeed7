#!/usr/bin/env python3
"""Times vLLM on CPUs as bench-engine times Baton's engine: prompts of N tokens, decode steps of B sequences with C tokens each.

    vllm_bench.py HF_DIRECTORY --threads 1 --prefill 512 --decode 1@512,8@512

Prints one JSON object with the fields of `bench-engine --json` that comparisons read. Engine and worker in this process, no
tokenizer, greedy sampling, no prefix cache."""

import json
import os
import statistics
import time

from peer_cases import WARM_STEPS, decode_case, decodes, made_up_tokens, parser, prefill_case, prefills

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class Engine:
    def __init__(self, args):
        cpus = sorted(os.sched_getaffinity(0))[:args.threads]
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", VLLM_LOGGING_LEVEL="ERROR",
                          VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)), OMP_NUM_THREADS=str(args.threads))
        import vllm
        self.vllm = vllm
        lengths = prefills(args) + [c + args.steps + WARM_STEPS for _, c in decodes(args)]
        self.llm = vllm.LLM(args.model, dtype=DTYPES[args.kv_dtype], skip_tokenizer_init=True, enable_prefix_caching=False, enforce_eager=args.eager,
                            max_model_len=max(lengths) + 64, max_num_seqs=max([b for b, _ in decodes(args)], default=1),
                            max_num_batched_tokens=2048, disable_log_stats=True, seed=0)
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self.n_requests = 0

    def run(self, prompts, n_answer):
        """Seconds of each step until all have n_answer tokens, and how many tokens there were after each."""
        engine = self.llm.llm_engine
        params = self.vllm.SamplingParams(temperature=0, max_tokens=n_answer, ignore_eos=True, detokenize=False)
        for tokens in prompts:
            self.n_requests += 1
            engine.add_request(str(self.n_requests), {"prompt_token_ids": tokens}, params)
        times, counts, answers = [], [], {}
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            for out in engine.step():
                answers[out.request_id] = len(out.outputs[0].token_ids)
            times.append(time.perf_counter() - start)
            counts.append(sum(answers.values()))
        return times, counts


def prefill(engine, args, n):
    tokens = made_up_tokens(n, engine.vocab)
    engine.run([tokens], 1)
    return prefill_case(n, statistics.median(sum(engine.run([tokens], 1)[0]) for _ in range(args.repeat)))


def decode(engine, args, batch, context):
    prompts = [made_up_tokens(context, engine.vocab, seed) for seed in range(1, batch + 1)]
    times, counts = engine.run(prompts, args.steps + WARM_STEPS + 1)
    # Steps that gave every sequence one token, and nothing else.
    full = [t for t, before, after in zip(times[1:], counts, counts[1:]) if after - before == batch and before >= batch]
    return decode_case(batch, context, statistics.median(full[WARM_STEPS:]))


def main():
    p = parser(__doc__, "HF_DIRECTORY", choices=list(DTYPES), default="f32", help="of weights and activations too: vLLM has one type for all")
    p.add_argument("--eager", action="store_true", help="do not compile")
    args = p.parse_args()
    start = time.perf_counter()
    engine = Engine(args)
    ready = time.perf_counter() - start
    cases = [prefill(engine, args, n) for n in prefills(args)]
    cases += [decode(engine, args, batch, context) for batch, context in decodes(args)]
    print(json.dumps({"version": engine.vllm.__version__, "ready_s": ready, "cases": cases}))


if __name__ == "__main__":
    main()
