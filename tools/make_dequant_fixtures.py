#!/usr/bin/env python3
"""Writes tests/golden/dequant.bin: random blocks of every GGUF tensor type, and the values they stand for.

usage: make_dequant_fixtures.py     (needs: pip install gguf==0.19.0)

The values are those of gguf.quants.dequantize. For each type: its name (16 bytes, padded with zeros), the number of values and of raw
bytes (u32 each), the raw bytes, the values (f32). Everything is little-endian.
"""

import pathlib
import struct

import gguf
import numpy as np

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests/golden/dequant.bin"
VALUES = 512
# Where in a block half-precision factors stand: random bits there would be infinite or NaN.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "IQ4_NL": [0], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def main():
    rng = np.random.default_rng(20)
    with OUT.open("wb") as f:
        for name, halves in HALVES.items():
            kind = gguf.GGMLQuantizationType[name]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            raw = rng.integers(0, 256, (VALUES // block, size), dtype=np.uint8)
            for at in halves:
                factors = (rng.standard_normal(len(raw)) * 0.02).astype(np.float16)
                raw[:, at:at + 2] = factors.view(np.uint8).reshape(-1, 2)
            values = gguf.quants.dequantize(raw.reshape(-1), kind).astype("<f4").reshape(-1)
            assert len(values) == VALUES and np.isfinite(values).all()
            f.write(name.lower().encode().ljust(16, b"\0") + struct.pack("<II", VALUES, raw.size) + raw.tobytes() + values.tobytes())
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
