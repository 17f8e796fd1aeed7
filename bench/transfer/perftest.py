#!/usr/bin/env python3
"""KV pages between two processes beside ucx_perftest's active messages: same message size, same transport, same CPUs, in turn.

    bench/transfer/perftest.py --sizes 65536,131072 --transports tcp,shm

Sender and receiver have a CPU each. Every run of Baton lies between two of ucx_perftest, and its ratio is to their mean, because the
rate of a virtual machine's TCP changes by a factor of three within seconds, for both; what is printed are medians over the rounds.
ucx_perftest sends one buffer again and again, which stays in the caches; so bench-transfer runs twice, with pages out of 64 MiB
and out of 1 MiB. With tcp, ucx_perftest has UCX's default segments or Baton's (256 KiB), whichever is faster in a trial.

As root all programs run at nice -20 in sessions of their own. Not at real-time priority, and started so they leave it: ucx_perftest
polls, and two pollers that nothing may interrupt keep UCX's own threads, which make the connection, off both CPUs for ever.
Needs ucx_perftest (Debian: ucx-utils)."""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
TLS = {"tcp": "tcp", "shm": "sysv,posix"}
TRIES = 3


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--sizes", default="24576,65536,131072,262144", metavar="BYTES[,...]", help="of a page's share of one layer")
    p.add_argument("--transports", default="tcp,shm", metavar="T[,T]")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--mib", type=int, default=128, help="moved in each run")
    p.add_argument("--cpus", default="0,1", metavar="P,D", help="CPU of the sender and of the receiver")
    p.add_argument("--timeout", type=float, default=10, metavar="S", help="for one run, which takes below a second")
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"), metavar="DIR")
    return p.parse_args()


def prefixed(command, cpus):
    """The command as an ordinary process on these CPUs; with the weight of nice -20 where that is allowed."""
    shell = "echo -20 2>/dev/null >/proc/self/autogroup; renice -n -20 $$ >/dev/null 2>&1; exec \"$@\""
    return ["chrt", "-o", "0", "taskset", "-c", cpus, "sh", "-c", shell, "sh", *command]


@contextlib.contextmanager
def running(command, cpus, env=None):
    """A child in a session of its own; the session is killed at the end."""
    proc = subprocess.Popen(prefixed(command, cpus), env=env, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL, text=True)
    try:
        yield proc
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(proc.pid, signal.SIGKILL)
        proc.communicate()


def last_line(args, command, cpus, env=None):
    """The last line that the command prints, as fields. None: it failed, or did not end in time."""
    with running(command, cpus, env) as proc:
        try:
            out, _ = proc.communicate(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            return None
        return out.strip().splitlines()[-1].split(",") if proc.returncode == 0 and out.strip() else None


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_listening(args, port):
    """Until somebody listens at the port, without connecting: ucx_perftest takes the first connection for its client."""
    deadline = time.monotonic() + args.timeout
    while time.monotonic() < deadline:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(OSError), open(table, encoding="ascii") as f:
                if any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in f.readlines()[1:]):
                    return
        time.sleep(0.01)


def perftest(args, transport, size, settings, memory="host"):
    """GB/s of one run of ucp_am_bw; with memory "cuda" out of and into a device's, where ucx_perftest was built with it."""
    cuda = ",cuda_copy" if transport == "tcp" else ",cuda_copy,cuda_ipc"
    tls = TLS[transport] + (cuda if memory == "cuda" else "")
    env = dict(os.environ, UCX_TLS=tls, UCX_LOG_LEVEL="error", **settings)
    n = str(max(args.mib * 1024 * 1024 // int(size), 10))
    sender, receiver = args.cpus.split(",")
    for _ in range(TRIES):
        port = free_port()
        command = ["ucx_perftest", "-p", str(port), *(["-m", memory] if memory != "host" else [])]
        with running(command, receiver, env):
            wait_listening(args, port)
            fields = last_line(args, [*command, "127.0.0.1", "-t", "ucp_am_bw", "-s", size, "-n", n, "-w", "200", "-f", "-v"], sender, env)
        if fields is not None:
            return float(fields[5]) * 1024 * 1024 / 1e9
    sys.exit(f"ucx_perftest with {size} bytes over {transport} failed or did not end within {args.timeout:g} s, {TRIES} times")


def baton(args, transport, size, pool):
    sender, receiver = args.cpus.split(",")
    command = [os.path.join(args.bin, "bench-transfer"), "--tls", transport, "--protos", "eager", "--windows", "4194304", "--shares", size,
               "--bytes", f"{args.mib}MiB", "--pool", pool, "--repeats", "3", "--median", "--log-level", "error", "--p-cpus", sender,
               "--d-cpus", receiver]
    for _ in range(TRIES):
        fields = last_line(args, command, args.cpus)
        if fields is not None:
            return float(fields[7])
    sys.exit(f"bench-transfer with {size} bytes over {transport} failed or did not end within {args.timeout:g} s, {TRIES} times:\n"
             f"{' '.join(command)}")


def faster_settings(args, transport, size):
    if transport != "tcp":
        return {}
    tried = [({}, []), (SEGMENTS, [])]
    for _ in range(3):
        for settings, rates in tried:
            rates.append(perftest(args, transport, size, settings))
    return max(tried, key=lambda t: statistics.median(t[1]))[0]


def compare(args, transport, size):
    settings = faster_settings(args, transport, size)
    pools = {"64MiB": [], "1MiB": []}
    peer = [perftest(args, transport, size, settings)]
    ratios = {pool: [] for pool in pools}
    for _ in range(args.rounds):
        for pool, rates in pools.items():
            rates.append(baton(args, transport, size, pool))
            peer.append(perftest(args, transport, size, settings))
            ratios[pool].append(rates[-1] / statistics.mean(peer[-2:]))
    cells = [f"{statistics.median(rates):.2f}" for rates in [*pools.values(), peer]]
    cells += [f"{statistics.median(r):.2f} ({min(r):.2f}–{max(r):.2f})" for r in ratios.values()]
    print(f"| {transport} | {int(size) / 1024:g} KiB | {' | '.join(cells)} |", flush=True)


def main():
    args = arguments()
    if shutil.which("ucx_perftest") is None:
        sys.exit("ucx_perftest is not installed (Debian: ucx-utils)")
    if not {int(c) for c in args.cpus.split(",")} <= os.sched_getaffinity(0):
        sys.exit(f"--cpus {args.cpus}: this process may use CPUs {sorted(os.sched_getaffinity(0))}")
    print(f"load average {os.getloadavg()[0]:.1f}; {args.rounds} rounds in turn, medians, GB/s\n")
    print("| transport | message | Baton, 64 MiB of pages | Baton, 1 MiB | ucx_perftest ucp_am_bw | ratio, 64 MiB (range) | ratio, 1 MiB (range) |")
    print("|---|---|---|---|---|---|---|")
    for transport in args.transports.split(","):
        for size in args.sizes.split(","):
            compare(args, transport, size)


if __name__ == "__main__":
    main()
