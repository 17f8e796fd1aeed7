"""What the scripts that time a peer share: the cases asked for on the command line, made-up tokens, and the form of a result, which
is that of `bench-engine --json`."""

import argparse

WARM_STEPS = 2


def parser(doc, model, **kv_dtype):
    """kv_dtype: choices, default and more of --kv-dtype."""
    p = argparse.ArgumentParser(description=doc.split("\n")[0])
    p.add_argument("model", metavar=model)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--prefill", default="512", metavar="N[,N...]")
    p.add_argument("--decode", default="1@512", metavar="B@C[,...]")
    p.add_argument("--steps", type=int, default=32)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--kv-dtype", **kv_dtype)
    return p


def prefills(args):
    return [int(n) for n in args.prefill.split(",") if n != "0"]


def decodes(args):
    """(batch, context) of each case."""
    return [tuple(int(v) for v in text.split("@")) for text in args.decode.split(",") if text != "0"]


def made_up_tokens(n, vocab, seed=1):
    s, out = seed, []
    for _ in range(n):
        s = (s * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append((s >> 8) % vocab)
    return out


def prefill_case(context, seconds):
    return {"phase": "prefill", "batch": 1, "context": context, "seconds": seconds, "tokens_per_s": context / seconds}


def decode_case(batch, context, seconds):
    return {"phase": "decode", "batch": batch, "context": context, "seconds": seconds, "tokens_per_s": batch / seconds}
