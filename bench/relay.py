#!/usr/bin/env python3
"""What the relay adds to a prompt: time to the first token through router and prefill node beside the bare engine's prefill
(bench-engine), in turn, and what was left of the KV transfer after the last layer, as a share of the prefill time.

    bench/relay.py --model MODEL --threads 1
    chrt -f 1 bench/relay.py --model MODEL          on a machine with other work; needs root
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import time

from cluster_load import ROOT, Up, commit, machine


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", required=True, metavar="DIR_OR_GGUF")
    p.add_argument("--tokens", default="512,2048", metavar="N[,N...]", help="prompt lengths")
    p.add_argument("--rounds", type=int, default=5, help="requests and bare prefills of each length, in turn")
    p.add_argument("--threads", type=int, default=1, help="of the prefill node and of bench-engine")
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"), metavar="DIR")
    p.add_argument("up_options", nargs="*", metavar="-- OPTION", help="more options for baton up")
    args = p.parse_args()
    args.prefill = args.decode = 1
    args.up_options = ["--threads", str(args.threads), "--prefix-cache", "off", *args.up_options]
    return args


def post(address, path, body):
    host, _, port = address.rpartition(":")
    conn = http.client.HTTPConnection(host, int(port), timeout=600)
    conn.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    reply = conn.getresponse()
    if reply.status != 200:
        sys.exit(f"{path}: {reply.status} {reply.read(500)}")
    return reply


def one(address, ids):
    """(seconds to the first token, timings)"""
    body = {"prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True, "timings": True,
            "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    reply = post(address, "/v1/completions", body)
    first, timings = None, None
    for line in reply:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter()
            timings = json.loads(line[6:]).get("timings") or timings
    if first is None or timings is None:
        sys.exit("the stream brought no token or no timings")
    return first - start, timings


def bare(args, n):
    done = subprocess.run([os.path.join(args.bin, "bench-engine"), "--threads", str(args.threads), "--prefill", str(n), "--decode", "0",
                           "--repeat", "1", "--json", args.model], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["cases"][0]["seconds"]


def measure(args, address, n):
    rng = random.Random(n)
    with post(address, "/tokenize", {"prompt": "The quick brown fox jumps over the lazy dog. " * 4}) as reply:
        known = json.load(reply)["tokens"]
    ttft, engine, timings = [], [], []
    one(address, [rng.choice(known) for _ in range(n)])
    for _ in range(args.rounds):
        seconds, t = one(address, [rng.choice(known) for _ in range(n)])
        ttft.append(seconds)
        timings.append(t)
        engine.append(bare(args, n))
    med = statistics.median
    prefill = med(t["prefill_ms"] for t in timings)
    tail = med(t["transfer_tail_ms"] for t in timings)
    moved = timings[-1]["transferred_bytes"]
    print(f"| {n} | {1e3 * med(engine):.1f} | {1e3 * med(ttft):.1f} | {med(ttft) / med(engine):.3f} | {prefill:.1f} | {tail:.2f} | "
          f"{tail / prefill:.2%} | {moved / 1e6:.1f} |", flush=True)


def main():
    args = arguments()
    up = Up(args)
    try:
        address = up.address()
        print(f"commit {commit()}; {machine()}; {os.path.basename(args.model)}, {args.threads} thread(s), medians of {args.rounds}\n")
        print("| prompt | bare prefill, ms | first token, ms | ratio | prefill at P, ms | tail of the transfer, ms | of prefill | MB moved |")
        print("|---|---|---|---|---|---|---|---|")
        for n in args.tokens.split(","):
            measure(args, address, int(n))
    finally:
        up.stop()


if __name__ == "__main__":
    main()
