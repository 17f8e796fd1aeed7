#!/usr/bin/env python3
"""KV pages between two processes beside ucx_perftest's active messages: same message size, same transport, in turn.

    bench/transfer/perftest.py --sizes 65536,131072 --transports tcp,shm

ucx_perftest sends one buffer again and again, which stays in the caches; so bench-transfer runs twice, with pages out of 64 MiB
and out of 1 MiB. With tcp, ucx_perftest runs with UCX's default segments and with Baton's (256 KiB), the better one counts.
Needs ucx_perftest (Debian: ucx-utils)."""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
TLS = {"tcp": "tcp", "shm": "sysv,posix"}


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--sizes", default="24576,65536,131072,262144", metavar="BYTES[,...]", help="of a page's share of one layer")
    p.add_argument("--transports", default="tcp,shm", metavar="T[,T]")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--mib", type=int, default=256, help="moved in each round")
    p.add_argument("--run", default=os.environ.get("RUN", ""), metavar="COMMAND", help="put before every measured program")
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"), metavar="DIR")
    return p.parse_args()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def perftest_once(args, command, size, env):
    """GB/s, or None: the server does not listen yet, or both hang (ucx_perftest polls; with real-time priority it can keep the
    kernel's network threads off the CPUs)."""
    n = max(args.mib * 1024 * 1024 // size, 10)
    try:
        done = subprocess.run([*command, "127.0.0.1", "-t", "ucp_am_bw", "-s", str(size), "-n", str(n), "-w", "200", "-f", "-v"],
                              env=env, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode != 0:
        return None
    return float(done.stdout.strip().splitlines()[-1].split(",")[5]) * 1024 * 1024 / 1e9


def perftest(args, transport, size, settings):
    """GB/s of one run of ucp_am_bw."""
    env = dict(os.environ, UCX_TLS=TLS[transport], UCX_LOG_LEVEL="error", **settings)
    for _ in range(10):
        command = args.run.split() + ["ucx_perftest", "-p", str(free_port())]
        server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(0.5)
            result = perftest_once(args, command, size, env)
        finally:
            server.kill()
            server.wait()
        if result is not None:
            return result
    sys.exit(f"ucx_perftest over {transport} does not end")


def baton(args, transport, size, pool):
    command = args.run.split() + [os.path.join(args.bin, "bench-transfer"), "--tls", transport, "--protos", "eager", "--windows", "4194304",
                                  "--shares", str(size), "--bytes", f"{args.mib}MiB", "--pool", pool, "--repeats", "3", "--median",
                                  "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1].split(",")[7])


def main():
    args = arguments()
    if shutil.which("ucx_perftest") is None:
        sys.exit("ucx_perftest is not installed (Debian: ucx-utils)")
    print(f"load average {os.getloadavg()[0]:.1f}; {args.rounds} rounds in turn, medians, GB/s\n")
    print("| transport | message, bytes | Baton, 64 MiB of pages | Baton, 1 MiB | ucx_perftest ucp_am_bw | ratio, 64 MiB | ratio, 1 MiB |")
    print("|---|---|---|---|---|---|---|")
    for transport in args.transports.split(","):
        for size in (int(s) for s in args.sizes.split(",")):
            cold, hot, peer, segments = [], [], [], []
            for _ in range(args.rounds):
                cold.append(baton(args, transport, size, "64MiB"))
                peer.append(perftest(args, transport, size, {}))
                hot.append(baton(args, transport, size, "1MiB"))
                segments.append(perftest(args, transport, size, SEGMENTS) if transport == "tcp" else 0)
            best = max(statistics.median(peer), statistics.median(segments))
            a, b = statistics.median(cold), statistics.median(hot)
            print(f"| {transport} | {size} | {a:.2f} | {b:.2f} | {best:.2f} | {a / best:.2f} | {b / best:.2f} |", flush=True)


if __name__ == "__main__":
    main()
