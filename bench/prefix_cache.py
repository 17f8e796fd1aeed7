#!/usr/bin/env python3
"""What the prefix caches save in conversations: the same chats with caches on and off, answers compared.

Starts real daemons on loopback. Every conversation has the same system prompt; each turn sends all that was said before.
Prints time to first token of first and later turns, tokens computed at prefill nodes, and tokens that moved. Caches off and on
take turns, so that a machine that gets slower meanwhile is slower for both.

    bench/prefix_cache.py MODEL [--bin build/release/bin] [--prefill 1] [--decode 1] [--chats 6] [--turns 5] [--repeat 1]

Needs Python's standard library only.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests", "integration"))
import cluster as clusters  # noqa: E402

SYSTEM = ("You are the clerk of a relay club. You answer in two or three plain sentences, name the runner and the leg when you "
          "know them, and never invent results. The club trains on the track by the river on Tuesdays and Fridays. ") * 6
WORDS = ("baton runner track leg hand zone pace coach start finish river lane stride record rain shoes team signal turn "
         "heat final split morning evening medal crowd whistle bend sprint").split()


def question(chat, turn, n_words):
    rng = random.Random(f"{chat}/{turn}")
    return "Tell me about " + " ".join(rng.choice(WORDS) for _ in range(n_words)) + "."


def ask(cluster, messages, max_tokens):
    """(answer, seconds to the first token, usage)"""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    req = urllib.request.Request(cluster.url + "/v1/chat/completions", json.dumps(body).encode(),
                                 {"content-type": "application/json"})
    text, first, usage = "", None, None
    begin = time.monotonic()
    with urllib.request.urlopen(req, timeout=600) as r:
        for line in r:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and first is None:
                    first = time.monotonic() - begin
                text += piece
    return text, first, usage


def converse(cluster, chat, a, rows, answers):
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(a.turns):
        messages.append({"role": "user", "content": question(chat, turn, a.words)})
        text, first, usage = ask(cluster, messages, a.answer)
        messages.append({"role": "assistant", "content": text})
        answers[chat, turn] = text
        rows.append((turn, first, usage))


def run(a, cache):
    rows, answers = [], {}
    with clusters.Cluster(a.model, prefill=a.prefill, decode=a.decode, node=["--prefix-cache", cache],
                          kv_bytes=a.kv_bytes, threads=a.threads) as c:
        ask(c, [{"role": "user", "content": "Hello"}], 4)  # weights are in memory now
        todo = list(range(a.chats))
        lock = threading.Lock()

        def worker():
            while True:
                with lock:
                    if not todo:
                        return
                    chat = todo.pop(0)
                converse(c, chat, a, rows, answers)

        begin = time.monotonic()
        threads = [threading.Thread(target=worker) for _ in range(a.at_once)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        seconds = time.monotonic() - begin
        c.wait_idle()
        moved = c.metric_sum("baton_kv_transferred_tokens_total")
    return rows, answers, seconds, moved


def p50(values):
    return 1e3 * statistics.median(values)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("model", help="a Hugging Face directory or a .gguf file with a chat template")
    p.add_argument("--bin", default=os.path.join(ROOT, "build", "release", "bin"), help="where the daemons are")
    p.add_argument("--prefill", type=int, default=1)
    p.add_argument("--decode", type=int, default=1)
    p.add_argument("--chats", type=int, default=6, help="conversations")
    p.add_argument("--at-once", type=int, default=2, help="of them at the same time")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--words", type=int, default=30, help="of each question")
    p.add_argument("--answer", type=int, default=24, help="tokens of each answer")
    p.add_argument("--threads", type=int, default=1, help="of each node")
    p.add_argument("--kv-bytes", default="256MiB")
    p.add_argument("--repeat", type=int, default=1, help="pairs of runs, with new clusters")
    a = p.parse_args()
    clusters.BIN = a.bin
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                            check=False).stdout.strip()
    print(f"commit {commit}, {platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
          f"{os.path.basename(a.model)}, {a.prefill}P:{a.decode}D, {a.threads} threads each, {a.chats} chats of {a.turns} turns, "
          f"{a.at_once} at once")
    results = []
    for _ in range(a.repeat):
        for cache in ("off", "on"):
            rows, answers, seconds, moved = run(a, cache)
            results.append(answers)
            prompt = sum(u["prompt_tokens"] for _, _, u in rows)
            computed = prompt - sum(u["cached_tokens"] for _, _, u in rows)
            print(f"cache {cache:3}: first token {p50([f for t, f, _ in rows if t == 0]):7.0f} ms in the first turn, "
                  f"{p50([f for t, f, _ in rows if t > 0]):7.0f} ms in later ones (p50); {prompt} prompt tokens, "
                  f"{computed} computed, {moved:.0f} moved; {seconds:.1f} s in all", flush=True)
    same = all(r == results[0] for r in results)
    print("answers are equal" if same else "ANSWERS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
