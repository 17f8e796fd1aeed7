"""What the fault suites share: requests with long answers, their undisturbed answers, and firing while they run."""

import contextlib
import signal
import threading
import urllib.request

from cluster import SLOW, Cluster, parallel, stream_sse, tiny, wait_until

IDS = [1, *range(40, 75)]
GREEDY = {"temperature": 0, "ignore_eos": True}
# A short lease lets a frozen node be noticed soon; kills are noticed at once.
LEASE = ["--lease", "1s"]
MODEL = tiny("tiny-long")  # long answers: whatever happens, happens in their middle


def body(i, max_tokens=2000, **params):
    return {"prompt": [1] + [30 + (i * 13 + j) % 250 for j in range(20 + 9 * i)], "max_tokens": max_tokens, "logprobs": 1,
            "temperature": 1, "seed": i, "ignore_eos": True, **params}


def stream(cluster, request, progress=None):
    """(text, log-probabilities, finish reason); progress: a list that grows with every event."""
    events = stream_sse(cluster, "/v1/completions", request, on_event=progress.append if progress is not None else None)
    text = "".join(e["choices"][0]["text"] for e in events)
    values = [v for e in events for v in e["choices"][0]["logprobs"]["token_logprobs"]]
    return text, values, events[-1]["choices"][0]["finish_reason"]


def stream_error(cluster, request, progress=None):
    """The message of the error that ends a stream."""
    events = progress if progress is not None else []
    try:
        stream_sse(cluster, "/v1/completions", request, on_event=events.append)
    except AssertionError:  # no [DONE]: a stream that ends so must not look complete
        assert "error" in events[-1], events[-1]
        return events[-1]["error"]["message"]
    raise AssertionError("it was answered")


@contextlib.contextmanager
def frozen(daemon):
    """SIGSTOP, and SIGCONT at the end."""
    daemon.proc.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if daemon.proc.poll() is None:
            daemon.proc.send_signal(signal.SIGCONT)


def node_metrics(daemon):
    """What a node started with --health says of itself."""
    url = daemon.find(r"health.*listening on (http://\S+)").group(1)
    with urllib.request.urlopen(url + "/metrics", timeout=60 * SLOW) as r:
        lines = r.read().decode().splitlines()
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))}


def undisturbed_answers(n=8):
    """Of body(0) to body(n - 1), from a cluster of its own."""
    with Cluster(MODEL) as c:
        return [stream(c, body(i)) for i in range(n)]


def under_fire(cluster, undisturbed, fire, after_events=2):
    """Eight streams at once; when all have begun, fire(); every answer must be the undisturbed one."""
    progress = [[] for _ in undisturbed]
    errors = []
    unfinished = []

    def shoot():
        try:
            wait_until("the streams to begin", lambda: all(len(p) >= after_events for p in progress), 60)
            unfinished.append(sum(p[-1]["choices"][0]["finish_reason"] is None for p in progress))
            fire()
        except BaseException as e:  # noqa: BLE001, raised below
            errors.append(e)

    shooter = threading.Thread(target=shoot)
    shooter.start()
    got = parallel([lambda i=i: stream(cluster, body(i), progress[i]) for i in range(len(undisturbed))])
    shooter.join()
    if errors:
        raise errors[0]
    for i, (g, w) in enumerate(zip(got, undisturbed)):
        assert g == w, f"stream {i} changed"
    assert unfinished[0] > 1, "it happened too late"
    cluster.wait_idle(20)


class Background:
    """A call in a thread of its own; result() raises what it raised."""

    def __init__(self, call):
        self.value = self.error = None

        def run():
            try:
                self.value = call()
            except BaseException as e:  # noqa: BLE001, raised by result()
                self.error = e

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def result(self, seconds=120):
        self.thread.join(seconds * SLOW)
        assert not self.thread.is_alive(), "the client hangs"
        if self.error is not None:
            raise self.error
        return self.value


class TwoRouters(Cluster):
    """Every node serves two routers: this cluster's own and that of self.other, which is a cluster without nodes."""

    def start_router(self, listen="127.0.0.1:0", sessions="127.0.0.1:0"):
        super().start_router(listen, sessions)
        self.own_sessions = self.sessions
        if not hasattr(self, "other"):
            self.other = Cluster(self.model, prefill=0, decode=0, wait=False, router_opts=self.router_opts)
        self.sessions = f"{self.own_sessions},{self.other.sessions}"

    def wait_ready(self, seconds=30):
        super().wait_ready(seconds)
        self.other.nodes = self.nodes
        try:
            self.other.wait_ready(seconds)
        finally:
            self.other.nodes = {}

    def daemons(self):
        return [*super().daemons(), self.other.router]

    def close(self, check=True):
        try:
            super().close(check)
        finally:
            self.other.close(check)
