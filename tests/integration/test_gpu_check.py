"""bench/gpu_check.sh on the emulated device: every section runs and says what it found, and one that fails does not end the others."""

import json
import os
import subprocess

from cluster import BIN, ROOT, SLOW

BUILD = os.path.dirname(BIN)


def check(build, tmp_path, *options):
    out = tmp_path / "check.json"
    p = subprocess.run([os.path.join(ROOT, "bench", "gpu_check.sh"), "--emulated", "--build", build, "--slow", str(SLOW), "--json", str(out),
                        "--work", str(tmp_path), *options], capture_output=True, text=True, timeout=800, check=False)
    return p, json.loads(out.read_text()) if out.exists() else None


def test_all_sections(tmp_path):
    p, got = check(BUILD, tmp_path)
    assert p.returncode == 0 and got["exit_code"] == 0, p.stdout + p.stderr
    status = {s["name"]: s["status"] for s in got["sections"]}
    assert list(status) == ["build", "kernels", "models", "determinism", "sanitizer", "relay", "model", "transfer", "speed", "ttft"]
    assert status.pop("sanitizer") == "skipped" and set(status.values()) == {"passed"}
    assert "emulated" in got["device"] and "no figure means anything" in p.stdout
    figures = [f for s in got["sections"] for f in s["figures"]]
    assert {f.get("class") for f in figures} >= {"cuda-bf16-emulated", "cuda-cublas"}
    assert any("device to device" in f["what"] and f["gbytes_per_s"] > 0 for f in figures)
    copies = [f for f in figures if f["what"].startswith("copies to the ")]
    assert {f["what"].split(",")[0] for f in copies} == {"copies to the host", "copies to the device"}
    assert all(f["pages_per_s"] > 0 and ("one by one" in f["what"] or f["share"] > 0) for f in copies)
    assert any("in cuda memory, shm" in f["what"] and f["what"].endswith((" staged", " registered")) for f in figures)
    assert any("ucx_perftest" in f["what"] for f in figures) or "ucx_perftest" in next(s for s in got["sections"] if s["name"] == "transfer")["note"]
    assert any(f.get("outside_us") for f in figures) and any("p99" in f["what"] for f in figures)
    assert all(f["what"] in p.stdout for f in figures)
    assert os.listdir(tmp_path) == ["check.json"]  # the made model is gone


def test_a_failure_is_loud_and_alone(tmp_path):
    build = tmp_path / "build"
    (build / "tests").mkdir(parents=True)
    (build / "bin").symlink_to(BIN)
    for name in ("test_model_golden", "test_model_bf16", "test_model_cublas", "test_cuda_same", "test_cuda_same_rows", "test_cuda_sample", "test_engine_cuda"):
        (build / "tests" / name).symlink_to(os.path.join(BUILD, "tests", name))
    broken = build / "tests" / "test_cuda_zz"
    broken.write_text("#!/bin/sh\necho 'row 7 differs' >&2\nexit 1\n")
    broken.chmod(0o755)
    p, got = check(str(build), tmp_path, "--sections", "kernels,relay")
    assert p.returncode == 1 and got["exit_code"] == 1
    status = {s["name"]: s["status"] for s in got["sections"]}
    assert status == {"build": "passed", "kernels": "failed", "relay": "passed"}
    assert "| kernels | **FAILED** |" in p.stdout and "row 7 differs" in p.stdout


def test_wrong_usage(tmp_path):
    p, _ = check(BUILD, tmp_path, "--sections", "kernels,velocity")
    assert p.returncode == 2 and "velocity" in p.stderr
    p, got = check(str(tmp_path / "nothing"), tmp_path)
    assert p.returncode == 1 and got["sections"][0]["status"] == "failed" and "not a complete build" in p.stdout
