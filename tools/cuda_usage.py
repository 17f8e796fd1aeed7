#!/usr/bin/env python3
"""What ptxas says of each CUDA kernel: registers and spills.

    cuda_usage.py run nvcc ...               compiles (CMake's launcher), keeps what ptxas says beside the object file
    cuda_usage.py check BUILD [--update]     compares all of a build with cuda_usage.json

A spill fails the check, in any kernel, for any device and compiler: kernels here are all hot. Registers depend on the compiler; they
are compared where cuda_usage.json was written with the same release of nvcc, and more than recorded by more than SLACK fail. After
a change that is meant, --update writes what is there. Kernels that are not recorded are listed, no more.
"""

import argparse
import json
import os
import re
import subprocess
import sys

RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cuda_usage.json")
SUFFIX = ".ptxas"
SLACK = 8  # registers
NOISE = re.compile(r"^(ptxas info|\s+\d+ bytes stack frame)|^\s*$")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def run(command):
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    told = [line for line in done.stderr.splitlines() if NOISE.match(line)]
    other = [line for line in done.stderr.splitlines() if not NOISE.match(line)]
    if other:
        print("\n".join(other), file=sys.stderr)
    if done.returncode == 0 and "-o" in command:
        with open(command[command.index("-o") + 1] + SUFFIX, "w", encoding="utf-8") as f:
            f.write("\n".join(told) + "\n")
    return done.returncode


def readable(names):
    """C++ names without their arguments, in the same order."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"^void ", "", n).split("(")[0] for n in text.splitlines()]


def usage(build):
    """{"file: kernel": {device: [registers, bytes spilled]}}"""
    found = {}
    for folder, _, files in os.walk(os.path.join(build, "kernels")):
        for name in sorted(files):
            if not name.endswith(SUFFIX):
                continue
            with open(os.path.join(folder, name), encoding="utf-8") as f:
                parse(name.split(".cu")[0] + ".cu", f.read(), found)
    return found


def parse(source, text, found):
    entries = ENTRY.split(text)[1:]
    triples = list(zip(entries[0::3], entries[1::3], entries[2::3]))
    names = readable([t[0] for t in triples]) if triples else []
    for name, (_, device, rest) in zip(names, triples):
        spill, used = SPILL.search(rest), USED.search(rest)
        if spill is None or used is None:
            sys.exit(f"{source}: no numbers of {name} in what ptxas said")
        found.setdefault(f"{source}: {name}", {})[device] = [int(used[1]), int(spill[1]) + int(spill[2])]


def release():
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", text)[1]


def compare(found, recorded, same):
    failed = 0
    for kernel in sorted(found):
        for device, (registers, spilled) in sorted(found[kernel].items()):
            before = recorded.get(kernel, {}).get(device)
            if spilled > 0:
                failed += 1
                print(f"{kernel}, {device}: {spilled} bytes spilled, {registers} registers")
            elif before is None:
                print(f"{kernel}, {device}: not recorded, {registers} registers")
            elif same and registers > before[0] + SLACK:
                failed += 1
                print(f"{kernel}, {device}: {registers} registers, {before[0]} are recorded")
    return failed


def check(build, update):
    found = usage(build)
    if not found:
        sys.exit(f"{build}: nothing of ptxas there; a build of the preset cuda leaves it beside its object files")
    with open(RECORD, encoding="utf-8") as f:
        record = json.load(f)
    if update:
        rows = [f"    {json.dumps(k)}: {json.dumps(found[k], sort_keys=True)}" for k in sorted(found)]
        with open(RECORD, "w", encoding="utf-8") as f:
            f.write('{\n  "nvcc": "%s",\n  "kernels": {\n%s\n  }\n}\n' % (release(), ",\n".join(rows)))
    same = record["nvcc"] == release()
    failed = compare(found, found if update else record["kernels"], same)
    n = sum(len(v) for v in found.values())
    print(f"{len(found)} kernels, {n} compilations, {failed} failed" + ("" if same else f"; registers not compared: nvcc {record['nvcc']} is recorded"))
    return 1 if failed else 0


def main():
    if sys.argv[1:2] == ["run"]:
        return run(sys.argv[2:])
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("what", choices=["check"])
    p.add_argument("build")
    p.add_argument("--update", action="store_true", help="write what is found into cuda_usage.json")
    args = p.parse_args()
    return check(args.build, args.update)


if __name__ == "__main__":
    sys.exit(main())
