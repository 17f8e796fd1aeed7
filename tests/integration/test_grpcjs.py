"""@grpc/grpc-js against a 1P:1D cluster; the checks are in client.js."""

import os
import subprocess

from cluster import ROOT, SLOW

HERE = os.path.dirname(os.path.abspath(__file__))


def test_grpcjs(cluster):
    modules = os.path.join(ROOT, "build", "node", "node_modules")
    assert os.path.isdir(modules), "node packages are missing: tests/run.sh installs them"
    r = subprocess.run(["node", os.path.join(HERE, "client.js"), cluster.address, os.path.join(ROOT, "proto")],
                       env=dict(os.environ, BATON_NODE_MODULES=modules), capture_output=True, text=True, timeout=120 * SLOW)
    assert r.returncode == 0 and r.stdout.strip() == "ok", r.stdout + r.stderr
