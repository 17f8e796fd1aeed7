"""Who computes a prompt: decode nodes that do it themselves. Answers stay what they were, and it is seen."""

import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request

import pytest

from cluster import BIN, SLOW, Cluster, Daemon, longer, parallel, stream_sse, tiny, wait_until

MODEL = tiny("tiny-long")


def body(i, n_prompt, max_tokens=60, **params):
    return {"prompt": [1] + [30 + (i * 13 + j) % 250 for j in range(n_prompt - 1)], "max_tokens": max_tokens, "logprobs": 1,
            "temperature": 1, "seed": i, "ignore_eos": True, **params}


LENGTHS = [1, 5, 16, 17, 33, 48, 49, 120]


def answer(cluster, request):
    a = cluster.json("/v1/completions", request)
    return a["choices"][0]["text"], a["choices"][0]["logprobs"], a["choices"][0]["finish_reason"]


@pytest.fixture(scope="module")
def undisturbed():
    with Cluster(MODEL) as c:
        return [answer(c, body(i, n)) for i, n in enumerate(LENGTHS)]


def ask_all(cluster):
    return parallel([lambda i=i, n=n: answer(cluster, body(i, n)) for i, n in enumerate(LENGTHS)])


# ---- local prefill ----

def test_short_prompts_go_to_the_decode_node(undisturbed, tmp_path):
    log = os.path.join(tmp_path, "requests.jsonl")
    health = ["--health", "127.0.0.1:0"]
    with Cluster(MODEL, node=["--prefix-cache", "off"], decode_opts=health,
                 router_opts=["--local-prefill", "48", "--request-log", log]) as c:
        assert ask_all(c) == undisturbed
        c.wait_idle()
        local = sum(n <= 48 for n in LENGTHS)
        assert c.metric_sum("baton_local_prefill_total") == local
        assert c.metric_sum("baton_kv_transferred_tokens_total") == sum(n for n in LENGTHS if n > 48)
        a = c.complete(body(9, 7)["prompt"], max_tokens=3, timings=True)
        assert a["usage"]["transferred_tokens"] == 0 and a["timings"]["local_prefills"] == 1
        assert a["timings"]["prefill_tokens"] == 7
        _, headers, _ = c.http("/v1/completions", body(9, 7))
        assert headers["x-baton-prefill"] == headers["x-baton-decode"] == "decode-0"
        b = c.complete(body(9, 70)["prompt"], max_tokens=3, timings=True)
        assert b["usage"]["transferred_tokens"] == 70 and b["timings"]["local_prefills"] == 0
        lines = wait_until("the request log", lambda: (lines := open(log, encoding="utf-8").read().splitlines()) and
                           len(lines) == len(LENGTHS) + 3 and lines)
        for line in map(json.loads, lines):
            (s,) = line["sequences"]
            assert s["local"] == (line["prompt_tokens"] <= 48) == s["attempts"][0]["local"]
            assert s["prefill"] == ("decode-0" if s["local"] else "prefill-0")
        assert c.cluster()["local_prefill"] == "48"
        wait_until("the node's count", lambda: [n["local_prefills_total"] for n in c.cluster()["nodes"] if n["role"] == "decode"] == [local + 2])
        c.check_logs()


def test_decode_nodes_alone(undisturbed):
    with Cluster(MODEL, prefill=0, decode=2, router_opts=["--local-prefill", "always"]) as c:
        assert ask_all(c) == undisturbed
        assert c.http("/health")[0] == 200
        one = c.json("/v1/completions", body(0, 1, max_tokens=1))
        assert one["usage"]["completion_tokens"] == 1
        echo = c.json("/v1/completions", {**body(3, 17, max_tokens=2), "echo": True})
        assert echo["usage"]["prompt_tokens"] == 17
        c.wait_idle()
        assert c.metric_sum("baton_kv_transferred_tokens_total") == 0
        c.check_logs()


def test_echo_is_the_same():
    request = {**body(5, 90, max_tokens=4), "echo": True}
    with Cluster(MODEL) as c:
        want = answer(c, request)
    with Cluster(MODEL, router_opts=["--local-prefill", "always"]) as c:
        assert answer(c, request) == want


def test_without_a_prefill_node_it_is_refused():
    """No fallback: what was to be computed by prefill nodes is not computed elsewhere without a word."""
    with Cluster(MODEL, prefill=0, decode=1, router_opts=["--no-node-grace", "100ms"], wait=False) as c:
        wait_until("the node", lambda: c.cluster()["nodes"])
        status, _, data = c.http("/v1/completions", body(0, 3))
        assert status == 503 and b"no prefill node is connected" in data


def test_auto(undisturbed):
    with Cluster(MODEL, router_opts=["--local-prefill", "auto"]) as c:
        for _ in range(3):
            assert ask_all(c) == undisturbed
        c.wait_idle()
        c.check_logs()


@pytest.mark.parametrize("value", ["sometimes", "-1", "1e3", "99999999999", ""])
def test_bad_value(value):
    with pytest.raises(AssertionError, match="ended with 2(.|\n)*--local-prefill"):
        Cluster(MODEL, prefill=0, decode=0, router_opts=["--local-prefill=" + value])


def test_cancelled_while_a_decode_node_computes(tmp_path):
    """A long prompt there, chunk by chunk beside a running answer; its client leaves; nothing of it stays."""
    model = longer(MODEL, 32768, str(tmp_path))
    with Cluster(model, prefill=0, decode=1, kv_bytes="256MiB", node=["--chunk-tokens", "16", "--prefix-cache", "off"],
                 router_opts=["--local-prefill", "always"]) as c:
        want = answer(c, body(1, 20, max_tokens=300))
        events = []
        got = []
        t = threading.Thread(target=lambda: got.extend(stream_sse(c, "/v1/completions", body(1, 20, max_tokens=300), on_event=events.append)))
        t.start()
        wait_until("the answer to begin", lambda: len(events) > 2)
        for i in range(3):
            try:
                c.http("/v1/completions", body(50 + i, 20000, max_tokens=4), timeout=0.3)
            except TimeoutError:
                pass  # a client that waits no longer, unless the machine is very quick
        t.join()
        assert "".join(e["choices"][0]["text"] for e in got) == want[0]
        c.wait_idle()
        assert answer(c, body(1, 20, max_tokens=300)) == want


# ---- drain ----

def baton(cluster, *args, ok=True, env=None):
    """Runs `baton ARGS` against the cluster; its output, errors included."""
    out = subprocess.run([os.path.join(BIN, "baton"), args[0], "--server", cluster.address, *args[1:]], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, timeout=120 * SLOW, env={**os.environ, **(env or {})}, check=False)
    assert (out.returncode == 0) == ok, f"baton {' '.join(args)}: exit {out.returncode}\n{out.stdout}"
    return out.stdout


class Steady:
    """Answers asked for all the time, several at once; each must be the undisturbed one."""

    def __init__(self, cluster, want, clients=4):
        self.errors, self.count, self.stop = [], 0, threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(cluster, want, k)) for k in range(clients)]

    def run(self, cluster, want, k):
        i = k
        try:
            while not self.stop.is_set():
                i = (i + 3) % len(LENGTHS)
                got = answer(cluster, body(i, LENGTHS[i]))
                assert got == want[i], f"the answer to a prompt of {LENGTHS[i]} tokens changed"
                self.count += 1
        except BaseException as e:  # noqa: BLE001, raised in __exit__
            self.errors.append(e)

    def more(self, n=8):
        """Waits until n more answers have come."""
        want = self.count + n
        wait_until("more answers", lambda: self.count >= want or self.errors, 60)

    def __enter__(self):
        for t in self.threads:
            t.start()
        self.more()
        return self

    def __exit__(self, kind, *_):
        self.stop.set()
        for t in self.threads:
            t.join()
        if kind is None and self.errors:
            raise self.errors[0]


@pytest.mark.parametrize("timeout", ["30s", "0"])
def test_drain_loses_nothing(undisturbed, timeout):
    """One node after the other, under load; with no time at all, what runs there moves."""
    with Cluster(MODEL, prefill=2, decode=2, node=["--drain-timeout", timeout]) as c:
        with Steady(c, undisturbed) as load:
            for name in ("decode-0", "prefill-1"):
                out = baton(c, "drain", name)
                assert f"{name} has ended" in out
                assert c.nodes[name].proc.wait(20 * SLOW) == 0
                load.more()
            assert {n["name"] for n in c.cluster()["nodes"]} == {"decode-1", "prefill-0"}
        c.wait_idle()


def test_drain_refuses(undisturbed):
    with Cluster(MODEL) as c:
        assert "the last decode node" in baton(c, "drain", "decode-0", ok=False)
        assert "connected: " in baton(c, "drain", "nobody", ok=False)
        assert "one NODE is needed" in baton(c, "drain", ok=False)
        assert answer(c, body(3, LENGTHS[3])) == undisturbed[3]
        assert "has ended" in baton(c, "drain", "decode-0", "--force")
        assert c.nodes["decode-0"].proc.wait(20 * SLOW) == 0
        assert c.http("/health")[0] == 503


def test_drain_is_seen_and_bounded(tmp_path):
    """A long answer holds the node: health says so first, status shows it, the waiting is bounded and the node goes on."""
    health = ["--health", "127.0.0.1:0"]
    with Cluster(longer(MODEL, 32768, str(tmp_path)), decode=2, decode_opts=[*health, "--drain-timeout", "60s"], kv_bytes="256MiB") as c:
        events, done = [], []
        request = body(1, 20, max_tokens=6000)
        t = threading.Thread(target=lambda: done.append(stream_sse(c, "/v1/completions", request, on_event=events.append)))
        t.start()
        wait_until("the answer to begin", lambda: len(events) > 2)
        busy = wait_until("the node that runs it", lambda: [n["name"] for n in c.cluster()["nodes"] if n["role"] == "decode" and n["running"]])[0]
        out = baton(c, "drain", busy, "--timeout", "300ms", ok=False)
        assert "1 running" in out and "it goes on" in out
        assert [n["state"] for n in c.cluster()["nodes"] if n["name"] == busy] == ["draining"]
        assert "draining" in baton(c, "status")
        url = c.nodes[busy].find(r"listening on (http://\S+)").group(1)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(url + "/ready", timeout=10)
        assert "drains already" in baton(c, "drain", busy, ok=False)
        t.join()
        assert done[0][-1]["choices"][0]["finish_reason"] == "length"
        assert c.nodes[busy].proc.wait(20 * SLOW) == 0


def key_file(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    return os.fspath(path)


def names(cluster):
    return {n["name"] for n in cluster.cluster()["nodes"]}


def test_administration_without_admin_keys(tmp_path):
    """It is for programs on the router's machine, as this one; the API key is for seeing how it goes on."""
    keys = key_file(tmp_path / "keys", "sesame\n")
    with Cluster(MODEL, decode=3, router_opts=["--api-key-file", keys], key="sesame") as c:
        assert "API key" in baton(c, "drain", "decode-0", ok=False)
        assert names(c) == {"prefill-0", "decode-0", "decode-1", "decode-2"}, "it failed before it had told the node"
        assert "has ended" in baton(c, "drain", "decode-0", env={"BATON_API_KEY": "sesame"})
        baton(c, "drain", "decode-1", "--no-wait")
        wait_until("it to be gone", lambda: names(c) == {"prefill-0", "decode-2"})


def test_administration_asks_for_an_admin_key(tmp_path):
    """Also on the router's machine. API keys do not administer, and admin keys are no clients."""
    opts = ["--api-key-file", key_file(tmp_path / "keys", "sesame\n"), "--admin-key-file", key_file(tmp_path / "admin", "# ops\nroot carol\n")]
    with Cluster(MODEL, prefill=2, decode=2, router_opts=opts, key="sesame") as c:
        before = names(c)
        for args, env in [((), {}), (("--api-key", "sesame"), {}), (("--admin-key", "rot"), {}), ((), {"BATON_ADMIN_KEY": "sesame"}),
                          (("--no-wait",), {"BATON_API_KEY": "sesame"})]:
            for command in (("drain", "decode-0"), ("role", "decode-0", "both")):
                out = baton(c, *command, *args, ok=False, env=env)
                assert "key" in out and ("--admin-key" in out or "API key" in out), out
        assert "an API key does not administer" in baton(c, "drain", "decode-0", "--api-key", "sesame", ok=False)
        assert names(c) == before and {n["state"] for n in c.cluster()["nodes"]} == {"ready"}
        assert "has ended" in baton(c, "drain", "decode-0", "--admin-key", "root")
        assert "serves as both" in baton(c, "role", "prefill-1", "both", env={"BATON_ADMIN_KEY": "root"})
        assert "has ended" in baton(c, "drain", "prefill-1", "--admin-key", "root", "--api-key", "sesame")
        assert "decode-1" in baton(c, "status", "--api-key", "root")
        status, _, text = c.http("/v1/completions", {"prompt": [1, 40]}, headers={"authorization": "Bearer root"})
        assert status == 401 and b"API key" in text
        for d in c.daemons():
            assert "root" not in d.log() and "sesame" not in d.log()


def test_a_key_for_both(tmp_path):
    opts = ["--api-key-file", key_file(tmp_path / "keys", "a\nsame alice\n"), "--admin-key-file", key_file(tmp_path / "admin", "same root\n")]
    out = subprocess.run([os.path.join(BIN, "baton-router"), "--model", MODEL, "--listen", "127.0.0.1:0", "--sessions", "127.0.0.1:0", *opts],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60 * SLOW, check=False)
    assert out.returncode == 2 and '"root"' in out.stdout and '"alice"' in out.stdout and "same" not in out.stdout.split("--admin-key-file")[1]


# ---- role both ----

def start_both(n, prefill=0, decode=0, **kw):
    c = Cluster(MODEL, prefill=prefill, decode=decode, wait=False, **kw)
    try:
        for i in range(n):
            c.start_node("both", i)
        c.wait_ready()
    except BaseException:
        c.close(check=False)
        raise
    return c


def attempts(cluster, kv):
    return cluster.metric_sum("baton_attempts_total", kv=kv)


def test_one_node_is_a_cluster(undisturbed):
    """Prompt and answer on one node: nothing travels, and it is counted as local."""
    with start_both(1, node=["--health", "127.0.0.1:0"]) as c:
        assert c.http("/health")[0] == 200
        assert ask_all(c) == undisturbed
        one = c.json("/v1/completions", body(2, 20, max_tokens=1, timings=True))
        assert one["timings"]["local_prefills"] == 0  # one token: the prefill leg alone
        two = c.json("/v1/completions", body(2, 20, max_tokens=2, timings=True))
        assert two["timings"]["local_prefills"] == 1 and two["usage"]["transferred_tokens"] == 0
        c.wait_idle()
        assert attempts(c, "local") == len(LENGTHS) + 1 and attempts(c, "none") == 1 and attempts(c, "transfer") == 0
        (n,) = c.cluster()["nodes"]
        assert n["role"] == "both" and n["state"] == "ready"
        assert c.metric_sum("baton_session_up", role="both") == 1
        assert "both" in baton(c, "status")
        url = c.nodes["both-0"].find(r"health listening on (http://\S+)").group(1)
        text = urllib.request.urlopen(url + "/metrics", timeout=10).read().decode()
        heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
        assert len(heads) == len(set(heads)), "a family is told twice"
        for leg in ("prefill", "decode"):
            assert f'baton_attempts_failed_total{{leg="{leg}"}} 0' in text
            assert f"baton_{leg}_step_seconds_count" in text
        c.check_logs()


def test_both_serves_as_either(undisturbed):
    """Beside a prefill and a decode node: each can be paired with it. A node that dies takes nothing with it."""
    with start_both(1, prefill=1) as c:
        assert ask_all(c) == undisturbed
        got = parallel([lambda i=i: answer(c, body(i % len(LENGTHS), LENGTHS[i % len(LENGTHS)])) for i in range(40)])
        assert got == (undisturbed * 5)
        c.wait_idle()
        assert attempts(c, "transfer") > 0, "never paired with the prefill node"
    with start_both(1, decode=1) as c:
        got = parallel([lambda i=i: answer(c, body(i % len(LENGTHS), LENGTHS[i % len(LENGTHS)])) for i in range(40)])
        assert got == (undisturbed * 5)
        c.wait_idle()
        assert attempts(c, "transfer") > 0, "never paired with the decode node"


def test_pages_between_nodes_that_do_both(undisturbed):
    """Two of them, each busy: prompts of one go to the other as well, both ways, each way over its own connection."""
    with start_both(2) as c:
        with Steady(c, undisturbed, clients=12) as load:
            load.more(60)
        c.wait_idle()
        assert attempts(c, "local") > 0
        for n in c.cluster()["nodes"]:
            assert n["transports"], f"{n['name']} has no connection"
        c.check_logs()


def test_kill_of_a_node_that_does_both(undisturbed):
    with start_both(2, node=["--lease", "1s"]) as c:
        with Steady(c, undisturbed) as load:
            c.nodes["both-0"].kill()
            load.more()
            c.start_node("both", 0)
            c.wait_ready()
            load.more()
            assert baton(c, "drain", "both-1")
            load.more()
        c.wait_idle(20)


def test_drain_of_the_last_one_is_refused():
    with start_both(1, decode=1) as c:
        assert "the last prefill node" in baton(c, "drain", "both-0", ok=False)
        assert "has ended" in baton(c, "drain", "decode-0")
        assert "the last prefill node" in baton(c, "drain", "both-0", ok=False)


@pytest.mark.parametrize("args,role", [(["--decode", "0", "--role", "both"], "both"),
                                       (["--prefill", "0", "--decode", "2", "--local-prefill", "always"], "decode")])
def test_up_with_one_kind_of_node(undisturbed, tmp_path, args, role):
    up = Daemon("up", [os.path.join(BIN, "baton"), "up", "--model", MODEL, "--listen", "127.0.0.1:0", "--threads", "1", "--kv-bytes",
                       "64MiB", *args], str(tmp_path))
    try:
        address = up.find(r"ready\S* on http://(\S+:\d+)").group(1)
        req = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body(3, LENGTHS[3])).encode(),
                                     {"content-type": "application/json"})
        with urllib.request.urlopen(req, timeout=60 * SLOW) as r:
            choice = json.loads(r.read())["choices"][0]
        assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == undisturbed[3]
        with urllib.request.urlopen(f"http://{address}/v1/cluster", timeout=60) as r:
            assert {n["role"] for n in json.loads(r.read())["nodes"]} == {role}
    finally:
        code = up.stop(signal.SIGINT, 60)
    assert code == 0


@pytest.mark.parametrize("args,error", [(["--prefill", "0"], "--role both"), (["--decode", "0"], "--role both"),
                                        (["--prefill", "0", "--decode", "0", "--role", "both"], "no node")])
def test_up_refuses_what_serves_nobody(args, error):
    out = subprocess.run([os.path.join(BIN, "baton"), "up", "--model", MODEL, "--listen", "127.0.0.1:0", *args], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    assert out.returncode == 2 and error in out.stdout


# ---- baton role ----

def roles(cluster):
    return {n["name"]: n["role"] for n in cluster.cluster()["nodes"]}


@pytest.mark.parametrize("timeout", ["30s", "0"])
def test_roles_change_under_load(undisturbed, timeout):
    """Every node becomes everything, while answers are asked for all the time; nothing is lost, nothing restarts. With no time to
    drain, what runs in a leg that goes moves."""
    with Cluster(MODEL, prefill=2, decode=2, node=["--drain-timeout", timeout]) as c:
        pids = {name: d.proc.pid for name, d in c.nodes.items()}
        with Steady(c, undisturbed) as load:
            for name, role in [("decode-0", "both"), ("prefill-0", "decode"), ("decode-0", "prefill"), ("prefill-1", "both"),
                               ("decode-1", "prefill"), ("prefill-1", "decode"), ("prefill-0", "prefill"), ("decode-0", "decode")]:
                assert f"{name} serves as {role}" in baton(c, "role", name, role)
                assert roles(c)[name] == role
                load.more()
        c.wait_idle()
        assert {name: d.proc.pid for name, d in c.nodes.items() if d.proc.poll() is None} == pids
        assert ask_all(c) == undisturbed
        total = {n["name"]: sum(n["pages"].values()) for n in c.cluster()["nodes"]}
        assert len(set(total.values())) == 1  # the pools are what they were


def test_a_swap_of_all_roles(undisturbed):
    """What decoded computes now, and the other way round: pages travel between them in the new direction."""
    with Cluster(MODEL, node=["--prefix-cache", "off"]) as c:
        assert answer(c, body(7, 120)) == undisturbed[7]
        assert "the last prefill node" in baton(c, "role", "prefill-0", "decode", ok=False)
        baton(c, "role", "prefill-0", "both")
        baton(c, "role", "decode-0", "prefill")
        baton(c, "role", "prefill-0", "decode")
        assert roles(c) == {"prefill-0": "decode", "decode-0": "prefill"}
        before = c.metric_sum("baton_kv_transferred_tokens_total", node="prefill-0")
        assert answer(c, body(7, 120)) == undisturbed[7]
        c.wait_idle()
        assert c.metric_sum("baton_kv_transferred_tokens_total", node="prefill-0") == before + 120
        c.check_logs()


def test_role_refuses(undisturbed):
    with Cluster(MODEL, decode=2) as c:
        assert "the last prefill node" in baton(c, "role", "prefill-0", "decode", ok=False)
        assert "decode already" in baton(c, "role", "decode-0", "decode", ok=False)
        assert "connected: " in baton(c, "role", "nobody", "both", ok=False)
        assert "prefill, decode or both" in baton(c, "role", "decode-0", "writer", ok=False)
        assert "a NODE and its new role" in baton(c, "role", "decode-0", ok=False)
        assert roles(c) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
        assert ask_all(c) == undisturbed
        baton(c, "role", "prefill-0", "decode", "--force")
        assert c.http("/health")[0] == 503
        baton(c, "role", "prefill-0", "prefill")
        assert ask_all(c) == undisturbed


def test_a_role_that_goes_is_seen_and_bounded(tmp_path):
    """A long answer keeps the decode leg there; the node serves as something else meanwhile, and status says so."""
    with Cluster(longer(MODEL, 32768, str(tmp_path)), decode=2, node=["--drain-timeout", "60s"], kv_bytes="256MiB") as c:
        events, done = [], []
        t = threading.Thread(target=lambda: done.append(stream_sse(c, "/v1/completions", body(1, 20, max_tokens=6000), on_event=events.append)))
        t.start()
        wait_until("the answer to begin", lambda: len(events) > 2)
        busy = wait_until("the node that runs it", lambda: [n["name"] for n in c.cluster()["nodes"] if n["role"] == "decode" and n["running"]])[0]
        out = baton(c, "role", busy, "prefill", "--timeout", "300ms", ok=False)
        assert "1 running" in out and "it goes on" in out
        (n,) = [n for n in c.cluster()["nodes"] if n["name"] == busy]
        assert n["role"] == "prefill" and n["state"].startswith("changing: what it has as decode node")
        assert "changing" in baton(c, "status")
        t.join()
        assert done[0][-1]["choices"][0]["finish_reason"] == "length"
        wait_until("the leg to be gone", lambda: all(n["state"] == "ready" for n in c.cluster()["nodes"]))
        assert c.metric_sum("baton_requests_migrated_total") == 0
        baton(c, "role", busy, "both")
        assert answer(c, body(2, 10))[2] == "length"


def test_roles_after_a_routers_restart(undisturbed):
    """A router that comes back hears the roles of now, not those of the start."""
    with Cluster(MODEL, decode=2) as c:
        baton(c, "role", "decode-1", "both")
        listen, sessions = c.address, c.sessions
        c.router.kill()
        c.start_router(listen, sessions)
        c.wait_ready()
        assert roles(c)["decode-1"] == "both"
        assert ask_all(c) == undisturbed
