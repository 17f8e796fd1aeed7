#!/usr/bin/env python3
"""Converts a SentencePiece BPE model with byte fallback (Llama, Mistral) to a tokenizer.json, as converters for the
`tokenizers` package do: every way to cut a piece into two pieces is a merge, ordered by score. Standard library only.

usage: sentencepiece_to_json.py MODEL OUTPUT
"""
import json
import struct
import sys


def varint(b, i):
    value = shift = 0
    while True:
        value |= (b[i] & 127) << shift
        i += 1
        if b[i - 1] < 128:
            return value, i
        shift += 7


def fields(b):
    """(number, value) of a protobuf message; bytes, ints and float32 only."""
    i = 0
    while i < len(b):
        tag, i = varint(b, i)
        kind = tag & 7
        if kind == 0:
            value, i = varint(b, i)
        elif kind == 1:
            value, i = b[i:i + 8], i + 8
        elif kind == 2:
            n, i = varint(b, i)
            value, i = b[i:i + n], i + n
        elif kind == 5:
            value, i = struct.unpack("<f", b[i:i + 4])[0], i + 4
        else:
            raise ValueError(f"wire type {kind} at byte {i}")
        yield tag >> 3, value


def pieces(model):
    for number, value in fields(model):
        if number == 1:
            piece = dict(fields(value))
            yield piece[1].decode(), piece.get(2, 0.0), piece.get(3, 1)


def convert(model):
    table = list(pieces(model))
    vocab = {text: i for i, (text, _, _) in enumerate(table)}
    merges = []
    for text, score, _ in table:
        cuts = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in vocab and text[i:] in vocab]
        merges += [(score, cut) for cut in sorted(cuts, key=lambda c: (vocab[c[0]], vocab[c[1]]))]
    merges.sort(key=lambda m: m[0], reverse=True)
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
             for i, (t, _, kind) in enumerate(table) if kind in (2, 3, 4)]

    def seq(name, n):
        return {"Sequence": {"id": name, "type_id": n}}

    def bos(n):
        return {"SpecialToken": {"id": "<s>", "type_id": n}}

    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [bos(0), seq("A", 0)], "pair": [bos(0), seq("A", 0), bos(1), seq("B", 1)],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": [list(m) for _, m in merges]},
    }


def main():
    with open(sys.argv[1], "rb") as f:
        data = convert(f.read())
    with open(sys.argv[2], "w", encoding="utf-8") as f:
        json.dump(data, f, ensure_ascii=False)


main()
