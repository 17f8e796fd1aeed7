#!/usr/bin/env python3
"""Compiles every public header alone, twice included: as C17, and as C++17 where CUDA sources share it.

A public header is any .h of a room that is not *_int.h. Without a C++ compiler the second part is skipped and said.
"""

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys

from check_layers import ROOMS, walk

WARN = ["-Wall", "-Wextra", "-Wshadow", "-Wundef", "-Werror", "-D_GNU_SOURCE", '-DBT_VERSION="0"', "-fsyntax-only"]
C_FLAGS = ["-x", "c", "-std=gnu17", "-Wstrict-prototypes", "-Wmissing-prototypes"]
CXX_FLAGS = ["-x", "c++", "-std=gnu++17"]
CXX_ROOMS = {"base", "kernels"}  # base/: what kernels/ headers include


def compile_alone(root, compiler, flags, header):
    text = f'#include "{header}"\n#include "{header}"\n'
    done = subprocess.run([compiler, *flags, *WARN, "-I", root, "-"], input=text, text=True, capture_output=True)
    return header, flags[1], done.returncode, done.stderr


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--cxx", default="c++")
    args = parser.parse_args()

    headers = [p for p in walk(root) if p.endswith(".h") and not p.endswith("_int.h") and p.split("/")[0] in ROOMS]
    jobs = [(args.cc, C_FLAGS, h) for h in headers]
    if shutil.which(args.cxx):
        jobs += [(args.cxx, CXX_FLAGS, h) for h in headers if h.split("/")[0] in CXX_ROOMS]
    else:
        print(f"skipped: C++17, {args.cxx} is not installed")
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for header, language, code, errors in pool.map(lambda j: compile_alone(root, *j), jobs):
            if code != 0:
                failed += 1
                print(f"{header} as {language} does not compile alone:\n{errors}")
    print(f"{len(jobs)} compilations, {failed} failed")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
