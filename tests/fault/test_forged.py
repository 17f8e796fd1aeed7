"""Forged, unknown, reused and mismatched: daemons and routers that lie are refused and counted, and nobody else notices.

What is forged between prefill and decode nodes is tested where the real wire code and cores run without a network:
tests/unit/transfer (pages, generations, ranges) and tests/unit/decoded (tickets, grants, hand-offs).
"""

import base64
import json
import os
import re

import grpc
import pytest

from cluster import Cluster, parallel, wait_until
from fire import MODEL, body, node_metrics, stream, undisturbed_answers
from rogue import RogueDaemon, RogueRouter, pb

PATIENT = ["--lease", "120s"]
TICKET = b"forged ticket..."
UNKNOWN = b"an unknown one.."


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_answers()


@pytest.fixture(scope="module")
def known():
    """A cluster, and the hellos of its nodes as a router hears them."""
    with RogueRouter() as r:
        with Cluster(MODEL) as c:
            wanted = c.sessions
            c.sessions = f"{c.sessions},{r.address}"
            c.start_node("prefill", 1)
            c.start_node("decode", 1)
            hellos = {name.split("-")[0]: r.session(name).hello for name in ("prefill-1", "decode-1")}
            for name in ("prefill-1", "decode-1"):
                c.nodes.pop(name).stop()
            c.sessions = wanted
            yield c, hellos


def like(hello, **change):
    out = pb.Hello()
    out.CopyFrom(hello)
    out.instance = int.from_bytes(os.urandom(8), "little") | 1
    out.name = "rogue"
    for k, v in change.items():
        setattr(out, k, v)
    return out


def state(c, name="rogue"):
    return next((n["state"] for n in c.cluster()["nodes"] if n["name"] == name), None)


BAD_HELLOS = {
    "role": {"role": "both sides"},
    "instance": {"instance": 0},
    "version_min": {"version_min": 9, "version_max": 3},
    "name": {"name": "a\x07b"},
    "kv_layout": {"kv_layout": "a\nb"},
    "gate_token": {"gate_token": b"short"},
}


@pytest.mark.parametrize("field", BAD_HELLOS)
def test_bad_hello(known, undisturbed, field):
    c, hellos = known
    with RogueDaemon(c.sessions) as d:
        d.send(hello=like(hellos["decode"], **BAD_HELLOS[field]))
        code, text = d.wait_end()
        assert code == grpc.StatusCode.INVALID_ARGUMENT and field in text, (code, text)
    assert stream(c, body(0)) == undisturbed[0]


def test_hello_comes_first_and_once(known, undisturbed):
    c, hellos = known
    with RogueDaemon(c.sessions) as d:
        d.send(load=pb.Load())
        assert "hello" in d.wait_end()[1]
    with RogueDaemon(c.sessions) as d:
        d.send(hello=like(hellos["decode"], transfer_address="127.0.0.1:9"))
        d.wait_for("welcome")
        d.send(hello=like(hellos["decode"]))
        assert "hello" in d.wait_end()[1]
    with RogueDaemon(c.sessions) as d:
        d.send(b"\xff\xfe not protobuf")
        code, text = d.wait_end()
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "bytes" in text
    assert stream(c, body(0)) == undisturbed[0]


def test_bad_messages_do_not_fill_the_log(undisturbed):
    """Whoever dials and lies again and again is refused each time, and told of once."""
    with Cluster(MODEL) as c:
        for _ in range(50):
            with RogueDaemon(c.sessions) as d:
                d.send(b"\xff\xfe not protobuf")
                assert d.wait_end()[0] == grpc.StatusCode.INVALID_ARGUMENT
        assert 1 <= c.router.log().count("sent a bad message") <= 2  # one a minute
        assert stream(c, body(0)) == undisturbed[0]


def test_no_version_in_common(known):
    c, hellos = known
    with RogueDaemon(c.sessions) as d:
        d.send(hello=like(hellos["decode"], version_min=700, version_max=701))
        welcome = d.wait_for("welcome")[0]
        assert welcome.version == 0 and "700 to 701" in welcome.reason, welcome
        d.wait_end()
    assert "700 to 701" in c.router.log()


@pytest.mark.parametrize("what,value", [("fingerprint", 12345), ("numerics", "cuda-other"), ("kv_layout", "page_tokens=3 dtype=f8")])
def test_mismatch_is_never_paired(known, undisturbed, what, value):
    c, hellos = known
    for role in ("prefill", "decode"):
        with RogueDaemon(c.sessions) as d:
            d.send(hello=like(hellos[role], **{what: value}))
            d.wait_for("welcome")
            told = wait_until("the mismatch to be told", lambda: "mismatch" in (state(c) or "") and state(c))
            assert (f"{value:x}" if isinstance(value, int) else value) in told, told
            assert parallel([lambda i=i: stream(c, body(i)) for i in range(8)]) == undisturbed
            assert not d.of_kind("submit")


def test_a_decode_node_that_cannot_be_reached(known, undisturbed):
    """It says what a real one says, but nobody answers at its address: the prefill node finds out, the pair is avoided."""
    c, hellos = known
    with RogueDaemon(c.sessions) as d:
        d.send(hello=like(hellos["decode"], transfer_address="127.0.0.1:9"))
        d.wait_for("welcome")
        assert parallel([lambda i=i: stream(c, body(i)) for i in range(8)]) == undisturbed
        c.router.find(r"prefill node prefill-0 cannot reach decode node rogue")
    c.wait_idle()


def output(ticket, index=0, tokens=(), **kw):
    return pb.Outputs(outputs=[pb.Output(ticket=ticket, index=index, tokens=[pb.SampledToken(token=t) for t in tokens], **kw)])


LIES = {
    "a token outside the vocabulary": lambda s: {"outputs": output(s.ticket, tokens=[99999])},
    "too many tokens": lambda s: {"outputs": output(s.ticket, tokens=[40] * 3000)},
    "a token far ahead": lambda s: {"outputs": output(s.ticket, index=500000, tokens=[40])},
    "a gap that stays": lambda s: {"outputs": output(s.ticket, index=7, tokens=[40] * 1000)},
    "an end without a token": lambda s: {"outputs": output(s.ticket, finish=1)},
    "no room": lambda s: {"attempt_end": pb.AttemptEnd(ticket=s.ticket, reason=1, text="not today")},
    "lost": lambda s: {"attempt_end": pb.AttemptEnd(ticket=s.ticket, reason=2, text="\x1b[31mnot text")},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_prefill_node_that_lies(known, undisturbed, lie):
    """It gets prompts like any other, and answers nonsense: those attempts fail, the answers come from elsewhere."""
    c, hellos = known
    lied = []
    with RogueDaemon(c.sessions) as d:
        d.send(hello=like(hellos["prefill"], name="rogue"))
        d.wait_for("peers")
        before = c.metric_sum("baton_requests_migrated_total")

        def lies():
            while d.ended is None and len(lied) < 1000:
                for s in d.of_kind("submit")[len(lied):]:
                    lied.append(s)
                    d.send(**LIES[lie](s))
                if stopped:
                    return
                wait_until("a submit", lambda: stopped or d.ended or len(d.of_kind("submit")) > len(lied), 120)

        stopped = []
        got = None

        def ask():
            nonlocal got
            try:
                got = parallel([lambda i=i: stream(c, body(i)) for i in range(8)])
            finally:
                stopped.append(True)

        parallel([lies, ask])
        assert got == undisturbed
        assert lied, "nothing was placed on the liar"
        if lie != "no room":
            assert c.metric_sum("baton_requests_migrated_total") > before
    c.wait_idle()


def test_tickets_that_nobody_gave(known, undisturbed):
    c, hellos = known
    with RogueDaemon(c.sessions) as d:
        d.send(hello=like(hellos["decode"], transfer_address="127.0.0.1:9"))
        d.wait_for("welcome")
        before = c.metric_sum("baton_session_stale_messages_total")
        for i in range(10):
            d.send(outputs=output(UNKNOWN, index=i, tokens=[40]))
            d.send(attempt_end=pb.AttemptEnd(ticket=UNKNOWN, reason=3, text="over"))
        wait_until("all to be counted", lambda: c.metric_sum("baton_session_stale_messages_total") == before + 20)
        assert 1 <= len(re.findall(r"a message for a ticket that is over or unknown", c.router.log())) <= 2  # one a minute
        d.send(outputs=output(b"short", tokens=[40]))
        code, text = d.wait_end()
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "ticket" in text
    assert stream(c, body(1)) == undisturbed[1]


def test_absurd_loads(known, undisturbed):
    """Numbers that no node has: placement survives them, and whoever says them is used or avoided like any other."""
    c, hellos = known
    top = 2**64 - 1
    with RogueDaemon(c.sessions) as d:
        d.send(hello=like(hellos["decode"], transfer_address="127.0.0.1:9", page_tokens=hellos["decode"].page_tokens))
        d.wait_for("welcome")
        for speed in (float("nan"), float("inf"), -1.0, 1e308):
            d.send(load=pb.Load(waiting=2**32 - 1, running=2**32 - 1, landing=2**32 - 1, waiting_tokens=top, pages_free=2**32 - 1,
                                pages_leased=2**32 - 1, pages_quarantined=2**32 - 1, transferred_bytes=top, prefill_tokens_per_s=speed,
                                decode_step_ms=speed))
        d.send(peer_state=pb.PeerState(instance=4711, reachable=False, text="who?"))
        assert parallel([lambda i=i: stream(c, body(i)) for i in range(8)]) == undisturbed
    with RogueDaemon(c.sessions) as d:
        d.send(hello=like(hellos["prefill"]))
        d.wait_for("welcome")
        for speed in (float("nan"), float("inf"), -1.0, 0.0):
            d.send(load=pb.Load(waiting=2**32 - 1, waiting_tokens=top, prefill_tokens_per_s=speed))
        assert parallel([lambda i=i: stream(c, body(i)) for i in range(8)]) == undisturbed
    c.wait_idle()


def test_someone_elses_instance(undisturbed):
    """Who claims the instance of a node takes its place for a moment: its answers go on elsewhere, and it comes back."""
    with RogueRouter() as r, Cluster(MODEL, prefill=1, decode=2) as c:
        wanted = c.sessions
        c.sessions = f"{c.sessions},{r.address}"
        c.start_node("prefill", 1)
        c.wait_ready()
        hello = r.session("prefill-1").hello
        c.sessions = wanted
        progress = []
        thief = []

        def steal():
            wait_until("an answer to begin", lambda: progress)
            with RogueDaemon(c.sessions) as d:
                d.send(hello=hello)
                d.wait_for("welcome")
                thief.append(d.wait_end())

        got = parallel([steal, *(lambda i=i: stream(c, body(i), progress) for i in range(8))])[1:]
        assert got == undisturbed
        assert "same instance" in thief[0][1], thief  # the real one dialled again
        c.wait_ready()
        c.wait_idle()


# ---- routers that lie ----

SAMPLING = {"temperature": 1, "top_p": 1, "repetition_penalty": 1, "max_tokens": 5, "ignore_eos": True}


def submit(ticket, tokens=(1, 40, 41, 42), sampling=None, **kw):
    return pb.Submit(ticket=ticket, request_id="rogue", tokens=list(tokens), n_prompt=kw.pop("n_prompt", len(tokens)),
                     sampling=pb.Sampling(**(sampling or SAMPLING)), **kw)


@pytest.fixture(scope="module")
def led():
    """(cluster, rogue router): the nodes serve both."""
    with RogueRouter() as r:
        c = Cluster(MODEL, prefill=0, decode=0, wait=False, node=["--health", "127.0.0.1:0"])
        with c:
            c.sessions = f"{c.sessions},{r.address}"
            c.start_node("prefill", 0)
            c.start_node("decode", 0)
            c.wait_ready()
            yield c, r


BAD_SUBMITS = {
    "ticket": submit(b"short"),
    "submit.tokens": submit(TICKET, tokens=(), n_prompt=1),
    "submit.n_prompt": submit(TICKET, n_prompt=9),
    "sampling.temperature": submit(TICKET, sampling={**SAMPLING, "temperature": float("nan")}),
    "sampling.max_tokens": submit(TICKET, sampling={**SAMPLING, "max_tokens": 0}),
    "sampling.bias": submit(TICKET, sampling={**SAMPLING, "bias_tokens": [1, 2], "bias_values": [1.0]}),
}


@pytest.mark.parametrize("field", BAD_SUBMITS)
def test_bad_submit(led, undisturbed, field):
    """The session it came over ends; the other router's goes on."""
    c, r = led
    for name in ("prefill-0", "decode-0"):
        r.session(name).send(submit=BAD_SUBMITS[field])
        r.next_session(name)
    assert "sent a bad message: session message: " in c.nodes[name].log()  # the first of a minute names its field
    assert stream(c, body(0)) == undisturbed[0]


CANNOT_RUN = {  # reason: refused for now, or for ever
    "vocabulary": (4, submit(b"t0".ljust(16), tokens=(1, 40, 70000), peer_instance=7)),
    "context": (4, submit(b"t1".ljust(16), tokens=[1] + [40] * 70000, peer_instance=7)),
}


@pytest.mark.parametrize("word", CANNOT_RUN)
def test_submits_that_cannot_run(led, undisturbed, word):
    c, r = led
    reason, m = CANNOT_RUN[word]
    p = r.session("prefill-0")
    p.send(submit=m)
    end = p.wait_end(m.ticket)
    assert end.reason == reason and word in end.text, end
    p.send(cancel=pb.Cancel(ticket=m.ticket))  # over
    p.send(cancel=pb.Cancel(ticket=UNKNOWN))
    assert stream(c, body(0)) == undisturbed[0]
    c.wait_idle()


def test_a_ticket_in_use(led):
    """Twice the same ticket: the second is refused, the first goes on; afterwards the number means nothing any more."""
    c, r = led
    p = r.session("prefill-0")
    long = [1] + [40 + i % 200 for i in range(9000)]
    p.send(submit=submit(TICKET, tokens=long))
    p.send(submit=submit(TICKET))
    assert "already in use" in p.wait_end(TICKET).text
    p.wait_output(TICKET)
    assert len(p.ends(TICKET)) == 1
    p.send(submit=submit(TICKET))
    p.wait_output(TICKET, 2)
    c.wait_idle()


def test_another_routers_ticket(led):
    """A ticket belongs to the router that gave it: others cannot cancel it."""
    c, r = led
    with RogueRouter() as r2:
        c.sessions = f"{r.address},{r2.address}"
        c.start_node("prefill", 5)
        mine, other = r.session("prefill-5"), r2.session("prefill-5")
        mine.send(submit=submit(TICKET, tokens=[1] + [40 + i % 200 for i in range(30000)]))
        wait_until("it to begin", lambda: node_metrics(c.nodes["prefill-5"])["baton_requests_running"] == 1)
        other.send(submit=submit(TICKET))
        assert "already in use" in other.wait_end(TICKET).text
        other.send(cancel=pb.Cancel(ticket=TICKET))
        assert mine.wait_output(TICKET)[0].tokens
        assert not mine.ends(TICKET)
        c.nodes.pop("prefill-5").stop()


def forms(secret):
    """How a secret may look in a text."""
    return (secret, secret.hex().encode(), secret[::-1].hex().encode(), base64.b64encode(secret))


def test_the_gate_token_is_told_to_nobody(led):
    """Each node has its own, new at each start; no status, metric or log shows one."""
    c, r = led
    tokens = {name: r.session(name).hello.gate_token for name in ("prefill-0", "decode-0")}
    assert all(len(t) == 16 and t != bytes(16) for t in tokens.values()) and len(set(tokens.values())) == 2
    c.complete([1, 40], max_tokens=5)
    seen = {"/v1/cluster": json.dumps(c.cluster()), "/metrics": str(c.metrics()),
            **{f"metrics of {n}": str(node_metrics(c.nodes[n])) for n in tokens}, **{f"log of {d.name}": d.log() for d in c.daemons()}}
    for where, text in seen.items():
        assert text and not any(form in text.encode() for t in tokens.values() for form in forms(t)), where


def test_a_router_from_before_the_gate_token(led):
    """It tells of a decode node without its token: the prefill node says what is wrong, and does not dial in vain."""
    c, r = led
    with RogueRouter() as old:
        wanted, c.sessions = c.sessions, old.address
        c.start_node("prefill", 6)
        c.sessions = wanted
        p, d = old.session("prefill-6"), r.session("decode-0")
        p.send(peers=pb.Peers(peers=[pb.Peer(instance=d.hello.instance, address=d.hello.transfer_address, name="decode-0")]))
        told = wait_until("it to say so", lambda: [m.peer_state for m in list(p.got) if m.WhichOneof("m") == "peer_state"])
        assert not told[0].reachable and "router older than this node" in told[0].text
        p.send(peers=pb.Peers(peers=[pb.Peer(instance=d.hello.instance, address=d.hello.transfer_address, name="decode-0",
                                             gate_token=d.hello.gate_token)]))
        wait_until("it to connect", lambda: any(m.peer_state.reachable for m in list(p.got) if m.WhichOneof("m") == "peer_state"))
        c.nodes.pop("prefill-6").stop()


def test_legs_that_do_not_fit(led):
    """The two legs of a ticket have different tokens: both nodes say so, neither computes on."""
    c, r = led
    p, d = r.session("prefill-0"), r.session("decode-0")
    ticket = b"legs".ljust(16)  # of its own: what was said of others stays in a session's list
    peer = {"peer_instance": d.hello.instance, "peer_address": d.hello.transfer_address}
    d.send(submit=submit(ticket, tokens=(1, 40, 41), peer_instance=p.hello.instance))
    p.send(submit=submit(ticket, **peer))
    assert "token counts" in d.wait_end(ticket).text
    assert "token counts" in p.wait_end(ticket).text
    c.wait_idle()


def test_a_prompt_that_no_submit_announces(led):
    """The decode leg never comes: D refuses after a lease, P lets go; the decode leg alone holds nothing but its place."""
    c, r = led
    p, d = r.session("prefill-0"), r.session("decode-0")
    p.send(submit=submit(b"alone".ljust(16), peer_instance=d.hello.instance, peer_address=d.hello.transfer_address))
    assert "no submit" in p.wait_end(b"alone".ljust(16)).text
    for i in range(1100):
        d.send(submit=submit(b"w%d" % i + b"." * (15 - len(str(i))), peer_instance=p.hello.instance))
    wait_until("the limit", lambda: [m for m in list(d.got) if m.WhichOneof("m") == "attempt_end" and "full" in m.attempt_end.text])
    d.send(b"the end")  # not a message: this session goes, and what it held
    r.next_session("decode-0")
    c.wait_idle()
    assert c.complete([1, 40], max_tokens=5)["usage"]["completion_tokens"] == 5


def test_peers_that_are_not_there(led, undisturbed):
    c, r = led
    p = r.session("prefill-0")
    p.send(peers=pb.Peers(peers=[pb.Peer(instance=1 + i, address=a, name="x", gate_token=TICKET) for i, a in enumerate(
        ["127.0.0.1:9", "nonsense", "", "256.1.1.1:5", "127.0.0.1:99999", "[::]:5", "x" * 5000])]))
    m = submit(b"nowhere".ljust(16), peer_instance=1, peer_address="127.0.0.1:9", peer_gate_token=TICKET)
    p.send(submit=m)
    assert "cannot be reached" in p.wait_end(m.ticket).text
    lines = c.nodes["prefill-0"].log().splitlines()
    assert sum(" warn " in line and ("cannot dial" in line or "127.0.0.1:9)" in line) for line in lines) <= 4  # one a minute each
    assert stream(c, body(0)) == undisturbed[0]
    p.send(peers=pb.Peers())
    c.wait_idle()
