"""Packed weights are in memory once: two daemons map one cache file, a later start packs nothing, and no answer changes."""

import array
import json
import os
import random
import re
import shutil
import struct

import pytest

from cluster import Cluster, tiny

LAYERS, DIM, FFN, VOCAB = 3, 256, 1536, 288


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama of 17.6 MB (smaller ones are not kept in the cache) with a fixture's tokenizer."""
    disk = os.statvfs(tmp_path_factory.getbasetemp())
    if disk.f_bavail < disk.f_blocks // 10 + (1 << 28) // disk.f_frsize:
        pytest.skip("less than a tenth of the disk is free: nodes keep no cache files there")
    folder = tmp_path_factory.mktemp("model") / "middle-llama"
    shutil.copytree(tiny("tiny-long"), folder)
    with open(folder / "config.json", encoding="utf-8") as f:
        config = json.load(f)
    config.update(hidden_size=DIM, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {"model.embed_tokens.weight": (VOCAB, DIM), "lm_head.weight": (VOCAB, DIM), "model.norm.weight": (DIM,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name in "qkvo":
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (DIM, DIM)
        for name, shape in {"gate": (FFN, DIM), "up": (FFN, DIM), "down": (DIM, FFN)}.items():
            shapes[f"{layer}.mlp.{name}_proj.weight"] = shape
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (DIM,)
    header, at = {}, 0
    for name, shape in shapes.items():
        n = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    rng = random.Random(5)
    values = array.array("f", (rng.gauss(0, 0.1) for _ in range(65521)))
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        left = at // 4
        while left > 0:
            values[:min(left, len(values))].tofile(f)
            left -= len(values)
    return str(folder)


def mapped_inode(daemon):
    """The inode of the panel file that a daemon maps, or None."""
    with open(f"/proc/{daemon.proc.pid}/maps", encoding="utf-8") as f:
        inodes = {line.split()[4] for line in f if line.rstrip().endswith(".panels")}
    assert len(inodes) <= 1, inodes
    return inodes.pop() if inodes else None


def test_two_daemons_hold_the_weights_once(model, tmp_path):
    panels = str(tmp_path / "panels")
    answers, logs, inodes = [], [], []
    for cache in (panels, panels, "off"):
        with Cluster(model, threads=1, node=["--panel-cache", cache]) as c:
            answers.append(c.complete("the sea", max_tokens=24, temperature=0, ignore_eos=True)["choices"][0]["text"])
            logs.append([d.log() for d in c.nodes.values()])
            inodes.append([mapped_inode(d) for d in c.nodes.values()])
            c.wait_idle()
            c.check_logs()
    assert answers[0] == answers[1] == answers[2]
    first, second, off = logs
    made = [bool(re.search(r"packed weights, shared, now in", log)) for log in first]
    found = [bool(re.search(r"packed weights, shared, mapped from", log)) for log in first]
    assert sorted(made) == sorted(found) == [False, True], first
    assert all("packed weights, shared, mapped from" in log for log in second)
    assert all("in memory of this process: no cache folder" in log for log in off)
    assert inodes[0][0] is not None and len({*inodes[0], *inodes[1]}) == 1 and inodes[2] == [None, None]
    assert len(os.listdir(panels)) == 1
