"""A benchmark client from PyPI, unmodified, completes a run over each endpoint: aiperf, in an environment of its own."""

import json
import os
import subprocess
import sys

import pytest

from cluster import ROOT, Cluster, tiny

AIPERF = "aiperf==0.13.0"


@pytest.fixture(scope="module")
def aiperf():
    venv = os.path.join(ROOT, "build", "venv-aiperf")
    program = os.path.join(venv, "bin", "aiperf")
    if not os.path.exists(program):
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        pip = subprocess.run([os.path.join(venv, "bin", "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", AIPERF],
                             check=False)
        if pip.returncode != 0:
            pytest.skip(f"{AIPERF} cannot be installed: offline? (pip's messages are above)")
    return program


def run(program, cluster, endpoint, tmp_path, requests, tokenizer):
    r = subprocess.run(
        [program, "profile", "-m", cluster.cluster()["model"], "--url", cluster.url, "--endpoint-type", endpoint, "--streaming",
         "--tokenizer", tokenizer, "--use-server-token-count", "--request-count", str(requests), "--concurrency", "4",
         "--isl", "40", "--osl", "12", "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", str(tmp_path)],
        capture_output=True, text=True, timeout=600, check=False)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-2000:]
    with open(tmp_path / "profile_export_aiperf.json", encoding="utf-8") as f:
        report = json.load(f)
    assert report["is_complete"] and not report["was_cancelled"]
    assert report["request_count"]["avg"] == requests and report["request_error_rate"]["avg"] == 0
    assert report["error_summary"] == []
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == 12
    ttft, itl = report["time_to_first_token"], report["inter_token_latency"]
    print(f"{endpoint}: TTFT p50 {ttft['p50']:.1f} ms, ITL p50 {itl['p50']:.2f} ms, "
          f"{report['output_token_throughput']['avg']:.0f} tokens/s")


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf(aiperf, endpoint, tmp_path):
    with Cluster(tiny("tiny-long"), prefill=2, decode=1) as c:
        run(aiperf, c, endpoint, tmp_path, 40, c.model)
        c.wait_idle()
        c.check_logs()


def test_aiperf_on_a_real_model(aiperf, model, tmp_path):
    with Cluster(model, threads=2, kv_bytes="256MiB") as c:
        run(aiperf, c, "chat", tmp_path, 12, tiny("tiny-long"))  # the tokenizer only shapes prompts: the server counts
        c.wait_idle()
        c.check_logs()
