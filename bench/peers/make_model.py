#!/usr/bin/env python3
"""Writes GGUF files of a model with the shape of Qwen3-0.6B, random weights and a vocabulary of 32,000: 473 M weights.

    make_model.py --tokenizer ANY_BPE.gguf --out DIR --types f32,bf16,q8_0,q4_0,q4_k_m

The f32 file is written here, the others are made from it by llama.cpp's own quantiser. The tokenizer is the one of another
file, cut to the vocabulary's size, so that servers can read text. Files that exist are kept. Needs numpy, gguf and
llama-cpp-python (bench/peers.sh installs them)."""

import argparse
import os
import sys
import time

import numpy as np
import gguf

LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 28, 1024, 16, 8, 128, 3072, 32000, 40960
NAME = "qwen3-0.6b-shape"


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--tokenizer", required=True, metavar="GGUF", help="file whose BPE tokenizer is taken")
    p.add_argument("--out", required=True, metavar="DIR", help="where the files go")
    p.add_argument("--types", default="f32", metavar="T[,T...]",
                   help="f32 and what llama.cpp's quantiser knows: bf16, q8_0 ...")
    return p.parse_args()


def strings(reader, key):
    field = reader.fields[key]
    return [bytes(field.parts[i]).decode() for i in field.data]


def numbers(reader, key):
    field = reader.fields[key]
    return [field.parts[i][0].item() for i in field.data]


def copy_tokenizer(w, path):
    """Tokens in order of their merges, special ones first: cutting the end off leaves a whole tokenizer."""
    r = gguf.GGUFReader(path)
    tokens = strings(r, "tokenizer.ggml.tokens")
    if len(tokens) < VOCAB:
        sys.exit(f"{path}: {len(tokens)} tokens, {VOCAB} are needed")
    tokens = tokens[:VOCAB]
    known = set(tokens)
    merges = [m for m in strings(r, "tokenizer.ggml.merges") if m.replace(" ", "") in known]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(strings(r, "tokenizer.ggml.pre")[0])
    w.add_token_list(tokens)
    w.add_token_types(numbers(r, "tokenizer.ggml.token_type")[:VOCAB])
    w.add_token_merges(merges)
    w.add_bos_token_id(numbers(r, "tokenizer.ggml.bos_token_id")[0])
    w.add_eos_token_id(numbers(r, "tokenizer.ggml.eos_token_id")[0])
    w.add_add_bos_token(False)


def tensors():
    """(name, shape) as numpy has it: rows are outputs."""
    yield "token_embd.weight", (VOCAB, DIM)
    yield "output_norm.weight", (DIM,)
    for i in range(LAYERS):
        yield f"blk.{i}.attn_norm.weight", (DIM,)
        yield f"blk.{i}.attn_q.weight", (HEADS * HEAD_DIM, DIM)
        yield f"blk.{i}.attn_k.weight", (KV_HEADS * HEAD_DIM, DIM)
        yield f"blk.{i}.attn_v.weight", (KV_HEADS * HEAD_DIM, DIM)
        yield f"blk.{i}.attn_q_norm.weight", (HEAD_DIM,)
        yield f"blk.{i}.attn_k_norm.weight", (HEAD_DIM,)
        yield f"blk.{i}.attn_output.weight", (DIM, HEADS * HEAD_DIM)
        yield f"blk.{i}.ffn_norm.weight", (DIM,)
        yield f"blk.{i}.ffn_gate.weight", (FFN, DIM)
        yield f"blk.{i}.ffn_up.weight", (FFN, DIM)
        yield f"blk.{i}.ffn_down.weight", (DIM, FFN)


def write_f32(path, tokenizer):
    w = gguf.GGUFWriter(path + ".part", "qwen3")
    w.add_name(NAME)
    w.add_block_count(LAYERS)
    w.add_context_length(CONTEXT)
    w.add_embedding_length(DIM)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    w.add_file_type(gguf.LlamaFileType.ALL_F32)
    copy_tokenizer(w, tokenizer)
    for name, shape in tensors():
        w.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    rng = np.random.default_rng(1)
    for _, shape in tensors():
        t = rng.standard_normal(shape, dtype=np.float32)
        w.write_tensor_data(1 + t * np.float32(0.1) if len(shape) == 1 else t / np.float32(shape[1] ** 0.5))
    w.close()
    os.rename(path + ".part", path)


def quantize(source, path, kind):
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    ftypes = {n[len("LLAMA_FTYPE_MOSTLY_"):].lower(): getattr(llama_cpp, n) for n in dir(llama_cpp) if n.startswith("LLAMA_FTYPE_MOSTLY_")}
    if kind not in ftypes:
        sys.exit(f"llama.cpp makes no {kind}; it makes {', '.join(sorted(ftypes))}")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftypes[kind]
    params.nthread = len(os.sched_getaffinity(0))
    if llama_cpp.llama_model_quantize(source.encode(), (path + ".part").encode(), params) != 0:
        sys.exit(f"llama.cpp could not make {path}")
    os.rename(path + ".part", path)


def main():
    args = arguments()
    os.makedirs(args.out, exist_ok=True)
    source = os.path.join(args.out, f"{NAME}.f32.gguf")
    for kind in ["f32"] + [t for t in args.types.lower().split(",") if t != "f32"]:
        path = os.path.join(args.out, f"{NAME}.{kind}.gguf")
        if os.path.exists(path):
            continue
        start = time.monotonic()
        print(f"making {path} ...", file=sys.stderr, flush=True)
        if kind == "f32":
            write_f32(path, args.tokenizer)
        else:
            quantize(source, path, kind)
        print(f"  {os.path.getsize(path) / 1e6:.0f} MB in {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
