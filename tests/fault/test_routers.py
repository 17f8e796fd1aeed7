"""Two routers over the same nodes, which do not know of each other: one comes and goes, the other's clients notice nothing."""

import signal

import pytest

from cluster import Cluster, parallel, wait_until
from fire import GREEDY, IDS, MODEL, Background, TwoRouters, body, frozen, stream, undisturbed_answers

PATIENT = ["--lease", "120s"]


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_answers()


def test_both_serve(undisturbed):
    with TwoRouters(MODEL, prefill=2, decode=2) as c:
        got = parallel([lambda i=i: stream((c, c.other)[i % 2], body(i // 2)) for i in range(16)])
        assert got == [undisturbed[i // 2] for i in range(16)]
        c.wait_idle(30)
        c.other.wait_idle(30)
        c.check_logs()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_one_goes_in_the_middle(undisturbed, how):
    """Its work is gone from the nodes, however it went; the other's goes on, and so do answers that have begun."""
    lease = ["--lease", "1s"] if how == signal.SIGSTOP else PATIENT
    with TwoRouters(MODEL, node=lease, router_opts=["--drain-timeout", "0s"]) as c:
        lost, kept = [], [[] for _ in undisturbed]
        request = body(1, max_tokens=4000 if how == signal.SIGSTOP else 60000)
        dying = Background(lambda: stream(c, request, lost))
        staying = [Background(lambda i=i: stream(c.other, body(i), kept[i])) for i in range(8)]
        wait_until("all to have begun", lambda: len(lost) > 2 and all(kept), 120)
        if how == signal.SIGSTOP:
            with frozen(c.router):
                assert [s.result() for s in staying] == undisturbed
                c.other.wait_idle(60)  # the nodes have given up what the silent one had
        else:
            c.router.proc.send_signal(how)
            assert [s.result() for s in staying] == undisturbed
            c.other.wait_idle(60)
        if how != signal.SIGSTOP:
            with pytest.raises(Exception):  # noqa: B017, an error or a broken stream; never an end
                dying.result()
            c.router.proc.wait(60)
            c.start_router(listen=c.address, sessions=c.own_sessions)
        c.wait_ready(60)
        if how == signal.SIGSTOP:
            assert dying.result() == stream(c.other, request)  # awake, it began again where it was
        assert parallel([lambda i=i: stream((c, c.other)[i % 2], body(i)) for i in range(8)]) == undisturbed
        c.wait_idle(30)


def test_a_restarted_router_serves_with_the_first_pair():
    """Nodes dial again by themselves; as soon as one of each role is back there is an answer."""
    with Cluster(MODEL, prefill=2, decode=2) as c:
        c.router.kill()
        for name in ("prefill-1", "decode-1"):
            c.nodes.pop(name).kill()
        c.start_router(listen=c.address, sessions=c.sessions)
        wait_until("a pair", lambda: c.http("/health")[0] == 200, 60)
        assert c.complete(IDS, max_tokens=5, **GREEDY)["usage"]["completion_tokens"] == 5
        c.wait_ready(60)
        c.wait_idle(30)
