#!/usr/bin/env python3
"""Baton's engine beside llama.cpp or vLLM, in turn, in one run, next to the machine's limits. Started by bench/peers.sh, which
installs what it needs; --help lists what can be measured. Prints Markdown, and with --json FILE keeps every figure.

Reading and FMA are measured by bench-engine between the steps of each case, 8-bit and BF16 products by bench-limits before and after."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.dirname(os.path.abspath(__file__))


PEERS = {"llama.cpp": "llama_bench.py", "vllm": "vllm_bench.py"}


def arguments():
    p = argparse.ArgumentParser(prog="bench/peers.sh", description=__doc__.split("\n")[0],
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--peer", default="llama.cpp", choices=list(PEERS), help="vllm: in f32, bf16 or f16, from a Hugging Face directory "
                   "that `baton quantize` makes of the file; --kv-dtype must be the type of the weights")
    p.add_argument("--types", default="f32,bf16,q8_0,q4_0,q4_k_m", metavar="T[,T...]",
                   help="weight types of the model of 0.6B shape with random weights; none: leave it out")
    p.add_argument("--model", action="append", default=[], metavar="GGUF", help="other files to measure, e.g. SmolLM2-135M")
    p.add_argument("--threads", default="1,2", metavar="N[,N...]")
    p.add_argument("--prefill", default="512", metavar="N[,N...]", help="prompt lengths; 0: none")
    p.add_argument("--decode", default="1@128,8@128", metavar="B@C[,...]", help="B sequences with C tokens each; 0: none")
    p.add_argument("--rounds", type=int, default=3, help="both are run so often, in turn")
    p.add_argument("--repeat", type=int, default=2, help="prompts in each run")
    p.add_argument("--steps", type=int, default=16, help="decode steps in each run")
    p.add_argument("--kv-dtype", default="f16", choices=["f32", "f16", "bf16"], help="of both")
    p.add_argument("--classes", default="auto", metavar="C[,C...]", help="numerics classes of Baton, all beside the same runs of the peer; "
                   "auto: what the weights suggest")
    p.add_argument("--isa", default="auto", choices=["auto", "avx2"], help="avx2: both without AVX-512, as on CPUs that have none")
    p.add_argument("--engine-opts", default="", metavar="TEXT", help="more options for bench-engine, separated by blanks")
    p.add_argument("--run", default=os.environ.get("RUN", ""), metavar="COMMAND",
                   help="put before every measured program, e.g. 'chrt -f 1' on a machine with other work")
    p.add_argument("--peer-python", default=sys.executable, metavar="FILE", help="the Python that has the peer")
    p.add_argument("--peer-opts", default="", metavar="TEXT", help="more options for the peer's script, separated by blanks")
    p.add_argument("--tokenizer", metavar="GGUF", help="whose tokenizer the random model gets")
    p.add_argument("--models-dir", default=os.path.join(ROOT, "build", "peers", "models"), metavar="DIR")
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"), metavar="DIR", help="where bench-engine lies")
    p.add_argument("--json", metavar="FILE", help="every figure of every round")
    p.add_argument("--merge", nargs="+", metavar="FILE", help="measure nothing: the table of what --json wrote in several runs, whose "
                   "cases may be different ones")
    p.add_argument("--compact", action="store_true", help="a line for each model, class and thread count: Baton's tokens/s, in brackets the "
                   "ratio; then shares of limits")
    return p.parse_args()


def say(text):
    print(text, file=sys.stderr, flush=True)


def output(args, command):
    done = subprocess.run(args.run.split() + command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def one_run(args, model, threads, numerics):
    """numerics None: the peer."""
    common = ["--threads", str(threads), "--prefill", args.prefill, "--decode", args.decode, "--steps", str(args.steps),
              "--repeat", str(args.repeat), "--kv-dtype", args.kv_dtype]
    if numerics is None:
        return output(args, [args.peer_python, os.path.join(HERE, PEERS[args.peer]), model_of_peer(args, model), *common,
                             *args.peer_opts.split()])
    return output(args, [os.path.join(args.bin, "bench-engine"), *common, "--limits", "--json", "--numerics", numerics, "--isa", args.isa,
                         *args.engine_opts.split(), model])


def model_of_peer(args, path):
    if args.peer == "llama.cpp":
        return path
    folder = os.path.join(args.models_dir, f"{os.path.basename(path).removesuffix('.gguf')}-{args.kv_dtype}-hf")
    if not os.path.exists(os.path.join(folder, "config.json")):
        subprocess.run([os.path.join(args.bin, "baton"), "quantize", path, "--to", args.kv_dtype, "--hf", folder], check=True,
                       stdout=subprocess.DEVNULL)
    return folder


def limits(args, threads):
    return output(args, [os.path.join(args.bin, "bench-limits"), "--json", "--threads", str(threads), "--samples", "9"])


def best(limit_runs, prefix):
    """The largest median of any run, over the kinds that begin so."""
    return max((v["n"] for run in limit_runs for k, v in run["limits"].items() if k.startswith(prefix)), default=0)


def by_case(runs):
    """(phase, batch, context) -> that case in each run that has it."""
    found = {}
    for r in runs:
        for c in r["cases"]:
            found.setdefault((c["phase"], c["batch"], c["context"]), []).append(c)
    return found


def median_of(cases, field):
    return statistics.median(c[field] for c in cases)


def peaks(entry):
    """Names and rates of the products that kernels of an entry's numerics class and instruction set may use, besides FMA."""
    runs, wide = entry["limits"], entry.get("isa", "auto") == "auto"
    if entry["numerics"] == "cpu-int8":
        return {"maddubs": maddubs(runs), "VNNI": best(runs, "int8 vnni") if wide else 0}
    return {"BF16": best(runs, "bf16")} if entry["numerics"] == "cpu-bf16" and wide else {}


def shares(case, ours, entry):
    gops = median_of(ours, "gops")
    found = [("FMA", statistics.median(c["gops"] / c["fma_gops"][0] for c in ours))]
    found += [(name, gops / rate) for name, rate in peaks(entry).items() if rate > 0]
    text = f"{gops:.0f} GFLOP/s: " + ", ".join(f"{share:.0%} of {name}" for name, share in found)
    if case[0] == "prefill":
        return text
    read = statistics.median(c["gbytes_per_s"] / c["read_gbytes_per_s"][0] for c in ours)
    return f"{median_of(ours, 'gbytes_per_s'):.1f} GB/s: {read:.0%} of reading" + (f"; {text}" if case[1] > 1 else "")


def table_row(entry, case, ours, theirs):
    phase, batch, context = case
    what = f"prefill {context}" if phase == "prefill" else f"decode {batch} at {context}"
    a, b = median_of(ours, "tokens_per_s"), median_of(theirs, "tokens_per_s")
    low = min(c["tokens_per_s"] for c in ours) / max(c["tokens_per_s"] for c in theirs)
    high = max(c["tokens_per_s"] for c in ours) / min(c["tokens_per_s"] for c in theirs)
    return (f"| {entry['model']} | {entry['numerics']} | {entry['threads']} | {what} | {a:.1f} | {b:.1f} | {a / b:.2f} ({low:.2f}–{high:.2f}) | "
            f"{shares(case, ours, entry)} |")


def table_rows(entry):
    theirs = by_case(entry["peer"])
    return [table_row(entry, case, ours, theirs[case]) for case, ours in by_case(entry["baton"]).items()]


def maddubs(limit_runs):
    return max(best(limit_runs, "int8 avx2"), best(limit_runs, "int8 avx512"))


def say_limits(entries):
    for threads in sorted({e["threads"] for e in entries}):
        runs = [r for e in entries if e["threads"] == threads for r in e["limits"]]
        print(f"{runs[0]['cpu']}, {threads} thread{'s' if threads > 1 else ''}: FMA {best(runs, 'fma'):.0f} GFLOP/s, int8 by maddubs "
              f"{maddubs(runs):.0f}, at most {best(runs, 'int8'):.0f} GOP/s, BF16 {best(runs, 'bf16'):.0f} GFLOP/s, read "
              f"{best(runs, 'read'):.1f} GB/s\n")


def say_table(entries):
    peer = entries[0]["peer_name"]
    print(f"| model | class | threads | what | Baton, tokens/s | {peer}, tokens/s | ratio (range) | Baton's shares of limits |")
    print("|---|---|---|---|---|---|---|---|")
    for e in entries:
        print("\n".join(table_rows(e)))


def limit_share(case, ours, entry):
    """In %: prefill, of the fastest products that the class may use; decode, of reading."""
    if case[0] == "decode":
        return 100 * statistics.median(c["gbytes_per_s"] / c["read_gbytes_per_s"][0] for c in ours)
    fastest = max([best(entry["limits"], "fma"), *peaks(entry).values()])
    return 100 * median_of(ours, "gops") / fastest


def decode_rates(run):
    """Tokens/s of one sequence and of eight in the same run, None where it lacks them: memory may differ in another."""
    rates = {c["batch"]: c["tokens_per_s"] for c in run["cases"] if c["phase"] == "decode"}
    return rates.get(1), rates.get(8)


def compact_line(entry, cases):
    ours, theirs = by_case(entry["baton"]), by_case(entry["peer"])
    rates = {c: median_of(ours[c], "tokens_per_s") for c in cases if c in ours}
    cells = [f"{rates[c]:{'.0f' if rates[c] >= 100 else '.3g'}} ({rates[c] / median_of(theirs[c], 'tokens_per_s'):.2f})" if c in rates else "–" for c in cases]
    of_limit = [f"{limit_share(c, ours[c], entry):.0f} %" if c in rates else "–" for c in cases if c[0] == "prefill" or c[1] == 1]
    gains = [eight / single for single, eight in (decode_rates(run) for run in entry["baton"]) if single and eight]
    gain = f"{statistics.median(gains):.1f}" if gains else "–"
    return f"| {entry['threads']} | {entry['model']} | {entry['numerics']} | {' | '.join(cells + of_limit)} | {gain} |"


def say_compact(entries):
    cases = sorted({c for e in entries for c in by_case(e["baton"])}, key=lambda c: (c[0] != "prefill", c[1], c[2]))
    names = [f"prefill {c[2]}" if c[0] == "prefill" else f"decode {c[1]}" for c in cases]
    of_limit = [f"{n}: of products" if c[0] == "prefill" else f"{n}: of reading" for n, c in zip(names, cases) if c[0] == "prefill" or c[1] == 1]
    print("| threads | weights | class | " + " | ".join(names + of_limit) + " | decode 8 / 1 |")
    print("|" + "---|" * (4 + len(names + of_limit)))
    for e in sorted(entries, key=lambda e: e["threads"]):
        print(compact_line(e, cases))


def merged(paths):
    """The entries of several files, those of one model, thread count and options as one."""
    found = {}
    for path in paths:
        with open(path, encoding="utf-8") as f:
            for e in json.load(f):
                key = (e["peer_name"], e["model"], e["threads"], e["numerics"], e["engine_opts"], e.get("isa", "auto"))
                if key not in found:
                    found[key] = e
                else:
                    for part in ("baton", "peer", "limits"):
                        found[key][part] += e[part]
    return list(found.values())


def models(args):
    for path in args.model:
        yield os.path.basename(path).removesuffix(".gguf"), path
    if args.types != "none":
        for kind in args.types.split(","):
            yield f"0.6B shape {kind.upper()}", os.path.join(args.models_dir, f"qwen3-0.6b-shape.{kind}.gguf")


def make_models(args):
    if args.types == "none":
        return
    tokenizer = args.tokenizer or next(iter(args.model), None) or os.path.join(args.models_dir, "tokenizer.gguf")
    subprocess.run([sys.executable, os.path.join(HERE, "make_model.py"), "--tokenizer", tokenizer, "--out", args.models_dir,
                    "--types", args.types], check=True)


def heading(args, version):
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty=+changes", "--abbrev=12"], capture_output=True, text=True)
    print(f"Baton {git.stdout.strip() or 'unknown'}, {args.peer} {version}, {platform.platform()}; KV "
          f"{args.kv_dtype}, {args.rounds} rounds in turn, medians{'; both without AVX-512' if args.isa == 'avx2' else ''}; load average at the start {os.getloadavg()[0]:.1f}"
          f"{', run with ' + args.run if args.run else ''}.\n")


def main():
    args = arguments()
    if args.merge:
        entries = merged(args.merge)
        say_limits(entries)
        (say_compact if args.compact else say_table)(entries)
        return
    make_models(args)
    for _, path in models(args):
        model_of_peer(args, path)
    entries = []
    version = "?"
    for threads in [int(n) for n in args.threads.split(",")]:
        limit_runs = [limits(args, threads)]
        for name, path in models(args):
            runs = {numerics: [] for numerics in [*args.classes.split(","), None]}
            for i in range(args.rounds):
                start = time.monotonic()
                for numerics in runs if i % 2 == 0 else reversed(runs):
                    runs[numerics].append(one_run(args, path, threads, numerics))
                say(f"{name}, threads {threads}, round {i + 1} of {args.rounds}: {time.monotonic() - start:.0f} s")
            theirs = runs.pop(None)
            version = theirs[0]["version"]
            limit_runs.append(limits(args, threads))
            entries += [{"model": name, "threads": threads, "numerics": ours[0]["numerics"], "engine_opts": args.engine_opts, "isa": args.isa,
                         "peer_name": args.peer, "baton": ours, "peer": theirs, "limits": limit_runs} for ours in runs.values()]
    say_limits(entries)
    heading(args, version)
    (say_compact if args.compact else say_table)(entries)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(entries, f)


if __name__ == "__main__":
    main()
