#!/usr/bin/env python3
"""Open-loop load on a cluster: Poisson arrivals at a given rate, whatever the cluster does with them.

Starts `baton up` with the wanted P:D ratio (or uses --server), sends streaming completions, and prints time to first
token, inter-token latency, tokens a second, with commit and machine. Needs Python's standard library only.

    bench/cluster_load.py --prefill 2 --decode 1 --rate 4 --requests 100
    bench/cluster_load.py --server 127.0.0.1:8000 --rate 1,2,4,8 --csv out.csv
    bench/cluster_load.py --model DIR_OR_GGUF --rate 2 -- --threads 1 --chunk-tokens 256

Times are measured from the moment at which a request was due, so a client that falls behind does not flatter the
server. Tokens that arrive in one event count the gap before it once; TPOT is the mean over an answer.
"""

import argparse
import asyncio
import csv
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIELDS = ["commit", "machine", "prefill", "decode", "model", "rate", "requests", "failed", "refused", "seconds", "prompt_tokens",
          "output_tokens", "requests_s", "output_tokens_s", "total_tokens_s", "ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99",
          "itl_ms_p50", "itl_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "late_ms_max"]
TEXT = ("A relay team trains on the old track by the river. The first runner reads the course, the second one finishes it; "
        "between them lies a zone of twenty metres in which the baton must change hands without either of them slowing. ") * 20


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--server", metavar="HOST:PORT", help="a running router; without it `baton up` is started")
    p.add_argument("--model", metavar="DIR_OR_GGUF", help="for baton up (its default is fetched once)")
    p.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill nodes to start")
    p.add_argument("--decode", type=int, default=1, metavar="N", help="decode nodes to start")
    p.add_argument("--rate", default="2", metavar="R[,R...]", help="requests a second; several are run in turn")
    p.add_argument("--requests", type=int, default=60, metavar="N", help="requests for each rate")
    p.add_argument("--warmup", type=int, default=4, metavar="N", help="requests before, one at a time, not counted")
    p.add_argument("--prompt-tokens", default="200", metavar="N[:MAX]", help="length of prompts, uniform between both")
    p.add_argument("--output-tokens", default="40", metavar="N[:MAX]", help="length of answers (end of text is ignored)")
    p.add_argument("--seed", type=int, default=1, help="of arrivals, lengths and prompts")
    p.add_argument("--timeout", type=float, default=300, metavar="S", help="for one request, in seconds")
    p.add_argument("--csv", metavar="FILE", help="append one line for each rate (- for standard output)")
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"), metavar="DIR", help="where baton lies")
    p.add_argument("up_options", nargs="*", metavar="-- OPTION", help="more options for baton up")
    return p.parse_args()


def length_range(text):
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def percentile(values, q):
    """Linear between the neighbours; 0 without values."""
    if not values:
        return 0.0
    values = sorted(values)
    at = (len(values) - 1) * q
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def commit():
    git = ["git", "-C", ROOT]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if dirty else "")


def machine():
    name = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            name = re.search(r"^model name\s*:\s*(.*)$", f.read(), re.M).group(1)
    except (OSError, AttributeError):
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}"


class Up:
    """`baton up` as a child; its messages go to standard error."""

    def __init__(self, args):
        self.log = tempfile.NamedTemporaryFile(prefix="baton-bench-", suffix=".log")
        model = ["--model", args.model] if args.model else []
        self.proc = subprocess.Popen([os.path.join(args.bin, "baton"), "up", *model, "--listen", "127.0.0.1:0", "--prefill",
                                      str(args.prefill), "--decode", str(args.decode), *args.up_options],
                                     stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)

    def address(self):
        while True:
            with open(self.log.name, encoding="utf-8", errors="replace") as f:
                text = f.read()
            found = re.search(r"ready\S* on http://(\S+:\d+)", text)
            if found:
                return found.group(1)
            if self.proc.poll() is not None:
                sys.exit(f"bench/cluster_load.py: baton up ended with {self.proc.returncode}:\n{text}")
            time.sleep(0.05)

    def stop(self):
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGINT)
            self.proc.wait()
        self.log.close()


class Outcome:
    """What became of one request; times in seconds on the loop's clock."""

    def __init__(self, due):
        self.due = due
        self.late = 0.0
        self.first = self.last = None
        self.gaps = []
        self.tokens = 0
        self.prompt_tokens = 0
        self.status = None
        self.error = None


async def read_head(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), head.lower()


async def read_chunks(reader):
    """The pieces of a chunked HTTP/1.1 body."""
    while True:
        size = int((await reader.readline()).strip() or b"0", 16)
        if size == 0:
            return
        yield await reader.readexactly(size)
        await reader.readexactly(2)


def take_event(out, event, now):
    if "error" in event:
        out.error = event["error"]["message"]
    elif event["choices"]:
        if out.first is None:
            out.first = now
        else:
            out.gaps.append(now - out.last)
        out.last = now
    if event.get("usage"):
        out.tokens = event["usage"]["completion_tokens"]
        out.prompt_tokens = event["usage"]["prompt_tokens"]


async def stream(host, port, body, out):
    loop = asyncio.get_running_loop()
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\nConnection: close\r\n\r\n" % (host.encode(), len(data)) + data)
        out.status, _ = await read_head(reader)
        if out.status != 200:
            out.error = (await reader.read(4096)).decode(errors="replace")
            return
        rest = b""
        done = False
        async for piece in read_chunks(reader):
            now = loop.time()
            *events, rest = (rest + piece).split(b"\n\n")
            for e in events:
                if e == b"data: [DONE]":
                    done = True
                elif e.startswith(b"data: "):
                    take_event(out, json.loads(e[6:]), now)
        if not done and out.error is None:
            out.error = "the stream ended early"
    finally:
        writer.close()


async def one(host, port, body, out, timeout):
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, out.due - loop.time()))
    out.late = loop.time() - out.due
    try:
        await asyncio.wait_for(stream(host, port, body, out), timeout)
    except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError) as e:
        out.error = out.error or f"{type(e).__name__} {e}"


async def request_json(host, port, path, body=None):
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    data = json.dumps(body).encode() if body is not None else b""
    writer.write(b"%b %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" %
                 (b"POST" if body is not None else b"GET", path.encode(), len(data)) + data)
    status, _ = await read_head(reader)
    reply = await reader.read()
    writer.close()
    if status != 200:
        sys.exit(f"bench/cluster_load.py: {path}: {status} {reply[:300]!r}")
    return json.loads(reply)


def make_body(rng, ids, args):
    n = rng.randint(*length_range(args.prompt_tokens))
    return {"prompt": [rng.choice(ids) for _ in range(n)], "max_tokens": rng.randint(*length_range(args.output_tokens)),
            "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def run_rate(host, port, rate, ids, args):
    """(outcomes, seconds from the first arrival to the last token)"""
    rng = random.Random(f"{args.seed} {rate}")
    loop = asyncio.get_running_loop()
    for _ in range(args.warmup):
        await one(host, port, make_body(rng, ids, args), Outcome(loop.time()), args.timeout)
    start = due = loop.time() + 0.1
    outcomes, tasks = [], []
    for _ in range(args.requests):
        out = Outcome(due)
        outcomes.append(out)
        tasks.append(asyncio.create_task(one(host, port, make_body(rng, ids, args), out, args.timeout)))
        due += rng.expovariate(rate)
    await asyncio.gather(*tasks)
    return outcomes, loop.time() - start


def summary(outcomes, seconds, rate, about, args):
    good = [o for o in outcomes if o.error is None and o.first is not None]
    ttft = [1e3 * (o.first - o.due) for o in good]
    itl = [1e3 * g for o in good for g in o.gaps]
    tpot = [1e3 * (o.last - o.first) / (o.tokens - 1) for o in good if o.tokens > 1]
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.tokens for o in good)
    return {
        **about, "rate": rate, "requests": len(outcomes), "refused": sum(o.status == 429 for o in outcomes),
        "failed": sum(o.error is not None and o.status != 429 for o in outcomes), "seconds": round(seconds, 2),
        "prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens,
        "requests_s": round(len(good) / seconds, 3), "output_tokens_s": round(output / seconds, 1),
        "total_tokens_s": round((prompt + output) / seconds, 1),
        **{f"ttft_ms_p{q}": round(percentile(ttft, q / 100), 2) for q in (50, 90, 99)},
        **{f"itl_ms_p{q}": round(percentile(itl, q / 100), 3) for q in (50, 99)},
        **{f"tpot_ms_p{q}": round(percentile(tpot, q / 100), 3) for q in (50, 99)},
        "late_ms_max": round(1e3 * max(o.late for o in outcomes), 1),
    }


def print_summary(s, outcomes):
    print(f"\n{s['rate']:g} requests/s on {s['prefill']}P:{s['decode']}D, {s['requests']} requests in {s['seconds']} s, "
          f"{s['failed']} failed, {s['refused']} refused; prompts {s['prompt_tokens']}, answers {s['output_tokens']} tokens")
    print(f"  TTFT        p50 {s['ttft_ms_p50']:9.1f} ms   p90 {s['ttft_ms_p90']:9.1f} ms   p99 {s['ttft_ms_p99']:9.1f} ms")
    print(f"  ITL         p50 {s['itl_ms_p50']:9.2f} ms                      p99 {s['itl_ms_p99']:9.2f} ms")
    print(f"  TPOT        p50 {s['tpot_ms_p50']:9.2f} ms                      p99 {s['tpot_ms_p99']:9.2f} ms")
    print(f"  throughput  {s['requests_s']:.2f} requests/s, {s['output_tokens_s']:.1f} output tokens/s, "
          f"{s['total_tokens_s']:.1f} tokens/s with prompts")
    if s["late_ms_max"] > 20:
        print(f"  note: this client sent a request {s['late_ms_max']:.0f} ms late")
    for e in {o.error for o in outcomes if o.error}:
        print(f"  error: {e[:200]}")


def write_csv(path, rows):
    exists = path != "-" and os.path.exists(path) and os.path.getsize(path) > 0
    f = sys.stdout if path == "-" else open(path, "a", encoding="utf-8", newline="")
    writer = csv.DictWriter(f, FIELDS)
    if not exists:
        writer.writeheader()
    writer.writerows(rows)
    if f is not sys.stdout:
        f.close()


async def bench(address, args):
    host, _, port = address.rpartition(":")
    status = await request_json(host, port, "/v1/cluster")
    ids = sorted(set((await request_json(host, port, "/tokenize", {"prompt": TEXT, "add_special_tokens": False}))["tokens"]))
    ready = [n for n in status["nodes"] if n["state"] == "ready"]
    about = {"commit": commit(), "machine": machine(), "model": status["model"],
             "prefill": sum(n["role"] == "prefill" for n in ready), "decode": sum(n["role"] == "decode" for n in ready)}
    print(f"commit {about['commit']}; {about['machine']}; model {about['model']}")
    rows = []
    for rate in map(float, args.rate.split(",")):
        outcomes, seconds = await run_rate(host, port, rate, ids, args)
        rows.append(summary(outcomes, seconds, rate, about, args))
        print_summary(rows[-1], outcomes)
    if args.csv:
        write_csv(args.csv, rows)
    return 1 if any(r["failed"] for r in rows) else 0


def main():
    args = arguments()
    if args.server:
        return asyncio.run(bench(args.server, args))
    up = Up(args)
    try:
        return asyncio.run(bench(up.address(), args))
    finally:
        up.stop()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
