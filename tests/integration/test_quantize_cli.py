"""baton quantize and baton perplexity: files that appear whole or not at all, figures that agree with another implementation."""

import json
import os
import re
import shutil
import subprocess

import pytest

from cluster import BIN, SLOW, tiny

BATON = os.path.join(BIN, "baton")
TEXT = """The relay begins when the first runner reads the whole course. She hands the baton on, and the second runner takes
one step after another until the end. Nobody waits for the baton: the hand is already there. When one of them falls, the
next starts again from the last mark, and the crowd hears the same story, word for word, number for number: 12, 345, 6.
"""
# Of the same text, in windows of 64 with BOS: transformers 5.24, float32, log-softmax in double.
PERPLEXITY = {"llama": -8.553992, "qwen3": -8.485762, "mixtral": -9.126804}


def run(*args, **kwargs):
    return subprocess.run([BATON, *map(str, args)], capture_output=True, text=True, timeout=120 * SLOW, check=False, **kwargs)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def log_likelihood(model, text, *args):
    p = run("perplexity", model, text, "--context", 64, "--threads", 1, *args)
    assert p.returncode == 0, p.stderr
    m = re.fullmatch(r"perplexity (\S+) ± (\S+) in class \S+, kv \S+: (\d+) tokens in (\d+) windows of 64, log-likelihood (\S+) a token\n", p.stdout)
    assert m, p.stdout
    return float(m[5]), int(m[3])


@pytest.mark.parametrize("name", PERPLEXITY)
def test_perplexity_is_that_of_transformers(name, text):
    value, n = log_likelihood(tiny(name), text)
    assert n == 227
    assert abs(value - PERPLEXITY[name]) < 2e-5


def test_perplexity_in_integers(text):
    """Nearly that of the f32 class, and not the same."""
    model = os.path.join(tiny("gguf-q8_0"), "model.gguf")
    exact, n = log_likelihood(model, text, "--numerics", "cpu-f32")
    rounded, tokens = log_likelihood(model, text, "--numerics", "cpu-int8")
    assert tokens == n and 0 < abs(rounded - exact) < 0.02
    assert log_likelihood(model, text) == (rounded, n)  # the class of quantised weights
    p = run("perplexity", model, text, "--numerics", "cpu-int7")
    assert p.returncode == 2 and "cpu-int7" in p.stderr


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "mixtral", "phi3", "mistral-swa"])
def test_quantized_file_says_nearly_the_same(name, text, tmp_path):
    plain, n = log_likelihood(tiny(name), text)
    for kind, room in {"f32": 1e-5, "bf16": 0.05, "int8": 0.1, "q4_1": 1.5}.items():
        out = tmp_path / f"{name}-{kind}.gguf"
        p = run("quantize", tiny(name), "--to", kind, "--out", out)
        assert p.returncode == 0, p.stderr
        assert "100 %" in p.stderr
        assert re.match(rf"{re.escape(str(out))}: \S+ MB, \S+ bits for each of \S+ million weights\n", p.stdout)
        value, tokens = log_likelihood(out, text)
        assert tokens == n
        assert abs(value - plain) < room, kind


def test_from_one_gguf_to_another(text, tmp_path):
    """Keys that this program does not know are carried along."""
    first, second = os.path.join(tiny("gguf-f32"), "model.gguf"), tmp_path / "second.gguf"
    assert run("quantize", first, "--to", "q8_0", "--out", second).returncode == 0
    assert b"tokenizer.chat_template" in second.read_bytes()
    plain, _ = log_likelihood(first, text)
    assert abs(plain - log_likelihood(second, text)[0]) < 0.1
    sizes = {}
    for kind in ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"):
        assert run("quantize", first, "--to", kind, "--out", second).returncode == 0
        assert abs(plain - log_likelihood(second, text)[0]) < 1.5, kind
        sizes[kind] = second.stat().st_size
    assert sizes["f16"] > sizes["q8_0"] > sizes["q5_1"] > sizes["q5_0"] >= sizes["q4_1"] > sizes["q4_0"]


def test_directory_from_gguf(text, tmp_path):
    """There and back: the same weights, ids and template."""
    gguf, folder, again = tmp_path / "a.gguf", tmp_path / "hf", tmp_path / "b.gguf"
    assert run("quantize", tiny("llama"), "--to", "q8_0", "--out", gguf).returncode == 0
    p = run("quantize", gguf, "--to", "f32", "--hf", folder)
    assert p.returncode == 0, p.stderr
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    here, n = log_likelihood(gguf, text)
    there, tokens = log_likelihood(folder, text)
    assert tokens == n and abs(here - there) < 1e-5
    assert run("quantize", folder, "--to", "f32", "--out", again).returncode == 0
    assert abs(log_likelihood(again, text)[0] - here) < 1e-5
    for args in (["--to", "int8"], ["--to", "f32"]):
        p = run("quantize", tiny("llama") if args[1] == "f32" else gguf, *args, "--hf", tmp_path / "no")
        assert p.returncode == 1 and "--hf needs" in p.stderr
    p = run("quantize", tiny("gemma3"), "--to", "f32", "--out", gguf)
    p = run("quantize", gguf, "--to", "f32", "--hf", tmp_path / "no")
    assert p.returncode == 1 and "gemma3" in p.stderr
    assert "config.json" not in (os.listdir(tmp_path / "no") if (tmp_path / "no").exists() else [])


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "phi3"])
def test_fp8_directory_says_nearly_the_same(name, text, tmp_path):
    folder = tmp_path / "fp8"
    p = run("quantize", tiny(name), "--to", "fp8", "--hf", folder)
    assert p.returncode == 0, p.stderr
    assert re.match(rf"{re.escape(str(folder))}: \S+ million weights, fp8\n", p.stdout)
    config, was = (json.loads(open(os.path.join(d, "config.json"), encoding="utf-8").read()) for d in (folder, tiny(name)))
    quant = config.pop("quantization_config")
    assert config == was and quant["format"] == "float-quantized" and "lm_head" in quant["ignore"]
    assert not any("norm" in m or "embed" in m for m in quant["ignore"])
    with open(folder / "model.safetensors", "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    codes = [n for n, t in header.items() if t.get("dtype") == "F8_E4M3"]
    assert codes and all(header[n + "_scale"] == {**header[n + "_scale"], "dtype": "F32", "shape": [header[n]["shape"][0], 1]} for n in codes)
    assert not {n.removesuffix(".weight") for n in codes} & set(quant["ignore"])
    plain, n = log_likelihood(tiny(name), text, "--numerics", "cpu-f32")
    value, tokens = log_likelihood(folder, text, "--numerics", "cpu-f32")
    assert tokens == n and 0 < abs(value - plain) < 0.1


def test_fp8_directory_of_a_directory_with_more_in_it(tmp_path):
    source, folder = tmp_path / "source", tmp_path
    shutil.copytree(tiny("llama"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "chat_template.json").write_text('{"chat_template": "x"}')
    for at in ("first", "last"):  # null says that there is none
        null = {"quantization_config": None}
        (source / "config.json").write_text(json.dumps({**null, **config} if at == "first" else {**config, **null}))
        p = run("quantize", source, "--to", "fp8", "--hf", folder / at)
        assert p.returncode == 0, p.stderr
        made = json.loads((folder / at / "config.json").read_text())
        assert made.pop("quantization_config")["format"] == "float-quantized" and made == config
        assert (folder / at / "chat_template.json").exists()


def test_fp8_from_gguf(text, tmp_path):
    gguf, folder = os.path.join(tiny("gguf-f32"), "model.gguf"), tmp_path / "fp8"
    p = run("quantize", gguf, "--to", "fp8", "--hf", folder)
    assert p.returncode == 0, p.stderr
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    plain, n = log_likelihood(gguf, text, "--numerics", "cpu-f32")
    value, tokens = log_likelihood(folder, text, "--numerics", "cpu-f32")
    assert tokens == n and 0 < abs(value - plain) < 0.1
    back = tmp_path / "back.gguf"  # codes times scales are f32 values
    assert run("quantize", folder, "--to", "f32", "--out", back).returncode == 0
    assert abs(log_likelihood(back, text, "--numerics", "cpu-f32")[0] - value) < 1e-5
    p = run("quantize", folder, "--to", "fp8", "--hf", tmp_path / "again")
    assert p.returncode == 1 and "quantised already" in p.stderr and not (tmp_path / "again").exists()
    p = run("quantize", gguf, "--to", "fp8", "--out", tmp_path / "x.gguf")
    assert p.returncode == 2 and "--to fp8 needs --hf" in p.stderr


def test_nothing_is_overwritten_unasked(tmp_path):
    gguf, folder = tmp_path / "a.gguf", tmp_path / "hf"
    assert run("quantize", tiny("llama"), "--to", "f32", "--out", gguf).returncode == 0
    before = gguf.read_bytes()
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for args, message in (([gguf, "--out", gguf], "is the model itself"), ([gguf, "--out", tmp_path], "is a folder"),
                          ([gguf, "--to", "f32", "--hf", folder], "holds a model already"),
                          ([gguf, "--to", "f32", "--hf", tmp_path / "x", "--out", tmp_path / "y"], "only one of them")):
        p = run("quantize", *args)
        assert p.returncode == 2 and message in p.stderr, args
    assert gguf.read_bytes() == before
    assert (folder / "config.json").read_text() == "{}"
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "hf"]


def test_default_name(tmp_path):
    assert run("quantize", tiny("llama"), "--to", "q8_0", cwd=tmp_path).returncode == 0
    assert os.listdir(tmp_path) == ["llama-q8_0.gguf"]


def test_quantised_directory_needs_its_tokenizer(tmp_path):
    p = run("quantize", tiny("gptq4-order"), "--out", tmp_path / "x.gguf")
    assert p.returncode == 1
    assert "tokenizer.json" in p.stderr
    assert os.listdir(tmp_path) == []


def test_bad_arguments(tmp_path, text):
    for args in (["quantize"], ["quantize", tiny("llama"), "--to", "q3"], ["quantize", "a", "b"], ["perplexity", tiny("llama")],
                 ["perplexity", tiny("llama"), text, "--context", "1"]):
        p = run(*args, cwd=tmp_path)
        assert p.returncode == 2, args
        assert p.stderr.startswith(f"baton {args[0]}: ")
    p = run("quantize", tmp_path / "none", "--out", tmp_path / "x.gguf")
    assert p.returncode == 1 and "none" in p.stderr
    p = run("quantize", tiny("llama"), "--out", tmp_path / "no" / "x.gguf")
    assert p.returncode == 1 and "No such file" in p.stderr
    p = run("perplexity", tiny("llama"), tmp_path / "none.txt")
    assert p.returncode == 1 and "none.txt" in p.stderr
    (tmp_path / "one.txt").write_text("x")
    p = run("perplexity", tiny("llama"), tmp_path / "one.txt")
    assert p.returncode == 1 and "at least 2" in p.stderr
    assert sorted(os.listdir(tmp_path)) == ["one.txt", "text.txt"]
