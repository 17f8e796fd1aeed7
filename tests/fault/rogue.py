"""Daemons and routers that lie: they speak baton.session.v1 with grpcio, and say what a test wants."""

import queue
import threading
from concurrent import futures

import grpc

import grpc_stubs
from cluster import SLOW, wait_until

pb, stubs = grpc_stubs.load("session/v1", "session")


class RogueDaemon:
    """One session with a router. what arrives is kept in `got`; `ended`: the status it ended with, then its text."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.out = queue.Queue()
        self.got = []
        self.ended = None
        self.call = self.channel.stream_stream(
            "/baton.session.v1.Session/Run", request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=pb.FromRouter.FromString)(iter(self.out.get, None))
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        try:
            for m in self.call:
                self.got.append(m)
            self.ended = (self.call.code(), self.call.details())
        except grpc.RpcError as e:
            self.ended = (e.code(), e.details())

    def send(self, m=None, **kind):
        self.out.put(m if m is not None else pb.FromDaemon(**kind))

    def of_kind(self, kind):
        return [getattr(m, kind) for m in list(self.got) if m.WhichOneof("m") == kind]

    def wait_for(self, kind, n=1):
        return wait_until(f"{n} messages of kind {kind}", lambda: len(self.of_kind(kind)) >= n and self.of_kind(kind))

    def wait_end(self):
        return wait_until("the session to end", lambda: self.ended)

    def close(self):
        self.out.put(None)
        self.call.cancel()
        self.reader.join(30 * SLOW)
        self.channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class RogueRouter:
    """Daemons dial it; each session is found under the daemon's name."""

    def __init__(self):
        self.sessions = {}
        self.closing = False
        handler = grpc.stream_stream_rpc_method_handler(
            self.run, request_deserializer=pb.FromDaemon.FromString,
            response_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString())
        self.server = grpc.server(futures.ThreadPoolExecutor(16))
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.session.v1.Session", {"Run": handler}),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    class Session:
        def __init__(self, hello):
            self.hello = hello
            self.out = queue.Queue()
            self.got = []
            self.over = False

        def send(self, m=None, **kind):
            self.out.put(m if m is not None else pb.FromRouter(**kind))

        def ends(self, ticket):
            return [m.attempt_end for m in list(self.got) if m.WhichOneof("m") == "attempt_end" and m.attempt_end.ticket == ticket]

        def outputs(self, ticket):
            return [o for m in list(self.got) if m.WhichOneof("m") == "outputs" for o in m.outputs.outputs if o.ticket == ticket]

        def wait_end(self, ticket):
            return wait_until("the attempt's end", lambda: self.ends(ticket))[-1]

        def wait_output(self, ticket, n=1):
            return wait_until(f"{n} outputs", lambda: len(self.outputs(ticket)) >= n and self.outputs(ticket))

    def run(self, requests, context):
        s = self.Session(next(requests).hello)
        s.send(welcome=pb.Welcome(version=s.hello.version_max, instance=99, name="rogue"))

        def read():
            try:
                for m in requests:
                    s.got.append(m)
            except Exception:  # noqa: BLE001, the stream has ended
                pass
            s.over = True
            s.out.put(None)

        threading.Thread(target=read, daemon=True).start()
        self.sessions[s.hello.name] = s
        while not self.closing:
            try:
                m = s.out.get(timeout=0.1)
            except queue.Empty:
                m = pb.FromRouter(heartbeat=pb.Heartbeat())
            if m is None:
                return
            yield m

    def session(self, name):
        return wait_until(f"a session of {name}", lambda: self.sessions.get(name))

    def next_session(self, name):
        old = self.sessions.pop(name)
        wait_until("the session to end", lambda: old.over)
        return self.session(name)

    def close(self):
        self.closing = True
        self.server.stop(None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
