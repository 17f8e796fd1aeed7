"""A model with made-up BF16 weights in Llama-3's shapes, as a Hugging Face directory: for measuring, not for reading."""

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

# hidden, feed-forward, layers, heads, KV heads, values a head, vocabulary
SIZES = {"8b": (4096, 14336, 32, 32, 8, 128, 128256), "1b": (2048, 8192, 16, 32, 8, 64, 128256), "tiny": (64, 96, 2, 4, 2, 16, 288)}
BLOCK = 32 << 20  # bytes of random weights, used again and again
ALIGN = 64


def tensors(size):
    dim, ffn, layers, heads, kv_heads, head_dim, vocab = size
    yield "model.embed_tokens.weight", [vocab, dim]
    for i in range(layers):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", [dim]
        yield at + "self_attn.q_proj.weight", [heads * head_dim, dim]
        yield at + "self_attn.k_proj.weight", [kv_heads * head_dim, dim]
        yield at + "self_attn.v_proj.weight", [kv_heads * head_dim, dim]
        yield at + "self_attn.o_proj.weight", [dim, heads * head_dim]
        yield at + "post_attention_layernorm.weight", [dim]
        yield at + "mlp.gate_proj.weight", [ffn, dim]
        yield at + "mlp.up_proj.weight", [ffn, dim]
        yield at + "mlp.down_proj.weight", [dim, ffn]
    yield "model.norm.weight", [dim]
    yield "lm_head.weight", [vocab, dim]


def byte_count(shape):
    n = 2
    for d in shape:
        n *= d
    return n


def bytes_of(size):
    return sum(byte_count(shape) for _, shape in tensors(size))


def random_block(n):
    """BF16 values of ±0.008 to 0.031, at random."""
    rng = random.Random(1)
    block = bytearray(n)
    block[0::2] = rng.randbytes(n // 2)
    block[1::2] = rng.randbytes(n // 2).translate(bytes(0x3C | (i & 0x80) for i in range(256)))
    return bytes(block)


def write_weights(path, size):
    header, at = {}, 0
    for name, shape in tensors(size):
        n = byte_count(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    block = memoryview(random_block(min(BLOCK, (at + 1) // 2 * 2)))
    with open(path, "wb", buffering=0) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(f.tell() + at)

        def fill(i, shape, to):
            n = byte_count(shape)
            if len(shape) == 1:
                os.pwrite(f.fileno(), b"\x80\x3f" * shape[0], to)  # 1.0
                return
            begin = i * 4098 % len(block) & ~1  # no two matrices alike
            while n > 0:
                wrote = os.pwrite(f.fileno(), block[begin:begin + n], to)
                n, to, begin = n - wrote, to + wrote, (begin + wrote) % len(block)

        jobs = [(i, shape, f.tell() + header[name]["data_offsets"][0]) for i, (name, shape) in enumerate(tensors(size))]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # the copies run beside each other
            for job in [pool.submit(fill, *j) for j in jobs]:
                job.result()


def write_model(folder, size, tokenizer_of):
    """tokenizer_of: a model directory whose tokenizer is taken; prompts are ids that it has."""
    dim, ffn, layers, heads, kv_heads, head_dim, vocab = size
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": dim, "intermediate_size": ffn,
              "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
              "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
              "bos_token_id": 1, "eos_token_id": 2}
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(tokenizer_of, name), folder)
    write_weights(os.path.join(folder, "model.safetensors"), size)


