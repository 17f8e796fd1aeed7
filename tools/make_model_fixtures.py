#!/usr/bin/env python3
"""Writes tests/golden/models/NAME/: tiny random-weight models of every family, with reference logits and greedy texts.

usage: make_model_fixtures.py [NAME ...]     (needs: pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0)

config.json has the spelling of published checkpoints. reference.json is computed by transformers on the CPU in float32
(weights widened first where they are stored narrower), greedy without a stop token. For GGUF files the reference runs on the dequantised
weights: exact arithmetic over the file's content. Weights are drawn until no greedy step has its two best logits closer
than MARGIN_MIN and float32 agrees with float64.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests/golden/models"
VOCAB = 288
SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
LENGTHS = (1, 7, 33, 65, 130)
N_GREEDY = 24
MARGIN_MIN = 3e-3
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = """The relay begins when the first runner reads the whole course. She hands the baton on, and the second runner takes
one step after another until the end. Nobody waits for the baton: the hand is already there. When one of them falls, the
next starts again from the last mark, and the crowd hears the same story, word for word, number for number: 12, 345, 6."""

BASE = {
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCAB, "max_position_embeddings": 512,
    "initializer_range": 0.02, "attention_dropout": 0.0, "torch_dtype": "float32", "use_cache": True,
}
LLAMA = {
    **BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 40,
    "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}
SMALL = {**LLAMA, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}

MODELS = {
    "llama": {"config": LLAMA},
    "llama-mha-tied": {"config": {**SMALL, "num_key_value_heads": 4, "tie_word_embeddings": True}, "eos": [2, 4]},
    "llama-bias": {"config": {**SMALL, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}},
    "llama-rope-llama3": {"config": {**SMALL, "head_dim": 16, "rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}},
    "llama-rope-linear": {"config": {**SMALL, "rope_scaling": {"type": "linear", "factor": 4.0}}},
    "llama-rope-yarn": {"config": {**SMALL, "head_dim": 16, "rope_scaling": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}}},
    "llama-bf16": {"config": {**LLAMA, "torch_dtype": "bfloat16"}, "dtype": torch.bfloat16},
    "llama-f16": {"config": {**LLAMA, "torch_dtype": "float16"}, "dtype": torch.float16},
    "llama-sharded": {"config": SMALL, "shards": 3},
    "tiny-long": {"config": {**SMALL, "hidden_size": 32, "rope_theta": 1000000.0, "max_position_embeddings": 65536},
                  "lengths": (1, 33, 900)},
    "mistral-swa": {"config": {
        **BASE, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 32,
        "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 20, "tie_word_embeddings": False}},
    "qwen2": {"config": {
        **BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 36,
        "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "sliding_window": 32, "max_window_layers": 3, "use_sliding_window": False,
        "tie_word_embeddings": True}},
    "qwen3": {"config": {
        **BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
        "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 18, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None,
        "max_window_layers": 3, "use_sliding_window": False, "tie_word_embeddings": True}},
    "gemma2": {"config": {
        **BASE, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "hidden_size": 36, "intermediate_size": 72,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "sliding_window": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0, "cache_implementation": "hybrid"}},
    "gemma3": {"config": {
        **BASE, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 14, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 16, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 40, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "cache_implementation": "hybrid"}},
    "phi3": {"config": {
        **BASE, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu", "hidden_size": 48,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 512,
        "sliding_window": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": False, "attention_bias": False}},
    "mixtral": {"config": {
        **BASE, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 32,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0, "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02, "output_router_logits": False, "tie_word_embeddings": False}},
    "qwen3-moe": {"config": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "attention_bias": False,
        "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None,
        "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1],
        "sliding_window": None, "max_window_layers": 3, "use_sliding_window": False, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "tie_word_embeddings": False}},
}

# GGUF: whole blocks in every row; the K-quants need rows of 256.
GGUF_SMALL = {**LLAMA, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}
GGUF_WIDE = {**LLAMA, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8,
             "num_key_value_heads": 1, "tie_word_embeddings": True}
GGUFS = {
    "gguf-f32": {"config": GGUF_SMALL, "type": "F32"},
    "gguf-f16": {"config": GGUF_SMALL, "type": "F16"},
    "gguf-bf16": {"config": GGUF_SMALL, "type": "BF16"},
    "gguf-q8_0": {"config": {**GGUF_SMALL, "tie_word_embeddings": False}, "type": "Q8_0"},
    "gguf-q4_0": {"config": {**GGUF_SMALL, "tie_word_embeddings": False}, "type": "Q4_0"},
    "gguf-q4_1": {"config": GGUF_SMALL, "type": "Q4_1"},
    "gguf-q4_k": {"config": GGUF_WIDE, "type": "Q4_K"},
    "gguf-q6_k": {"config": GGUF_WIDE, "type": "Q6_K"},
}


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def make_tokenizer():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.post_processor = processors.TemplateProcessing(single="<|bos|> $A", pair="<|bos|> $A <|bos|>:1 $B:1",
                                                     special_tokens=[("<|bos|>", 1)])
    assert t.get_vocab_size() == VOCAB
    return t


def write_text_files(folder, tokenizer, spec):
    write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
    write_json(folder / "tokenizer_config.json", {
        "bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec["config"]["max_position_embeddings"], "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE})
    write_json(folder / "generation_config.json", {
        "bos_token_id": 1, "eos_token_id": spec.get("eos", 2), "pad_token_id": 0, "do_sample": False})


def build(config, seed):
    """A float32 model with weights large enough that every part of it matters to the logits."""
    with tempfile.TemporaryDirectory() as tmp:
        write_json(pathlib.Path(tmp) / "config.json", config)
        cfg = AutoConfig.from_pretrained(tmp)
    cfg._attn_implementation = "eager"
    cfg._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(cfg, dtype=torch.float32).eval()
    gen = torch.Generator().manual_seed(seed)
    gemma = config["model_type"].startswith("gemma")
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=gen)
            if name.endswith("bias"):
                p.copy_(noise * 0.2)
            elif p.dim() == 1:
                p.copy_(noise * 0.2 + (0.0 if gemma else 1.0))
            elif "embed_tokens" in name:
                tied = model.lm_head.weight is model.model.embed_tokens.weight
                p.copy_(noise * (2.5 / p.shape[1] ** 0.5 if tied else 1.0))
            else:
                p.copy_(noise * ((2.5 if "lm_head" in name else 1.2) / p.shape[-1] ** 0.5))
    return model


def significant(x):
    return [float(f"{v:.7g}") for v in x]


def prompts(lengths, seed):
    gen = torch.Generator().manual_seed(1000 + seed)
    for n in lengths:
        ids = torch.randint(5, VOCAB, (n,), generator=gen).tolist()
        if n > 1:
            ids[0] = 1
        yield ids


def reference(model, name, lengths, seed):
    """None when some greedy step is too close to call."""
    cases = []
    double = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    double.load_state_dict(model.state_dict())
    double = double.double()
    worst = 0.0
    with torch.no_grad():
        for ids in prompts(lengths, seed):
            logits = model(torch.tensor([ids])).logits[0, -1]
            worst = max(worst, (double(torch.tensor([ids])).logits[0, -1] - logits.double()).abs().max().item())
            greedy, margins, seq = [], [], list(ids)
            for _ in range(N_GREEDY):
                top = model(torch.tensor([seq])).logits[0, -1].topk(2)
                margins.append(float(f"{(top.values[0] - top.values[1]).item():.4g}"))
                greedy.append(top.indices[0].item())
                seq.append(greedy[-1])
            if min(margins) < MARGIN_MIN:
                return None
            cases.append({"name": f"len{len(ids)}", "length": len(ids), "input_ids": ids, "logits": significant(logits.tolist()),
                          "greedy": greedy, "greedy_top1_top2_margin": margins})
    if worst > 2e-5:
        return None  # a router or a soft cap amplifies rounding: draw other weights
    import transformers
    return {"model": name, "generator": f"transformers {transformers.__version__}, torch {torch.__version__}, CPU, eager, float32",
            "seed": seed, "max_abs_diff_vs_float64": float(f"{worst:.3g}"), "cases": cases}


def save_weights(folder, model, spec):
    state = {k: v.detach().to(spec.get("dtype", torch.float32)).contiguous() for k, v in model.state_dict().items()}
    if spec["config"].get("tie_word_embeddings", spec["config"]["model_type"].startswith("gemma")):
        state.pop("lm_head.weight", None)
    state = checkpoint_names(state)
    n = spec.get("shards", 1)
    if n == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, index = sorted(state), {}
    for i in range(n):
        part = names[i::n]
        file = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
        save_file({k: state[k] for k in part}, folder / file, metadata={"format": "pt"})
        index.update({k: file for k in part})
    total = sum(v.numel() * v.element_size() for v in state.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})


def checkpoint_names(state):
    """transformers 5 keeps experts fused in memory; published checkpoints have one tensor for each expert."""
    out = {}
    for k, v in state.items():
        if ".experts.gate_up_proj" in k or ".experts.down_proj" in k:
            mixtral = ".block_sparse_moe." in k or "mixtral" in k
            prefix = k[: k.index(".experts.")]
            for e in range(v.shape[0]):
                if "gate_up" in k:
                    gate, up = v[e].chunk(2, dim=0)
                    out[f"{prefix}.experts.{e}.gate_proj.weight"] = gate.contiguous()
                    out[f"{prefix}.experts.{e}.up_proj.weight"] = up.contiguous()
                else:
                    out[f"{prefix}.experts.{e}.down_proj.weight"] = v[e].contiguous()
            assert not mixtral
        else:
            out[k] = v
    return out


def mixtral_names(folder):
    """Mixtral's published names: block_sparse_moe, w1 (gate), w2 (down), w3 (up)."""
    from safetensors.torch import load_file
    state = load_file(folder / "model.safetensors")
    ren = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    out = {}
    for k, v in state.items():
        if ".mlp." in k:
            k = k.replace(".mlp.", ".block_sparse_moe.")
            for a, b in ren.items():
                k = k.replace(f".{a}.", f".{b}.")
        out[k] = v
    save_file(out, folder / "model.safetensors", metadata={"format": "pt"})


def narrow(model, dtype):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype).float())


def make_hf(name, spec, tokenizer, seed):
    lengths = spec.get("lengths", LENGTHS)
    while True:
        model = build(spec["config"], seed)
        if "dtype" in spec:
            narrow(model, spec["dtype"])
        ref = reference(model, name, lengths, seed)
        if ref is not None:
            break
        seed += 100
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", spec["config"])
    write_text_files(folder, tokenizer, spec)
    save_weights(folder, model, spec)
    if spec["config"]["model_type"] == "mixtral":
        mixtral_names(folder)
    write_json(folder / "reference.json", ref)
    back = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for c in ref["cases"]:
            got = back(torch.tensor([c["input_ids"]])).logits[0, -1]
            err = (got - torch.tensor(c["logits"])).abs().max().item()
            assert err < 1e-5, (name, c["name"], err)
    return ref


# ---- GGUF ----


def q6_k(x):
    """Blocks of 256: per 16 values an int8 scale times one half-precision scale; 6 bits each."""
    x = x.reshape(-1, 16, 16).astype(np.float32)
    scale = np.abs(x).max(axis=2) / 31.0
    d = (scale.max(axis=1) / 127.0).astype(np.float16)
    sc = np.round(scale / np.maximum(d.astype(np.float32), 1e-30)[:, None]).clip(1, 127)
    q = np.round(x / np.maximum(sc * d.astype(np.float32)[:, None], 1e-30)[:, :, None]).clip(-32, 31).astype(np.int16) + 32
    q = q.reshape(-1, 2, 4, 32).astype(np.uint8)  # halves of 128, quarters of 32
    low = np.concatenate([q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], axis=2)
    high = (q[:, :, 0] >> 4) | (q[:, :, 1] >> 4) << 2 | (q[:, :, 2] >> 4) << 4 | (q[:, :, 3] >> 4) << 6
    n = len(q)
    return np.concatenate([low.reshape(n, 128), high.reshape(n, 64), sc.astype(np.int8).view(np.uint8).reshape(n, 16),
                           d.view(np.uint8).reshape(n, 2)], axis=1)


def q4_k(x):
    """Blocks of 256: per 32 values a 6-bit scale and a 6-bit minimum, each times a half-precision one; 4 bits each."""
    x = x.reshape(-1, 8, 32).astype(np.float32)
    low = np.minimum(x.min(axis=2), 0.0)
    scale, minimum = (x.max(axis=2) - low) / 15.0, -low
    d = (scale.max(axis=1) / 63.0).astype(np.float16)
    dmin = (minimum.max(axis=1) / 63.0).astype(np.float16)
    sc = np.round(scale / np.maximum(d.astype(np.float32), 1e-30)[:, None]).clip(1, 63).astype(np.uint8)
    mn = np.round(minimum / np.maximum(dmin.astype(np.float32), 1e-30)[:, None]).clip(0, 63).astype(np.uint8)
    eff = sc * d.astype(np.float32)[:, None]
    q = np.round((x + (mn * dmin.astype(np.float32)[:, None])[:, :, None]) / np.maximum(eff, 1e-30)[:, :, None])
    q = q.clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.concatenate([
        sc[:, :4] | (sc[:, 4:] >> 4) << 6, mn[:, :4] | (mn[:, 4:] >> 4) << 6, sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4], axis=1)
    n = len(q)
    return np.concatenate([d.view(np.uint8).reshape(n, 2), dmin.view(np.uint8).reshape(n, 2), packed,
                           (q[:, :, 0] | q[:, :, 1] << 4).reshape(n, 128)], axis=1)


def quantize(x, qtype):
    """Bytes for the file, and the float32 values they stand for."""
    import gguf
    if qtype.name in ("Q4_K", "Q6_K"):
        rows = x.reshape(-1, 256)
        data = (q4_k if qtype.name == "Q4_K" else q6_k)(rows).reshape(*x.shape[:-1], -1)
    else:
        data = gguf.quants.quantize(x, qtype)
    return data, gguf.quants.dequantize(data, qtype).reshape(x.shape).astype(np.float32)


def permuted(w, n_heads):
    """Rows of q and k from half-split to interleaved rotation, as llama files store them."""
    return w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def unpermuted(w, n_heads):
    return w.reshape(n_heads, w.shape[0] // n_heads // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def gguf_tensors(model, qtype):
    """(name in the file, data, type) for every tensor; the model gets the values that these stand for."""
    import gguf
    cfg = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, cfg.num_hidden_layers)
    with torch.no_grad():
        for key, p in model.named_parameters():
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            x = p.detach().numpy().astype(np.float32)
            heads = cfg.num_attention_heads if "q_proj" in key else cfg.num_key_value_heads if "k_proj" in key else 0
            if x.ndim == 1:
                yield name, x.copy(), gguf.GGMLQuantizationType.F32
                continue
            data, values = quantize(np.ascontiguousarray(permuted(x, heads) if heads else x), qtype)
            p.copy_(torch.from_numpy(np.ascontiguousarray(unpermuted(values, heads) if heads else values)))
            yield name, data, qtype


def write_gguf(path, spec, tensors, qtype, tokenizer):
    import gguf
    c = spec["config"]
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(path.parent.name)
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_rope_dimension_count(c["hidden_size"] // c["num_attention_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_vocab_size(VOCAB)
    w.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_S"}.get(qtype.name, "MOSTLY_" + qtype.name)])
    w.add_quantization_version(2)
    spec_tok = json.loads(tokenizer.to_str())
    ids = {i: t for t, i in spec_tok["model"]["vocab"].items()}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("llama-bpe")
    w.add_token_list([ids[i] for i in range(VOCAB)])
    w.add_token_types([gguf.TokenType.CONTROL if i < len(SPECIALS) else gguf.TokenType.NORMAL for i in range(VOCAB)])
    w.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in spec_tok["model"]["merges"]])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(0)
    w.add_add_bos_token(True)
    w.add_chat_template(TEMPLATE)
    for name, data, kind in tensors:
        w.add_tensor(name, data, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def make_gguf(name, spec, tokenizer, seed):
    import gguf
    qtype = gguf.GGMLQuantizationType[spec["type"]]
    while True:
        model = build(spec["config"], seed)
        tensors = list(gguf_tensors(model, qtype))
        ref = reference(model, name, (1, 7, 33, 130), seed)
        if ref is not None:
            break
        seed += 100
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_gguf(folder / "model.gguf", spec, tensors, qtype, tokenizer)
    write_json(folder / "reference.json", ref)
    return ref


def main():
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    wanted = sys.argv[1:]
    for seed, (name, spec) in enumerate({**MODELS, **GGUFS}.items()):
        if wanted and name not in wanted:
            continue
        ref = (make_gguf if "type" in spec else make_hf)(name, spec, tokenizer, seed)
        size = sum(f.stat().st_size for f in (OUT / name).iterdir())
        margin = min(m for c in ref["cases"] for m in c["greedy_top1_top2_margin"])
        print(f"{name:20} seed {ref['seed']:5} {size:8} bytes, fp32 error {ref['max_abs_diff_vs_float64']:.2g}, least margin {margin:.3g}",
              flush=True)


if __name__ == "__main__":
    main()
