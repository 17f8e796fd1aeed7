#!/usr/bin/env python3
"""Counts the instructions of the hot paths under valgrind and compares them with expected.json.

    count.py --program build/release/tests/instructions_work --compiler gcc-12

Times are too noisy on shared machines to fail a test; counts are not, but they depend on the compiler: numbers are kept for
each one that somebody recorded, and the test is skipped (77) for others, and without valgrind. More instructions than
expected by the tolerance fail. Fewer pass, and the table says so. After a change that is meant:

    count.py --program ... --compiler ... --update
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
EXPECTED = os.path.join(HERE, "expected.json")
SKIP = 77


def arguments():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--program", required=True, help="instructions_work of a release build")
    p.add_argument("--compiler", required=True, metavar="NAME-MAJOR", help="what built it")
    p.add_argument("--update", action="store_true", help="write what is counted into expected.json")
    return p.parse_args()


def skip(why):
    print(f"skipped: {why}")
    sys.exit(SKIP)


def work_names():
    with open(os.path.join(HERE, "work.c"), encoding="utf-8") as f:
        return re.findall(r"^    W\((\w+),", f.read(), re.MULTILINE)


def count(program):
    names = work_names()
    options = [o for n in names for o in (f"--zero-before=work_{n}", f"--dump-after=work_{n}")]
    with tempfile.TemporaryDirectory() as tmp:
        out = os.path.join(tmp, "callgrind.out")
        done = subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--combine-dumps=yes", *options, program],
                              capture_output=True, text=True, cwd=os.path.dirname(os.path.dirname(HERE)))
        if done.returncode == SKIP:
            skip(done.stdout.strip().removeprefix("skipped: ") + " (under valgrind)")
        if "Fatal error at startup" in done.stderr:
            skip("valgrind does not work here:\n" + done.stderr[-1000:])
        if done.returncode != 0:
            sys.exit(f"{program} under valgrind: exit {done.returncode}\n{done.stderr[-3000:]}")
        with open(out, encoding="utf-8") as f:
            text = f.read()
    found = dict(re.findall(r"^desc: Trigger: --dump-after=work_(\w+)$.*?^summary: (\d+)$", text, re.MULTILINE | re.DOTALL))
    missing = [n for n in names if n not in found]
    if missing:
        sys.exit(f"valgrind counted nothing for {', '.join(missing)}")
    return {n: int(found[n]) for n in names if n != "nothing"}


def compare(counts, expected, tolerance):
    worse, better = [], []
    print(f"{'work':20} {'instructions':>14} {'expected':>14} {'change':>8}")
    for name, n in counts.items():
        want = expected.get(name)
        change = n / want - 1 if want else float("inf")
        note = ""
        if change > tolerance:
            worse.append(name)
            note = "  more" if want else "  no number yet"
        elif change < -tolerance:
            better.append(name)
            note = "  fewer"
        print(f"{name:20} {n:14,} {want or 0:14,} {change:+8.1%}{note}")
    return worse, better


def main():
    args = arguments()
    with open(EXPECTED, encoding="utf-8") as f:
        known = json.load(f)
    if shutil.which("valgrind") is None:
        skip("valgrind is not installed")
    if args.compiler not in known["counts"] and not args.update:
        skip(f"no numbers for {args.compiler}; there are some for {', '.join(known['counts'])}")
    counts = count(args.program)
    worse, better = compare(counts, known["counts"].get(args.compiler, {}), known["tolerance"])
    if args.update:
        known["counts"][args.compiler] = counts
        with open(EXPECTED, "w", encoding="utf-8") as f:
            json.dump(known, f, indent=2)
            f.write("\n")
        print(f"{EXPECTED} has these numbers now")
        return
    how = f"{os.path.relpath(__file__)} --program {os.path.relpath(args.program)} --compiler {args.compiler} --update"
    if better:
        print(f"{', '.join(better)}: fewer than expected; keep that by\n  {how}")
    if worse:
        sys.exit(f"{', '.join(worse)}: more than {known['tolerance']:.0%} above what is expected. If that is meant, say why in the "
                 f"commit, with the new numbers:\n  {how}")


if __name__ == "__main__":
    main()
