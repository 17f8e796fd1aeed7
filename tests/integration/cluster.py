"""Real daemons on loopback for the integration suites: start, wait for, kill, look into."""

import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.environ.get("BATON_BIN", os.path.join(ROOT, "build", "release", "bin"))
GOLDEN = os.path.join(ROOT, "tests", "golden", "models")
SHARED = os.path.join(ROOT, "..", "shared", "data")
# A daemon whose engine or transfer thread calls the heap on the request path ends, and its test with it.
os.environ.setdefault("BT_HEAP_SEAL", "abort")
SLOW = float(os.environ.get("BATON_TEST_SLOW", "1"))  # deadlines times this, for sanitizer builds

# (test, seconds until all pools were seen free, seconds that leases had to run out before), for each wait_idle().
QUIET = []
EXPIRY = r"(?m)^(\d{4}-\S+)Z .*(?:nothing heard for|is silent|silent for longer| down: |was lost|no progress)"


def wait_until(what, check, seconds=30):
    """Polls until check() is true; fails with what it waited for."""
    end = time.monotonic() + seconds * SLOW
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds * SLOW:.0f} s for {what}")
        time.sleep(0.02)


class Daemon:
    """One child process whose log is kept and searched."""

    def __init__(self, name, argv, log_dir, env=None):
        self.name = name
        self.argv = argv
        self.log_path = os.path.join(log_dir, f"{name}-{time.monotonic_ns()}.log")
        self.log_file = open(self.log_path, "wb")
        self.proc = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self.log_file, stderr=subprocess.STDOUT,
                                     env=dict(os.environ, **(env or {})))

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as f:
            return f.read()

    def find(self, pattern, seconds=30):
        def look():
            m = re.search(pattern, self.log())
            if m:
                return m
            if self.proc.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.proc.returncode}:\n{self.log()[-3000:]}")
            return None

        return wait_until(f"{pattern!r} in the log of {self.name}", look, seconds)

    def stop(self, signum=signal.SIGTERM, seconds=20):
        if self.proc.poll() is None:
            self.proc.send_signal(signum)
            try:
                self.proc.wait(seconds * SLOW)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                self.proc.wait()
                raise AssertionError(f"{self.name} did not stop on signal {signum}:\n{self.log()[-3000:]}") from None
        self.log_file.close()
        if self.proc.returncode == -signal.SIGTERM and not re.search(r" (node|router) ready$", self.log(), re.M):
            return 0  # it was still starting: then the signal ends it as it ends any process
        return self.proc.returncode

    def kill(self):
        self.proc.kill()
        self.proc.wait()


class Cluster:
    """A router, P prefill and D decode nodes. Options: lists of arguments for each role."""

    def __init__(self, model, prefill=1, decode=1, node=(), prefill_opts=(), decode_opts=(), router_opts=(),
                 kv_bytes="64MiB", threads=1, key=None, wait=True):
        self.dir = tempfile.mkdtemp(prefix="baton-test-")
        self.model = model
        self.bin = BIN
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        # Prefix caches are on, where a test does not say otherwise: no answer may show them.
        self.node_opts = ["--kv-bytes", kv_bytes, "--threads", str(threads), *node]
        self.prefill_opts = list(prefill_opts)
        self.decode_opts = list(decode_opts)
        self.router_opts = list(router_opts)
        self.nodes = {}
        try:
            self.start_router()
            for i in range(prefill):
                self.start_node("prefill", i)
            for i in range(decode):
                self.start_node("decode", i)
            if wait:
                self.wait_ready()
        except BaseException:
            self.close(check=False)
            raise

    def start_router(self, listen="127.0.0.1:0", sessions="127.0.0.1:0"):
        self.router = Daemon("router", [os.path.join(self.bin, "baton-router"), "--listen", listen, "--sessions",
                                        sessions, "--model", self.model, *self.router_opts], self.dir)
        self.address = self.router.find(r"listening on https?://(\S+)").group(1)
        self.sessions = self.router.find(r"sessions on (\S+)").group(1)
        self.url = f"http://{self.address}"

    def start_node(self, role, i, extra=(), env=None):
        name = f"{role}-{i}"
        program = "baton-decoded" if role == "decode" else "baton-prefilld"
        opts = {"prefill": self.prefill_opts, "decode": self.decode_opts, "both": ["--role", "both"]}[role]
        self.nodes[name] = Daemon(name, [os.path.join(self.bin, program), "--router", self.sessions, "--model",
                                         self.model, "--name", name, *self.node_opts, *opts, *extra], self.dir, env)
        return self.nodes[name]

    def wait_ready(self, seconds=30):
        want = sum(1 for d in self.nodes.values() if d.proc.poll() is None)

        def ready():
            for d in [self.router, *self.nodes.values()]:
                if d.proc.poll() is not None:
                    raise AssertionError(f"{d.name} ended with {d.proc.returncode}:\n{d.log()[-3000:]}")
            try:
                nodes = self.cluster()["nodes"]
            except (urllib.error.URLError, OSError):
                return False
            if sum(n["state"] == "ready" for n in nodes) < want:
                return False
            links = sum(len(n.get("transports") or []) for n in nodes if n["role"] != "decode")
            decode = sum(n["role"] != "prefill" for n in nodes)
            return links >= sum(decode - (n["role"] == "both") for n in nodes if n["role"] != "decode")

        wait_until("every node to be ready and every pair to be connected", ready, seconds)

    # ---- talking to it ----

    def http(self, path, body=None, headers=None, timeout=60):
        """(status, headers, bytes)"""
        data = None if body is None else json.dumps(body).encode()
        req = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **self.headers, **(headers or {})})
        try:
            with urllib.request.urlopen(req, timeout=timeout * SLOW) as r:
                return r.status, dict(r.headers), r.read()
        except urllib.error.HTTPError as e:
            return e.code, dict(e.headers), e.read()

    def json(self, path, body=None, **kw):
        status, _, data = self.http(path, body, **kw)
        assert status == 200, f"{path}: {status} {data[:500]!r}"
        return json.loads(data)

    def complete(self, prompt, **params):
        return self.json("/v1/completions", {"prompt": prompt, **params})

    def cluster(self):
        return self.json("/v1/cluster")

    def metrics(self):
        _, _, data = self.http("/metrics")
        out = {}
        for line in data.decode().splitlines():
            if line and not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                out[key] = float(value)
        return out

    def metric_sum(self, name, **labels):
        total = 0.0
        for key, value in self.metrics().items():
            base, _, rest = key.partition("{")
            if base == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += value
        return total

    def pages(self, state):
        return int(self.metric_sum("baton_kv_pages", state=state))

    def busy(self):
        """What is still held, runs or waits: metrics that should be 0."""
        return {k: v for k, v in self.metrics().items() if v and (
            k.startswith("baton_kv_pages{") and re.search('state="(leased|quarantined)"', k)
            or k.split("{")[0] in ("baton_requests_running", "baton_requests_waiting", "baton_node_waiting", "baton_node_running"))}

    def last_expiry(self):
        """When a lease or a deadline ran out last, or somebody was lost, as the daemons' logs tell; 0: never."""
        times = [t for d in self.daemons() for t in re.findall(EXPIRY, d.log())]
        return max((datetime.datetime.fromisoformat(t + "+00:00").timestamp() for t in times), default=0)

    def wait_idle(self, seconds=10):
        """Every page free or cached, nothing running or waiting; load reports are at most 250 ms old. How long that took,
        from now or from the last lease's end while it waited, goes into QUIET."""
        start, since = time.time(), None

        def idle():
            nonlocal since
            if self.busy():
                since = None
            elif since is None:
                since = time.time()
            return since is not None and time.time() - since > 0.35

        wait_until("the pools to be free again", idle, seconds)
        expiry = self.last_expiry()
        expiry = expiry if start < expiry < since else start
        QUIET.append((os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0], since - expiry, expiry - start))

    # ---- ending ----

    def daemons(self):
        return [*self.nodes.values(), self.router]

    def check_logs(self, allow=()):
        """No daemon may have logged a warning or an error that the test does not expect."""
        for d in self.daemons():
            for line in d.log().splitlines():
                if re.search(r" (warn|error) |Sanitizer|runtime error", line) and not any(re.search(a, line) for a in allow):
                    raise AssertionError(f"{d.name} logged: {line}")

    def close(self, check=True):
        codes = {}
        try:
            for d in [*self.nodes.values(), getattr(self, "router", None)]:
                if d is not None:
                    alive = d.proc.poll() is None
                    code = d.stop()
                    if alive:
                        codes[d.name] = code
        finally:
            if os.environ.get("BATON_TEST_KEEP"):
                print(f"logs are in {self.dir}")
            else:
                shutil.rmtree(self.dir, ignore_errors=True)
        if check:
            assert all(c == 0 for c in codes.values()), f"exit codes: {codes}"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            for d in self.daemons():
                print(f"---- end of the log of {d.name} ----\n{d.log()[-2500:]}")
                d.kill()  # it may not be able to end in order; what the test saw is what matters
        self.close(check=kind is None)


def stream_sse(cluster, path, body, on_event=None, headers=None, timeout=120):
    """Posts a streaming request; the parsed events, [DONE] left out (it must be there)."""
    data = json.dumps({**body, "stream": True}).encode()
    req = urllib.request.Request(cluster.url + path, data, {"content-type": "application/json", **(headers or {})})
    events, done = [], False
    with urllib.request.urlopen(req, timeout=timeout * SLOW) as r:
        for line in r:
            line = line.rstrip(b"\n")
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
                if on_event:
                    on_event(events[-1])
    assert done, "the stream ended without [DONE]"
    return events


def parallel(jobs):
    """Runs callables at once; their results in order; the first exception is raised."""
    results = [None] * len(jobs)
    errors = []

    def run(i, job):
        try:
            results[i] = job()
        except BaseException as e:  # noqa: BLE001, raised below
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i, j)) for i, j in enumerate(jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


def tiny(name):
    """A committed model fixture."""
    path = os.path.join(GOLDEN, name)
    assert os.path.isdir(path), f"{path} is missing"
    return path


def shared_models():
    """Model folders beside the repository, where there are any: {name: path}."""
    folder = os.path.join(SHARED, "models")
    if not os.path.isdir(folder):
        return {}
    return {n: os.path.join(folder, n) for n in sorted(os.listdir(folder))
            if os.path.exists(os.path.join(folder, n, "config.json"))}


def longer(path, context, into):
    """A copy of a fixture whose context is longer: rotary positions have no limit of their own."""
    copy = os.path.join(into, os.path.basename(path))
    shutil.copytree(path, copy)
    config = os.path.join(copy, "config.json")
    with open(config, encoding="utf-8") as f:
        values = json.load(f)
    values["max_position_embeddings"] = context
    with open(config, "w", encoding="utf-8") as f:
        json.dump(values, f)
    return copy


def isas():
    """The instruction sets of this machine's CPU that the daemons know."""
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        flags = set(re.search(r"^flags\s*:(.*)$", f.read() + "\nflags :", re.M).group(1).split())
    return ["plain"] + ["avx2"] * ({"avx2", "fma"} <= flags) + ["avx512"] * ({"avx512f", "avx512bw", "avx512vl"} <= flags)


SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(fetch=False):
    """The model that `baton up` fetches, where it lies already; fetch: brought into build/cache as it would. Or None."""
    cache = os.path.join(ROOT, "build", "cache")
    user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for path in (os.environ.get("BATON_SMOLLM2_GGUF"), os.path.join(cache, SMOLLM2), os.path.join(user, "baton", SMOLLM2)):
        if path and os.path.exists(path):
            return path
    if not fetch:
        return None
    out = subprocess.run([sys.executable, os.path.join(ROOT, "cli", "fetch_model.py"), cache], stdout=subprocess.PIPE, text=True,
                         check=False)
    return out.stdout.strip() if out.returncode == 0 else None
