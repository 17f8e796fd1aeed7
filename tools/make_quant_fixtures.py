#!/usr/bin/env python3
"""Writes tests/golden/models/{gptq4-order,gptq8-row,awq4,ct-int8,ct-pack4,ct-f8,fp8-static,fp8-block}/: tiny quantised
Llamas as Hugging Face directories.

usage: make_quant_fixtures.py [NAME ...]
       (needs: pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.1)

Weights are rounded to nearest in groups, and packed as the published quantisers pack them. reference.json is computed by transformers in
float32 on the values that the packed weights stand for. compressed-tensors' own code unpacks its formats again, and AWQ's, as a check.
"""

import pathlib
import shutil
import sys

import make_model_fixtures as base
import numpy as np
import torch
from safetensors.torch import save_file

OUT = base.OUT
VOCAB = 48
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns in a word, from its low end
GROUP = 32

SMALL = {**base.LLAMA, "vocab_size": VOCAB, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": True}
TINY = {**SMALL, "hidden_size": 32, "num_attention_heads": 2}
CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None,
      "global_compression_ratio": 1.5}


def ct_group(bits, strategy, group):
    return {"group_0": {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group, "actorder": None,
        "dynamic": False, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}}}


def ct_float(strategy):
    return {"group_0": {"targets": ["Linear"], "output_activations": None, "input_activations": {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}, "weights": {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "group_size": None, "actorder": None,
        "dynamic": False, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}}}


MODELS = {
    "gptq4-order": {"config": {**SMALL, "torch_dtype": "float16", "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False, "static_groups": False,
        "true_sequential": True, "damp_percent": 0.01}}, "dtype": torch.float16},
    "gptq8-row": {"config": {**TINY, "torch_dtype": "float16", "quantization_config": {
        "quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "sym": True, "checkpoint_format": "gptq_v2",
        "pack_dtype": "int32", "lm_head": False, "dynamic": {}}}, "dtype": torch.float16},
    "awq4": {"config": {**SMALL, "torch_dtype": "float16", "quantization_config": {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None}}, "dtype": torch.float16},
    "ct-int8": {"config": {**TINY, "torch_dtype": "bfloat16", "quantization_config": {
        **CT, "format": "int-quantized", "config_groups": ct_group(8, "channel", None)}}, "dtype": torch.bfloat16},
    "ct-pack4": {"config": {**SMALL, "torch_dtype": "bfloat16", "quantization_config": {
        **CT, "format": "pack-quantized", "config_groups": ct_group(4, "group", GROUP)}}, "dtype": torch.bfloat16},
    "ct-f8": {"config": {**TINY, "torch_dtype": "bfloat16", "quantization_config": {
        **CT, "format": "float-quantized", "config_groups": ct_float("channel")}}, "dtype": torch.bfloat16},
    "fp8-static": {"config": {**TINY, "torch_dtype": "bfloat16", "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"}},
        "dtype": torch.bfloat16},
    "fp8-block": {"config": {**SMALL, "intermediate_size": 96, "torch_dtype": "bfloat16", "quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 64]}},
        "dtype": torch.bfloat16},
}


def rounded(w, bits, group, symmetric, dtype):
    """Quants from 0, scales and zero points, [N, K], [N, groups]; w is about scale * (q - zero)."""
    n, k = w.shape
    g = w.reshape(n, k // group, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = g.abs().amax(2) / (top // 2)
        zero = torch.full_like(scale, (top + 1) // 2)
    else:
        low, high = g.amin(2).clamp(max=0), g.amax(2).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(0, top)
    scale = scale.to(dtype).float()
    q = (g / scale[:, :, None] + zero[:, :, None]).round().clamp(0, top)
    values = ((q - zero[:, :, None]) * scale[:, :, None]).reshape(n, k)
    return q.reshape(n, k).int(), scale.to(dtype), zero.int(), values


def words(fields, bits, dim):
    """32-bit words of unsigned fields along dim, the first one lowest."""
    per = 32 // bits
    x = np.moveaxis(fields.numpy().astype(np.uint32), dim, 0)
    out = np.zeros((x.shape[0] // per, *x.shape[1:]), dtype=np.uint32)
    for i in range(per):
        out |= x[i::per] << np.uint32(i * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out, 0, dim)).view(np.int32))


def awq_words(fields):
    n = fields.shape[1]
    order = torch.arange(n).reshape(-1, 8)[:, AWQ_ORDER].reshape(-1)
    return words(fields[:, order], 4, 1)


def gptq(w, stem, config, dtype, gen):
    bits, group = config["bits"], config["group_size"]
    k = w.shape[1]
    group = k if group == -1 else group
    order = torch.randperm(k, generator=gen) if config["desc_act"] else torch.arange(k)
    q, scale, zero, values = rounded(w[:, order], bits, group, config["sym"], dtype)
    back = torch.empty_like(order)
    back[order] = torch.arange(k)
    less = 1 if config.get("checkpoint_format", "gptq") == "gptq" else 0
    zeros = (zero.T - less) & ((1 << bits) - 1)
    return {f"{stem}.qweight": words(q[:, back].T.contiguous(), bits, 0), f"{stem}.qzeros": words(zeros, bits, 1),
            f"{stem}.scales": scale.T.contiguous(), f"{stem}.g_idx": (back // group).int()}, values[:, back]


def awq(w, stem, config, dtype, _gen):
    q, scale, zero, values = rounded(w, 4, config["group_size"], False, dtype)
    return {f"{stem}.qweight": awq_words(q.T.contiguous()), f"{stem}.qzeros": awq_words(zero.T.contiguous()),
            f"{stem}.scales": scale.T.contiguous()}, values


def compressed(w, stem, config, dtype, _gen):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    weights = config["config_groups"]["group_0"]["weights"]
    bits = weights["num_bits"]
    q, scale, _, values = rounded(w, bits, weights["group_size"] or w.shape[1], True, dtype)
    signed = (q - (1 << (bits - 1))).to(torch.int8)
    if config["format"] == "int-quantized":
        return {f"{stem}.weight": signed, f"{stem}.weight_scale": scale.contiguous()}, values
    return {f"{stem}.weight_packed": pack_to_int32(signed, bits), f"{stem}.weight_scale": scale.contiguous(),
            f"{stem}.weight_shape": torch.tensor(w.shape)}, values


def scaled(w, rows, cols, dtype):
    """e4m3 codes with a scale for every rows x cols values, [N / rows, K / cols], and the values that they stand for."""
    n, k = w.shape
    scale = torch.zeros(-(-n // rows), -(-k // cols))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scale[i, j] = w[i * rows:(i + 1) * rows, j * cols:(j + 1) * cols].abs().amax() / 448
    scale = scale.to(dtype)
    each = scale.float().repeat_interleave(rows, 0)[:n].repeat_interleave(cols, 1)[:, :k]
    codes = (w / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * each


def float8(w, stem, config, dtype, _gen):
    if "weight_block_size" in config:
        codes, scale, values = scaled(w, *config["weight_block_size"], torch.float32)
        return {f"{stem}.weight": codes, f"{stem}.weight_scale_inv": scale}, values
    if config["quant_method"] == "fp8":
        codes, scale, values = scaled(w, *w.shape, torch.float32)
        more = {f"{stem.rsplit('.', 1)[0]}.{n}_scale": torch.ones(1) for n in "kv" if stem.endswith(f".{n}_proj")}
        return {f"{stem}.weight": codes, f"{stem}.weight_scale": scale[0, 0].clone(), f"{stem}.input_scale": torch.ones(()), **more}, values
    codes, scale, values = scaled(w, 1, w.shape[1], dtype)
    return {f"{stem}.weight": codes, f"{stem}.weight_scale": scale}, values


def quantised(model, config, dtype, gen):
    """The file's tensors; the model gets the values that they stand for."""
    make = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": float8}[config["quant_method"]]
    make = float8 if config.get("format") == "float-quantized" else make
    state = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".layers." in name and p.dim() == 2:
                parts, values = make(p.detach(), name.removesuffix(".weight"), config, dtype, gen)
                state.update(parts)
                p.copy_(values)
            else:
                p.copy_(p.to(dtype).float())
                state[name] = p.detach().to(dtype).contiguous()
    return state


def make(name, spec, seed):
    quant = spec["config"]["quantization_config"]
    plain = {k: v for k, v in spec["config"].items() if k != "quantization_config"}
    while True:
        model = base.build(plain, seed)
        state = quantised(model, quant, spec["dtype"], torch.Generator().manual_seed(seed))
        ref = base.reference(model, name, (1, 7, 40), seed)
        if ref is not None:
            break
        seed += 100
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    base.write_json(folder / "config.json", spec["config"])
    base.write_json(folder / "reference.json", ref)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    print(name, seed, sum(f.stat().st_size for f in pathlib.Path(folder).iterdir()), "bytes")


def main():
    torch.set_num_threads(1)
    base.VOCAB = VOCAB
    for seed, (name, spec) in enumerate(MODELS.items(), 400):
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name, spec, seed)


if __name__ == "__main__":
    main()
