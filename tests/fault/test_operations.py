"""docs/operations.md names metrics, options and log lines that exist: looked up in what running daemons say and in the sources."""

import os
import re
import subprocess

import pytest

from cluster import BIN, ROOT, Cluster
from fire import MODEL, node_metrics


@pytest.fixture(scope="module")
def manual():
    with open(os.path.join(ROOT, "docs", "operations.md"), encoding="utf-8") as f:
        return f.read()


def test_metrics(manual, tmp_path):
    names = set(re.findall(r"`(baton_[a-z0-9_]+)", manual))
    assert len(names) > 40
    with Cluster(MODEL, node=["--health", "127.0.0.1:0"], router_opts=["--request-log", str(tmp_path / "requests.json")]) as c:
        c.complete([1, 40, 41], max_tokens=5)
        there = set(c.metrics())
        for d in c.nodes.values():
            there |= set(node_metrics(d))
        families = {re.sub(r"\{.*", "", k) for k in there}
        families |= {re.sub(r"_(bucket|sum|count)$", "", k) for k in families}
    assert not names - families, f"not there: {sorted(names - families)}"


def test_options(manual):
    programs = [["baton-router"], ["baton-prefilld"], ["baton-decoded"], *(["baton", c] for c in ("up", "chat", "status", "drain", "trace", "quantize", "perplexity"))]
    known = "".join(subprocess.run([os.path.join(BIN, p), *rest, "--help"], capture_output=True, text=True, check=True).stdout
                    for p, *rest in programs)
    missing = {o for o in re.findall(r"`[^`]*?(--[a-z][a-z-]*[a-z])", manual) if o not in known and o not in ("--install", "--prefix")}
    assert not missing, missing


def strings_of_sources():
    """Every string literal of the programs, adjacent ones joined."""
    text = ""
    for folder in ("base", "net", "router", "prefilld", "decoded", "node", "transfer", "engine", "sched", "proto", "kernels/cuda"):
        for name in sorted(os.listdir(os.path.join(ROOT, folder))):
            if name.endswith((".c", ".h")):
                with open(os.path.join(ROOT, folder, name), encoding="utf-8") as f:
                    text += re.sub(r'"\s*\n\s*"', "", f.read())
    return text


def test_log_lines(manual):
    """What the table of failures quotes in its columns of logs and of the request log."""
    table = manual[manual.index("## What failures look like"):manual.index("## When something is wrong")]
    sources = strings_of_sources()
    missing = []
    for row in table.splitlines():
        cells = row.split(" | ")
        if not row.startswith("|") or len(cells) != 5:
            continue
        for quote in re.findall(r"`([^`]+)`", cells[2] + cells[3]):
            for piece in re.split(r"…|\b[ABNXY]\b", quote):
                piece = piece.strip(" :;,")
                if len(piece) > 3 and not piece.startswith("--") and piece not in sources:
                    missing.append((quote, piece))
    assert not missing, missing
