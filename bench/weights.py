#!/usr/bin/env python3
"""What smaller weights cost and gain, with one real model: bytes, perplexity, prefill and decode speed for each weight type and
numerics class.

    bench/weights.py                                  # everything: fetches SmolLM2-135M as `baton up` does, some ten minutes
    RUN="chrt -f 1" bench/weights.py --types q8_0,q4_1 --rounds 5
    bench/weights.py --perplexity no --types bf16 --keep build/weights.json    # in pieces: a file gathers the figures
    bench/weights.py --types none --keep build/weights.json                     # and this prints them

SmolLM2 comes with Q4_1 weights. `baton quantize` writes their values as a Hugging Face directory, and that as the other types:
so f32 and q4_1 are the same values, bf16, q8_0 and q5_1 show what rounding these costs, and q4_0 a second rounding to 4 bits. With
--model DIR (full weights) all types are rounded once.

The text is bench/text/botchan.txt: chapters I to III of "Botchan" by Natsume Soseki in Yasotaro Morri's translation of 1918,
in the public domain, as Project Gutenberg has it (59 kB)."""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys

from cluster_load import ROOT, commit, machine

CLASSES = {"f32": ["cpu-f32"], "f16": ["cpu-f32"], "bf16": ["cpu-f32", "cpu-bf16"], "fp8": ["cpu-f32", "cpu-bf16"]}
QUANTIZED = ["cpu-f32", "cpu-int8"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", metavar="DIR_OR_GGUF", help="default: SmolLM2-135M-Instruct, fetched if need be")
    p.add_argument("--types", default="f32,bf16,q8_0,q5_1,q4_1,q4_0", metavar="T[,T...]", help="as `baton quantize --to` has them; none: measure "
                   "nothing")
    p.add_argument("--classes", metavar="C[,C...]", help="numerics classes (default: cpu-f32, cpu-bf16 for bf16 and fp8 weights, cpu-int8 for quantised ones)")
    p.add_argument("--text", default=os.path.join(ROOT, "bench", "text", "botchan.txt"), metavar="FILE")
    p.add_argument("--perplexity", default="yes", choices=["yes", "no"])
    p.add_argument("--speed", default="yes", choices=["yes", "no"])
    p.add_argument("--threads", default="1,2", metavar="N[,N...]")
    p.add_argument("--rounds", type=int, default=3, help="of the timed runs, all types in turn")
    p.add_argument("--run", default=os.environ.get("RUN", ""), metavar="COMMAND", help="put before every timed program")
    p.add_argument("--work", default=os.path.join(ROOT, "build", "weights"), metavar="DIR", help="where the files are made and kept")
    p.add_argument("--keep", metavar="FILE", help="JSON: figures of earlier runs are taken from it, and all are written to it")
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"), metavar="DIR")
    return p.parse_args()


def say(text):
    print(text, file=sys.stderr, flush=True)


def output(command):
    p = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if p.returncode != 0:
        sys.exit(f"bench/weights.py: {' '.join(command)} ended with {p.returncode}")
    return p.stdout


def source(args):
    """The model whose values are rounded."""
    if args.model:
        return args.model
    gguf = output([os.path.join(args.bin, "baton"), "fetch"]).strip().splitlines()[-1]
    folder = os.path.join(args.work, "SmolLM2-135M-Instruct")
    if not os.path.exists(os.path.join(folder, "config.json")):
        output([os.path.join(args.bin, "baton"), "quantize", gguf, "--to", "f32", "--hf", folder])
    return folder


def model(args, kind):
    base = source(args)
    path = os.path.join(args.work, f"{os.path.basename(base.rstrip('/'))}-{kind}{'' if kind == 'fp8' else '.gguf'}")
    if not os.path.exists(os.path.join(path, "config.json") if kind == "fp8" else path):
        output([os.path.join(args.bin, "baton"), "quantize", base, "--to", kind, "--hf" if kind == "fp8" else "--out", path])
    return path


def size(path):
    return os.path.getsize(os.path.join(path, "model.safetensors") if os.path.isdir(path) else path)


def perplexity(args, path, numerics):
    text = output([os.path.join(args.bin, "baton"), "perplexity", path, args.text, "--numerics", numerics])
    m = re.match(r"perplexity (\S+) ± (\S+) in class \S+, kv \S+: (\d+) tokens in \d+ windows of (\d+)", text)
    return {"perplexity": float(m[1]), "error": float(m[2]), "tokens": int(m[3]), "context": int(m[4])}


def speed(args, path, numerics, threads):
    text = output(args.run.split() + [os.path.join(args.bin, "bench-engine"), "--json", "--threads", threads, "--numerics", numerics, "--prefill", "512",
                                      "--decode", "1@128,8@128", "--steps", "16", "--repeat", "2", path])
    return [c["tokens_per_s"] for c in json.loads(text.strip().splitlines()[-1])["cases"]]


def measure(args, kept):
    kinds = [] if args.types == "none" else args.types.split(",")
    cases = [(kind, c) for kind in kinds for c in (args.classes.split(",") if args.classes else CLASSES.get(kind, QUANTIZED))]
    for kind, numerics in cases:
        path = model(args, kind)
        entry = kept.setdefault(f"{kind} {numerics}", {"bytes": size(path), "speed": {}})
        if args.perplexity == "yes":
            entry.update(perplexity(args, path, numerics))
            say(f"{kind}, {numerics}: perplexity {entry['perplexity']}")
    for i in range(args.rounds if args.speed == "yes" else 0):
        for kind, numerics in cases:
            for threads in args.threads.split(","):
                kept[f"{kind} {numerics}"]["speed"].setdefault(threads, []).append(speed(args, model(args, kind), numerics, threads))
        say(f"round {i + 1} of {args.rounds}")


def medians(entry, threads, case):
    values = [s[case] for s in entry["speed"].get(threads, [])]
    return f"{statistics.median(values):.0f}" if values else "–"


def report(kept):
    threads = sorted({t for e in kept.values() for t in e["speed"]}, key=int)
    tokens = {(e["tokens"], e["context"]) for e in kept.values() if "tokens" in e}
    print(f"commit {commit()}; {machine()}; perplexity of {', '.join(f'{n} tokens in windows of {c}' for n, c in tokens)}; speeds in tokens/s: "
          f"medians, {' / '.join(threads)} threads\n")
    print("| weights | class | MB | perplexity | prefill 512 | decode 1 at 128 | decode 8 at 128 |")
    print("|---|---|---|---|---|---|---|")
    for name, e in kept.items():
        kind, numerics = name.split(" ")
        speeds = [" / ".join(medians(e, t, case) for t in threads) for case in range(3)]
        value = f"{e['perplexity']:.3f} ± {e['error']:.2f}" if "perplexity" in e else "–"
        print(f"| {kind.upper()} | {numerics} | {e['bytes'] / 1e6:.0f} | {value} | {' | '.join(speeds)} |")


def main():
    args = arguments()
    kept = {}
    if args.keep and os.path.exists(args.keep):
        with open(args.keep, encoding="utf-8") as f:
            kept = json.load(f)
    os.makedirs(args.work, exist_ok=True)
    measure(args, kept)
    if args.keep:
        with open(args.keep, "w", encoding="utf-8") as f:
            json.dump(kept, f)
    report(kept)


if __name__ == "__main__":
    main()
