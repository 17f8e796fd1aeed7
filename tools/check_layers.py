#!/usr/bin/env python3
"""Checks what the compiler cannot: who includes whom, where third-party headers and risky calls stand, file names.

The table below is the one of docs/architecture.md. Arrows go one way; a folder that is not in the table and holds
C sources is an error, so a new room is a decision. Prints one line per finding and exits 1 if there are any.
"""

import argparse
import collections
import os
import re
import sys

SHARED = ["base", "proto", "net", "files", "text", "kernels", "model", "sched", "engine", "transfer"]

# room -> rooms it may include besides itself
ROOMS = {
    "base": [],
    "proto": ["base"],
    "net": ["base", "proto"],
    "files": ["base"],
    "text": ["base", "files"],
    "kernels": ["base"],
    "model": ["base", "files", "kernels"],
    "sched": ["base"],
    "engine": ["base", "kernels", "model", "sched"],
    "transfer": ["base", "proto"],
    "router": ["base", "proto", "net", "files", "text", "sched"],
    "node": SHARED,
    "prefilld": SHARED + ["node"],
    "decoded": SHARED + ["node"],
    "daemon": SHARED + ["node", "prefilld", "decoded"],  # the two programs: both legs in one node
    "plan": ["base", "proto", "sched"],  # and the daemons' cores, see CORE_USERS
    "cli": ["base", "net", "proto", "plan", "text", "files", "kernels", "model"],
}
FREE_ROOMS = {"bench", "tests", "tools"}  # may include anything
DAEMONS = ("router", "prefilld", "decoded")
CORE_ROOMS = {"base", "proto", "sched"}  # what a *_core file of a daemon may include
CORE_USERS = {"plan"}  # may include the daemons' *_core.h

# Third-party headers and the only rooms whose .c and *_int.h files may see them.
HOMES = [
    (re.compile(r"^(ucp|ucs|uct|ucm)/"), {"transfer"}),
    (re.compile(r"^(nghttp2|openssl)/|^llhttp"), {"net"}),
    (re.compile(r"^(pcre2|utf8proc)"), {"text"}),
    (re.compile(r"^(cuda|cublas|nvtx|cooperative_groups)"), {"kernels"}),
    (re.compile(r"\.pb-c\.h$"), {"proto", "net"}),
]

# What a public header may include from outside the repository: the C library and POSIX, no more.
PUBLIC_OK = re.compile(
    r"^(assert|complex|ctype|errno|fenv|float|inttypes|limits|math|setjmp|signal|stdalign|stdarg|stdatomic|stdbool|"
    r"stddef|stdint|stdio|stdlib|string|time|wchar|pthread|poll|unistd)\.h$|^(sys|netinet|arpa)/[a-z_]+\.h$"
)
CORE_NO_IO = re.compile(r"^(uv|pthread|poll|unistd|fcntl|sys/.*|netinet/.*|arpa/.*)(\.h)?$")

BANNED = re.compile(r"(?<![\w.>])(v?sprintf|strcpy|strcat|strtok|atoi|atol|atoll|atof|gets|alloca|system)\s*\(")
HEAP = re.compile(r"(?<![\w.>])(malloc|calloc|realloc|reallocarray|aligned_alloc|posix_memalign|free|strdup|strndup)\s*\(")
ALLOW = re.compile(r"check: allow (\w+)")  # in a comment on the same line, with the reason after it

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)')
SOURCES = (".c", ".h", ".cu", ".cuh", ".cpp")
UNIQUE = SOURCES + (".py", ".sh")  # not .proto: gRPC fixes the names of its own
UNIQUE_NOT = {"__init__.py", "conftest.py"}
SKIP_DIRS = {"build", "node_modules", "__pycache__", "corpus", "fixtures"}

TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


def blank(text):
    """The text with comments and literals replaced by blanks, line breaks kept."""
    return TOKEN.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def walk(root):
    for folder, dirs, files in os.walk(root):
        dirs[:] = sorted(d for d in dirs if d not in SKIP_DIRS and not d.startswith("."))
        for name in sorted(files):
            yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


class Checker:
    def __init__(self, root):
        self.root = root
        self.found = []
        self.guards = {}

    def say(self, path, line, text):
        self.found.append(f"{path}:{line}: {text}" if line else f"{path}: {text}")

    def may_include(self, path, room, target):
        """None, or why the project header `target` may not be included by `path`."""
        to = target.split("/")[0]
        stem = os.path.splitext(os.path.basename(path))[0]
        if room in FREE_ROOMS:
            return None
        if to in FREE_ROOMS:
            return f"{room}/ may not include {to}/"
        if target.endswith("_int.h") and to != room:
            return f"{target} is private to {to}/"
        if room in DAEMONS and re.search(r"_core(_int)?$", stem):
            if to != room and to not in CORE_ROOMS:
                return f"a core may include {', '.join(sorted(CORE_ROOMS))} only, not {to}/"
        if to == room or to in ROOMS[room]:
            return None
        if room in CORE_USERS and to in DAEMONS:
            return None if target.endswith("_core.h") else f"{room}/ may include the daemons' cores only"
        return f"{room}/ may not include {to}/"

    def check_include(self, path, room, line, quoted, angled):
        name = quoted or angled
        public = path.endswith((".h", ".cuh")) and not re.search(r"_int\.\w+$", path) and room not in FREE_ROOMS
        stem = os.path.splitext(os.path.basename(path))[0]
        for pattern, homes in HOMES:
            if pattern.search(name):
                if room not in homes and room not in FREE_ROOMS:
                    self.say(path, line, f"{name} belongs to {', '.join(sorted(homes))} only")
                elif public:
                    self.say(path, line, f"{name} in a public header: move it to a .c or *_int.h file")
                return
        first = name.split("/")[0]
        if "/" in name and (first in ROOMS or first in FREE_ROOMS):
            why = self.may_include(path, room, name)
            if why:
                self.say(path, line, f"forbidden include {name}: {why}")
            if not os.path.exists(os.path.join(self.root, name)):
                self.say(path, line, f"{name} does not exist (includes start at the root)")
            return
        if quoted and room not in FREE_ROOMS:
            self.say(path, line, f'"{name}": write the path from the root, as in "{room}/{name}"')
        if public and not PUBLIC_OK.match(name):
            self.say(path, line, f"{name} in a public header: only the C library and POSIX may be")
        if room in DAEMONS and re.search(r"_core(_int)?$", stem) and CORE_NO_IO.match(name):
            self.say(path, line, f"{name}: a core does no I/O and has no threads")

    def check_order(self, path, room, includes):
        """The first include of x.c is x.h (or x_int.h), so that every header proves it stands alone."""
        own = path[: -len(".c")] + ".h"
        if path.endswith(".c") and room in ROOMS and os.path.exists(os.path.join(self.root, own)):
            if not includes or includes[0][1] not in (own, own[: -len(".h")] + "_int.h"):
                self.say(path, includes[0][0] if includes else 1, f"{own} must be the first include")

    def check_guard(self, path, text):
        m = re.search(r"^#ifndef (BT_\w+_H)\n#define (\w+)", text, re.M)
        if not m or m.group(1) != m.group(2):
            self.say(path, 1, "no include guard of the form BT_ROOM_FILE_H")
        elif m.group(1) in self.guards:
            self.say(path, 1, f"include guard {m.group(1)} is also in {self.guards[m.group(1)]}")
        else:
            self.guards[m.group(1)] = path

    def check_calls(self, path, room, text):
        raw = text.split("\n")
        for number, code in enumerate(blank(text).split("\n"), 1):
            found = BANNED.findall(code)
            if room != "base" and room not in ("tests", "tools"):
                found += HEAP.findall(code)
            for call in found:
                allowed = ALLOW.search(raw[number - 1])
                if not allowed or allowed.group(1) != call:
                    self.say(path, number, f"{call}() is banned here")

    def check_source(self, path):
        room = path.split("/")[0]
        if "/" not in path or room not in ROOMS and room not in FREE_ROOMS:
            self.say(path, 0, "in no known room: add the room to ROOMS in tools/check_layers.py and to the design")
            return
        with open(os.path.join(self.root, path), encoding="utf-8", errors="replace") as f:
            text = f.read()
        includes = []
        for number, ln in enumerate(text.split("\n"), 1):
            m = INCLUDE.match(ln)
            if m:
                includes.append((number, m.group(1) or m.group(2)))
                self.check_include(path, room, number, m.group(1), m.group(2))
        self.check_order(path, room, includes)
        if path.endswith((".h", ".cuh")):
            self.check_guard(path, text)
        self.check_calls(path, room, text)

    def run(self):
        names = collections.defaultdict(list)
        for path in walk(self.root):
            name = os.path.basename(path)
            if name.endswith(UNIQUE) and name not in UNIQUE_NOT:
                names[name].append(path)
            if name.endswith(SOURCES):
                self.check_source(path)
        for name, paths in sorted(names.items()):
            if len(paths) > 1:
                self.say(paths[0], 0, f"file name used again: {', '.join(paths[1:])}")
        return self.found


def main():
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", default=here, help="the repository (default: the one this script stands in)")
    found = Checker(parser.parse_args().root).run()
    for line in found:
        print(line)
    print(f"{len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
