#!/usr/bin/env python3
"""Everything about the CUDA backend that needs a GPU: checks, then measurements, one JSON and one table. Needs no network and
Python's standard library only. A section that fails says so, and the rest still runs.

    bench/gpu_check.sh                          # takes build/cuda, or builds it; the first device; Llama-3-8B's shapes in BF16
    bench/gpu_check.sh --size 1b --sections speed,ttft
    bench/gpu_check.sh --emulated --build build/cuda-emulated      # the script itself, on the emulated device

Exit code: 0 all sections passed or were skipped, 1 one failed, 2 wrong usage, 3 no device."""

import argparse
import glob
import http.client
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from cluster_load import ROOT, commit, machine, percentile
from gpu_model import SIZES, bytes_of, write_model

sys.path.insert(0, os.path.join(ROOT, "bench", "transfer"))
import perftest  # noqa: E402, ucx_perftest beside it

GOLDEN = os.path.join(ROOT, "tests", "golden", "models")
TINY = os.path.join(GOLDEN, "llama")
TINY_BF16 = os.path.join(GOLDEN, "llama-bf16")
PROMPT = [1, *range(40, 75)]
# Dense BF16 peak in TFLOP/s and memory bandwidth in GB/s, from NVIDIA's data sheets; the first name that is part of the device's counts.
PEAKS = [("GH200", 989, 4900), ("H200", 989, 4800), ("H100 PCIe", 756, 2000), ("H100 NVL", 835, 3900), ("H100", 989, 3350), ("B200", 2250, 8000),
         ("A100-PCIE-40GB", 312, 1555), ("A100-SXM4-40GB", 312, 1555), ("A100", 312, 2039)]
# Batches and contexts of decode steps. Bytes of a page's share of one layer: 16 tokens, 8 heads of 128 values, K and V, 2 bytes.
DECODE = "1@512,2@512,4@512,8@512,16@512,32@512,64@512,1@4096,8@4096,32@2048,1@8192"
SHARE = "65536"
# Seconds that a section may take. Together with the build more than the whole may: TOTAL ends what is left then.
LIMITS = {"build": 300, "kernels": 60, "models": 75, "determinism": 60, "sanitizer": 75, "relay": 45, "model": 90, "transfer": 75, "speed": 180, "ttft": 60}
TOTAL = 590


class Failed(Exception):
    """What a section found wrong; figures: what it measured all the same."""

    def __init__(self, text, figures=()):
        super().__init__(text)
        self.figures = list(figures)


class Skipped(Exception):
    """Why a section cannot be."""


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--build", metavar="DIR", help="a build of the preset cuda (default: build/cuda, built if it is not there)")
    p.add_argument("--device", type=int, default=0, metavar="N")
    p.add_argument("--size", choices=list(SIZES), default="8b", help="shapes of the model that is measured, Llama-3's")
    p.add_argument("--sections", default=",".join(LIMITS), metavar="NAME[,NAME...]", help="only these")
    p.add_argument("--classes", default="auto,cuda-cublas", metavar="C[,C...]", help="numerics classes to measure")
    p.add_argument("--json", default=os.path.join(ROOT, "build", "gpu-check.json"), metavar="FILE", help="where everything is written")
    p.add_argument("--work", metavar="DIR", help="where the model is made (default: /dev/shm if it has room, else build/)")
    p.add_argument("--peak-tflops", type=float, metavar="T", help="dense BF16 peak of the device, if it is not known here")
    p.add_argument("--peak-gbs", type=float, metavar="G", help="its memory bandwidth, likewise")
    p.add_argument("--emulated", action="store_true", help="a build of cuda-emulated, tiny shapes: checks this script, measures nothing")
    p.add_argument("--slow", type=float, default=1, metavar="F", help="all limits times this")
    args = p.parse_args()
    unknown = set(args.sections.split(",")) - set(LIMITS)
    if unknown:
        p.error(f"--sections: there is no {', '.join(sorted(unknown))}; there are {', '.join(LIMITS)}")
    args.preset = "cuda-emulated" if args.emulated else "cuda"
    args.build = os.path.abspath(args.build or os.path.join(ROOT, "build", args.preset))
    args.size = "tiny" if args.emulated else args.size
    return args


def say(text):
    print(text, file=sys.stderr, flush=True)


class Check:
    """The run: its options, its clock, what was found."""

    def __init__(self, args):
        self.args = args
        self.start = time.monotonic()
        self.section_end = self.start + TOTAL * args.slow
        self.sections = []
        self.device = None
        self.model = None
        self.notes = []
        self.env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        if args.emulated:
            self.env["ASAN_OPTIONS"] = "detect_stack_use_after_return=0"

    def left(self):
        left = min(self.section_end, self.start + TOTAL * self.args.slow) - time.monotonic()
        if left <= 0:
            raise Failed("no time left")
        return left

    def program(self, name):
        for folder in ("bin", "tests"):
            path = os.path.join(self.args.build, folder, name)
            if os.path.exists(path):
                return path
        raise Failed(f"{self.args.build} has no {name}")

    def run(self, *command, skip=True):
        """Its standard output. A process group of its own, so that a limit ends all of it."""
        p = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=self.env, start_new_session=True)
        try:
            out, err = p.communicate(timeout=self.left())
        except BaseException as e:
            os.killpg(p.pid, signal.SIGKILL)
            p.communicate()
            if isinstance(e, subprocess.TimeoutExpired):
                raise Failed(f"{os.path.basename(command[0])}: not done within the section's time") from None
            raise
        if p.returncode == 77 and skip:
            raise Skipped((out + err).strip().splitlines()[-1] if out + err else "skipped")
        if p.returncode != 0:
            raise Failed(f"{' '.join(os.path.basename(c) for c in command)} ended with {p.returncode}: {(out + err)[-1500:].strip()}")
        return out

    def section(self, name, function):
        began = time.monotonic()
        self.section_end = began + LIMITS[name] * self.args.slow
        self.notes = []
        entry = {"name": name, "status": "passed", "note": "", "figures": []}
        say(f"-- {name}")
        try:
            entry["figures"] = function(self) or []
        except Skipped as e:
            entry.update(status="skipped", note=str(e))
        except (Failed, OSError, ValueError, KeyError, IndexError, http.client.HTTPException) as e:
            entry.update(status="failed", note=str(e) if isinstance(e, Failed) else repr(e), figures=getattr(e, "figures", []))
        entry["note"] = "; ".join(filter(None, [*self.notes, entry["note"]]))
        entry["seconds"] = round(time.monotonic() - began, 1)
        self.sections.append(entry)
        say(f"   {entry['status']}, {entry['seconds']} s{': ' + entry['note'] if entry['note'] else ''}")


# ---- a cluster ----


class Cluster:
    """`baton up`: a router and two nodes on the one device."""

    def __init__(self, check, model, *options):
        self.check = check
        self.log = tempfile.NamedTemporaryFile(prefix="baton-gpu-check-", suffix=".log")
        self.proc = subprocess.Popen([check.program("baton"), "up", "--model", model, "--listen", "127.0.0.1:0", "--backend", "cuda", "--device",
                                      str(check.args.device), *options], stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
                                     start_new_session=True, env=check.env)
        self.address = None

    def text(self):
        with open(self.log.name, encoding="utf-8", errors="replace") as f:
            return f.read()

    def __enter__(self):
        try:
            while not self.address:
                self.check.left()
                found = re.search(r"ready\S* on http://(\S+:\d+)", self.text())
                self.address = found and found.group(1)
                if self.proc.poll() is not None:
                    raise Failed(f"baton up ended with {self.proc.returncode}: {self.text()[-1500:].strip()}")
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGINT)
            try:
                self.proc.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.proc.pid, signal.SIGKILL)
                self.proc.wait()
        self.log.close()

    def post(self, body):
        conn = http.client.HTTPConnection(self.address, timeout=self.check.left())
        conn.request("POST", "/v1/completions", json.dumps({"temperature": 0, "ignore_eos": True, **body}), {"Content-Type": "application/json"})
        reply = conn.getresponse()
        if reply.status != 200:
            raise Failed(f"the cluster answered {reply.status}: {reply.read(500)!r}; {self.text()[-1000:]}")
        return reply

    def answer(self, prompt):
        a = json.load(self.post({"prompt": prompt, "max_tokens": 6, "logprobs": 2}))
        return a["choices"][0]["logprobs"], a["usage"]

    def stream(self, prompt, max_tokens=2):
        """(seconds to the first token, the router's timings)"""
        start, first, timings = time.perf_counter(), None, None
        for line in self.post({"prompt": prompt, "max_tokens": max_tokens, "stream": True, "timings": True,
                               "stream_options": {"include_usage": True}}):
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - start
                timings = json.loads(line[6:]).get("timings") or timings
        if first is None or timings is None:
            raise Failed("a stream brought no token or no timings")
        return first, timings


# ---- checks ----


def build(c):
    need = ["baton", "baton-router", "baton-prefilld", "baton-decoded", "bench-copies", "bench-engine", "bench-transfer"]
    tests = ["test_model_golden", "test_model_bf16", "test_model_cublas", "test_cuda_same", "test_cuda_same_rows", "test_cuda_sample", "test_engine_cuda"]
    there = [os.path.exists(os.path.join(c.args.build, "bin", n)) for n in need] + [os.path.exists(os.path.join(c.args.build, "tests", n)) for n in tests]
    if all(there):
        c.notes.append(f"{os.path.relpath(c.args.build, ROOT)} was there")
        return
    if c.args.build != os.path.join(ROOT, "build", c.args.preset):
        raise Failed(f"{c.args.build} is not a complete build of the preset {c.args.preset}")
    c.run("cmake", "--preset", c.args.preset, *(["-G", "Ninja"] if shutil.which("ninja") else []), skip=False)
    c.run("cmake", "--build", "--preset", c.args.preset, "-j", str(os.cpu_count() or 1), skip=False)


def find_device(c):
    """Its name, from the backend itself."""
    out = c.run(c.program("bench-engine"), "--backend", "cuda", "--device", str(c.args.device), "--prefill", "1", "--decode", "0", "--repeat", "1", "--json", TINY)
    return json.loads(out.strip().splitlines()[-1])["backend"]


def run_tests(c, programs):
    """Each alone; the first failure does not hide the others."""
    wrong, skipped = [], []
    for p in programs:
        try:
            c.run(*p)
        except Skipped as e:
            skipped.append(f"{os.path.basename(p[0])}: {e}")
        except Failed as e:
            wrong.append(str(e))
    c.notes.append(f"{len(programs) - len(wrong) - len(skipped)} of {len(programs)} programs passed")
    c.notes += [f"skipped {s}" for s in skipped]
    if wrong:
        raise Failed("; ".join(wrong))


def kernel_tests(c):
    names = sorted(os.path.basename(p) for p in glob.glob(os.path.join(c.args.build, "tests", "test_cuda_*")))
    names = [n for n in names if not n.startswith("test_cuda_same")]
    if not names:
        raise Failed(f"{c.args.build}/tests has no test_cuda_*")
    return names[-1:] if c.args.emulated else names  # ctest runs all of them on the emulated device


def kernels(c):
    run_tests(c, [[c.program(n)] for n in kernel_tests(c)])


def models(c):
    golden = c.program("test_model_golden")
    if c.args.emulated:
        run_tests(c, [[golden, "--backend", "cuda", TINY, os.path.join(TINY, "reference.json")]])
        return
    run_tests(c, [[golden, "--backend", "cuda"], [c.program("test_model_bf16"), "--backend", "cuda"], [c.program("test_model_cublas")]])


def determinism(c):
    """Products, the other kernels, whole engines: the same bits for any rows, chunks, mates and places of pages."""
    large = [] if c.args.emulated else ["--large"]
    engine = [c.program("test_engine_cuda"), *[os.path.join(GOLDEN, n) for n in ("mistral-swa", "mixtral", "llama-bf16", os.path.join("gguf-q8_0", "model.gguf"))]]
    run_tests(c, [[c.program("test_cuda_same"), *large], *([] if c.args.emulated else [[c.program("test_cuda_same_rows"), *large], [c.program("test_cuda_sample"), *large], engine])])


def sanitizer(c):
    tool = shutil.which("compute-sanitizer")
    if c.args.emulated:
        raise Skipped("the emulated device has AddressSanitizer and its own watch")
    if tool is None:
        raise Skipped("compute-sanitizer is not installed")
    run_tests(c, [[tool, "--tool", kind, "--error-exitcode", "9", c.program(n)] for kind in ("memcheck", "synccheck", "racecheck") for n in ("test_cuda_rows", "test_cuda_attention", "test_cuda_mover", "test_cuda_sample")])


def one_answer(c, model, *options):
    """The answer of two daemons, which is one whatever the chunks; pages crossed."""
    answers = []
    for more in ([], ["--chunk-tokens", "7", "--prefix-cache", "off"]):
        with Cluster(c, model, "--kv-bytes", "64MiB", *options, *more) as cluster:
            got, usage = cluster.answer(PROMPT)
            if usage["transferred_tokens"] != len(PROMPT):
                raise Failed(f"{usage['transferred_tokens']} of {len(PROMPT)} tokens were moved")
            answers += [got, cluster.answer(PROMPT)[0]]
    if any(a != answers[0] for a in answers):
        raise Failed(f"one prompt, several answers of {os.path.basename(model)}: {answers}")
    return answers[0]


def relay(c):
    """Two daemons on the device, in f32 and, with 16-bit weights and pages, on tensor cores; then those of cuBLAS."""
    exact = one_answer(c, TINY)
    one_answer(c, TINY_BF16, "--kv-dtype", "bf16")
    with Cluster(c, TINY, "--kv-bytes", "64MiB", "--numerics", "cuda-cublas") as cluster:
        got, _ = cluster.answer(PROMPT)
        off = max(abs(a - b) for a, b in zip(got["token_logprobs"], exact["token_logprobs"]))
        if off > 1e-3:  # F32 weights: only the order of sums differs
            raise Failed(f"class cuda-cublas is off by {off:.3g} in a log-probability")


# ---- measurements ----


def make_model(c):
    if c.model is None:
        need = bytes_of(SIZES[c.args.size]) * 1.05
        work = c.args.work
        if work is None:
            work = "/dev/shm" if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 1.2 * need else os.path.join(ROOT, "build")
        if shutil.disk_usage(work).free < need:
            raise Failed(f"{work} has no room for {need / 1e9:.1f} GB of made weights (--work DIR)")
        c.model = tempfile.mkdtemp(prefix="baton-gpu-check-", dir=work)
        write_model(c.model, SIZES[c.args.size], TINY)
    return c.model


def model(c):
    """Shapes of Llama-3 in BF16, made up here; what is measured computes with them."""
    began = time.monotonic()
    size = os.path.getsize(os.path.join(make_model(c), "model.safetensors"))
    c.notes.append(f"{size / 1e9:.1f} GB in {time.monotonic() - began:.1f} s, in {os.path.dirname(c.model)}")


def peak(c):
    for name, tflops, gbs in PEAKS:
        if name in c.device:
            return c.args.peak_tflops or tflops, c.args.peak_gbs or gbs
    return c.args.peak_tflops, c.args.peak_gbs


def kv_options(c):
    return ["--kv-dtype", "bf16", "--kv-bytes", "16MiB" if c.args.emulated else "8GiB"]


def speed(c):
    model = make_model(c)
    cases = ["--chunk-tokens", "16", "--prefill", "24", "--decode", "1@16,4@16", "--steps", "2", "--repeat", "1"] if c.args.emulated else [
        "--chunk-tokens", "4096", "--prefill", "512,2048,4096", "--decode", DECODE, "--steps", "24", "--repeat", "3"]
    tflops, gbs = peak(c)
    figures = []
    for numerics in c.args.classes.split(","):
        try:
            out = c.run(c.program("bench-engine"), "--backend", "cuda", "--device", str(c.args.device), "--numerics", numerics, "--kv-dtype", "bf16", "--json", *cases, model)
        except Failed as e:
            c.notes.append(f"class {numerics}: {e}")
            continue
        run = json.loads(out.strip().splitlines()[-1])
        for r in run["cases"]:
            share, of = (r["gops"] / (1e3 * tflops) if tflops else None, "BF16 peak") if r["phase"] == "prefill" else (
                r["gbytes_per_s"] / gbs if gbs else None, "bandwidth")
            figures.append({"what": f"{r['phase']} {r['batch']} at {r['context']}", "class": run["numerics"], "tokens_per_s": r["tokens_per_s"],
                            "ms": 1e3 * r["seconds"], "tflops": r["gops"] / 1e3, "gbytes_per_s": r["gbytes_per_s"], "share": share, "share_of": of,
                            "outside_us": 1e6 * r["outside_seconds"] if r["outside_seconds"] > 0 else None})
    if c.notes:
        raise Failed(f"{len(c.notes)} of {len(c.args.classes.split(','))} classes could not be measured", figures)
    return figures


def pages_between(c, memory):
    """GB/s of pages between two processes, by transport and protocol; from device to device with memory "cuda"."""
    out = c.run(c.program("bench-transfer"), "--bytes", "1MiB" if c.args.emulated else "512MiB", "--shares", SHARE, "--windows", "4194304",
                "--repeats", "1" if c.args.emulated else "5", "--median", "--memory", memory, "--device", str(c.args.device))
    rows = [line.split(",") for line in out.strip().splitlines()]
    return [dict(zip(rows[0], row)) for row in rows[1:]]


def peer_rates(c, memory):
    """The same of ucx_perftest's active messages, by transport. Says why where there are none."""
    cpus = sorted(os.sched_getaffinity(0))
    options = argparse.Namespace(mib=4 if c.args.emulated else 512, cpus=f"{cpus[0]},{cpus[-1]}", timeout=min(20, c.left()))
    rates = {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")  # --device counts among these
    visible = seen.split(",")[c.args.device] if seen else str(c.args.device)
    for transport in ("tcp", "shm"):
        settings = dict(perftest.SEGMENTS if transport == "tcp" else {}, CUDA_VISIBLE_DEVICES=visible)
        try:
            rates[transport] = perftest.perftest(options, transport, SHARE, settings, memory)
        except (SystemExit, OSError) as e:
            c.notes.append(f"no ucx_perftest over {transport} with {memory} memory: {e}")
    return rates


def transfer_pages(c, figures):
    can = {"host": shutil.which("ucx_perftest") is not None, "cuda": False}
    if not can["host"]:
        c.notes.append("ucx_perftest is not installed: nothing beside which to measure")
    else:
        can["cuda"] = re.search(r"\bcuda\b", subprocess.run(["ucx_perftest", "-h"], capture_output=True, text=True, check=False).stdout) is not None
        if not can["cuda"]:
            c.notes.append("this ucx_perftest knows no CUDA memory")
    for memory in ("host", "cuda"):
        rates = peer_rates(c, memory) if can[memory] else {}
        for transport, rate in rates.items():
            figures.append({"what": f"ucx_perftest, {SHARE} bytes in {memory} memory, {transport}", "gbytes_per_s": rate})
        for r in pages_between(c, memory):
            rate = float(r["gb_per_s"])
            peer = rates.get(r["tls"])
            figures.append({"what": f"pages of {SHARE} bytes in {memory} memory, {r['tls']} {r['proto']}: {r['transport']}", "gbytes_per_s": rate,
                            "share": rate / peer if peer else None, "share_of": "ucx_perftest"})


def transfer_copies(c, figures):
    """Pages between device memory and pinned memory: many in one launch, as the nodes do it, beside a copy of the runtime for each."""
    out = c.run(c.program("bench-copies"), "--device", str(c.args.device), *(["--bytes", "1MiB", "--repeats", "1"] if c.args.emulated else []))
    rows = [line.split(",") for line in out.strip().splitlines()]
    single = None
    for r in (dict(zip(rows[0], row)) for row in rows[1:]):
        rate = float(r["gb_per_s"])
        single = rate if r["way"] == "single" else single  # comes first
        batch = {"share": rate / single, "share_of": "copies one by one"} if r["way"] == "batch" else {}
        figures.append({"what": f"copies {'to the host' if r['direction'] == 'out' else 'to the device'}, {r['share_bytes']} bytes, "
                                f"{'one by one' if r['way'] == 'single' else r['at_once'] + ' at once'}",
                        "gbytes_per_s": rate, "pages_per_s": float(r["shares_per_s"]), **batch})


def transfer(c):
    """Pages alone, beside ucx_perftest; then in a cluster: P has a prompt cached, D never, so a repeated prompt is all transfer."""
    figures = []
    transfer_copies(c, figures)
    transfer_pages(c, figures)
    tokens = 40 if c.args.emulated else 7680
    rng = random.Random(1)
    prompt = [rng.randrange(40, 200) for _ in range(tokens)]
    with Cluster(c, make_model(c), *kv_options(c), "--decode-prefix-cache", "off") as cluster:
        cluster.stream(prompt)
        rates, moved = [], 0
        for _ in range(2 if c.args.emulated else 5):
            _, t = cluster.stream(prompt)
            moved = t["transferred_bytes"]
            rates.append(moved / (t["prefill_ms"] + t["transfer_tail_ms"]) / 1e6)
    if moved == 0:
        raise Failed("no page was moved")
    figures.append({"what": f"a prompt's pages from device to device, {moved / 1e6:.1f} MB, with the prefill of its last block",
                    "gbytes_per_s": statistics.median(rates)})
    return figures


def many_streams(cluster, rng, tokens, n, clients):
    """n requests by so many clients at once: (ms to the first token, ms of transfer after the last layer) of each."""
    prompts = [[rng.randrange(40, 200) for _ in range(tokens)] for _ in range(n)]
    got, wrong = [], []

    def client():
        try:
            while prompts:
                try:
                    prompt = prompts.pop()
                except IndexError:  # another client took the last one
                    return
                seconds, t = cluster.stream(prompt)
                got.append((1e3 * seconds, t["transfer_tail_ms"]))
        except Exception as e:  # noqa: BLE001, raised below
            wrong.append(e)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if wrong:
        raise wrong[0]
    return got


def ttft(c):
    """First tokens through router, prefill and decode node: one request at a time, then eight."""
    tokens, n = (20, 3) if c.args.emulated else (512, 100)
    rng = random.Random(2)
    figures = []
    with Cluster(c, make_model(c), *kv_options(c), "--prefix-cache", "off") as cluster:
        many_streams(cluster, rng, tokens, 2, 1)
        for clients in (1, 2 if c.args.emulated else 8):
            got = many_streams(cluster, rng, tokens, n, clients)
            what = f"first token, {tokens} tokens, {clients} at a time"
            figures += [{"what": f"{what}: {name}", "ms": percentile([first for first, _ in got], q)} for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))]
            figures.append({"what": f"transfer after the last layer, {clients} at a time: p50", "ms": percentile([tail for _, tail in got], 0.5)})
    return figures


FUNCTIONS = {"build": build, "kernels": kernels, "models": models, "determinism": determinism, "sanitizer": sanitizer, "relay": relay, "model": model, "transfer": transfer,
             "speed": speed, "ttft": ttft}


# ---- what is told ----


def number(f, key, pattern="{:.1f}"):
    return pattern.format(f[key]) if f.get(key) is not None else ""


def table(c):
    lines = ["| section | result | s | note |", "|---|---|---|---|"]
    for s in c.sections:
        note = s["note"].replace("\n", " ")
        lines.append(f"| {s['name']} | {s['status'] if s['status'] != 'failed' else '**FAILED**'} | {s['seconds']} | {note[:160]} |")
    figures = [f for s in c.sections for f in s["figures"]]
    if figures:
        lines += ["", "| figure | class | tokens/s | ms | TFLOP/s | GB/s | pages/s | share | step outside the graph, µs |", "|---|---|---|---|---|---|---|---|---|"]
    for f in figures:
        share = f"{100 * f['share']:.1f} % of {f['share_of']}" if f.get("share") is not None else ""
        lines.append(f"| {f['what']} | {f.get('class', '')} | {number(f, 'tokens_per_s')} | {number(f, 'ms', '{:.2f}')} | {number(f, 'tflops')} | "
                     f"{number(f, 'gbytes_per_s', '{:.2f}')} | {number(f, 'pages_per_s', '{:.0f}')} | {share} | {number(f, 'outside_us')} |")
    return "\n".join(lines)


def write_json(c, code):
    os.makedirs(os.path.dirname(os.path.abspath(c.args.json)), exist_ok=True)
    with open(c.args.json, "w", encoding="utf-8") as f:
        json.dump({"commit": commit(), "machine": machine(), "device": c.device, "emulated": c.args.emulated, "size": c.args.size, "exit_code": code,
                   "seconds": round(time.monotonic() - c.start, 1), "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "sections": c.sections}, f, indent=1)
        f.write("\n")


def check_all(c):
    wanted = c.args.sections.split(",")
    for name, function in FUNCTIONS.items():
        if name != "build" and c.device is None:
            try:
                c.section_end = time.monotonic() + 60 * c.args.slow
                c.device = find_device(c)
                say(f"   {c.device}")
            except Failed as e:
                say(f"bench/gpu_check.sh: no device that Baton can use: {e}")
                return 3
        if name in wanted or name == "build":
            c.section(name, function)
            if name == "build" and c.sections[-1]["status"] == "failed":
                return 1
    return 1 if any(s["status"] == "failed" for s in c.sections) else 0


def main():
    c = Check(arguments())
    code = 1
    try:
        code = check_all(c)
    finally:
        if c.model is not None:
            shutil.rmtree(c.model, ignore_errors=True)
        write_json(c, code)
    what = ", emulated on the CPU: no figure means anything" if c.args.emulated else ""
    print(f"commit {commit()}; {c.device or 'no device'}{what}; {machine()}; Llama-3 shapes \"{c.args.size}\", BF16; {time.monotonic() - c.start:.0f} s\n")
    print(table(c))
    say(f"bench/gpu_check.sh: {c.args.json}")
    return code


if __name__ == "__main__":
    sys.exit(main())
