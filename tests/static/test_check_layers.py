"""The checker itself: each rule fires on a small tree that breaks it, and a clean tree passes."""

import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def header(path, body=""):
    guard = "BT_" + path.upper().replace("/", "_").replace(".", "_")
    return f"#ifndef {guard}\n#define {guard}\n{body}\n#endif\n"


class CheckLayers(unittest.TestCase):
    def check(self, files):
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                    f.write(text)
            done = subprocess.run(
                [sys.executable, os.path.join(ROOT, "tools", "check_layers.py"), "--root", root],
                capture_output=True, text=True, check=False)
            return done.returncode, done.stdout

    def passes(self, files):
        code, out = self.check(files)
        self.assertEqual(code, 0, out)

    def fails(self, files, want):
        code, out = self.check(files)
        self.assertEqual(code, 1, out)
        self.assertIn(want, out)
        self.assertIn("1 findings", out)

    def test_clean(self):
        self.passes({
            "base/mem.h": header("base/mem.h", "#include <stddef.h>"),
            "base/mem.c": '#include "base/mem.h"\n#include <stdlib.h>\nvoid f(void *p) { free(p); }\n',
            "net/loop.c": '#include <uv.h>\n#include "base/mem.h"\n/* sprintf( in a comment */\n'
                          'const char *s = "system(";\nvoid g(void) { x->free(1); bt_free(2); strtok_r(3); }\n',
            "plan/sim.c": '#include "router/rt_core.h"\n',
            "router/rt_core.h": header("router/rt_core.h", '#include "sched/s.h"'),
            "sched/s.h": header("sched/s.h"),
            "tests/unit/net/test_loop.c": '#include <uv.h>\n#include "transfer/x_int.h"\nint f(void) { free(0); }\n',
            "transfer/x_int.h": header("transfer/x_int.h", "#include <ucp/api/ucp.h>"),
        })

    def test_forbidden_arrows(self):
        heads = {f"{r}/{r}_a.h": header(f"{r}/{r}_a.h") for r in
                 ("base", "engine", "model", "kernels", "transfer", "net", "decoded", "text", "sched")}
        for source, target in [("base", "net"), ("router", "engine"), ("router", "model"), ("router", "kernels"),
                               ("router", "transfer"), ("engine", "net"), ("transfer", "net"), ("sched", "model"),
                               ("prefilld", "decoded"), ("cli", "engine"), ("net", "text"), ("kernels", "model"),
                               ("plan", "decoded")]:
            self.fails({**heads, f"{source}/y.c": f'#include "{target}/{target}_a.h"\n'}, "forbidden include")

    def test_core(self):
        net = {"net/http.h": header("net/http.h")}
        self.fails({**net, "router/rt_core.c": '#include "net/http.h"\n'}, "a core may include")
        self.fails({"router/rt_core.c": "#include <uv.h>\n"}, "a core does no I/O")
        self.passes({**net, "router/rt_io.c": '#include "net/http.h"\n#include <uv.h>\n'})

    def test_headers(self):
        self.fails({"transfer/x.h": header("transfer/x.h", "#include <ucp/api/ucp.h>")}, "public header")
        self.fails({"net/x.h": header("net/x.h", "#include <uv.h>")}, "public header")
        self.fails({"net/x.c": "#include <ucp/api/ucp.h>\n"}, "belongs to transfer only")
        self.fails({"router/x.c": '#include "baton/v1/inference.pb-c.h"\n'}, "belongs to net, proto only")
        self.fails({"net/x.c": '#include "net/gone.h"\n'}, "does not exist")
        self.fails({"net/x.c": '#include "x_local.h"\n'}, "write the path from the root")
        self.fails({"base/a_int.h": header("base/a_int.h"), "net/x.c": '#include "base/a_int.h"\n'}, "is private to")
        self.fails({"base/a.h": "int x;\n"}, "no include guard")
        self.fails({"base/a.h": header("base/a.h"), "base/b.h": header("base/a.h")}, "is also in base/a.h")
        self.fails({"base/a.h": header("base/a.h"), "base/a.c": '#include <stdio.h>\n#include "base/a.h"\n'},
                   "must be the first include")

    def test_calls(self):
        for call in ("sprintf", "strcpy", "strcat", "strtok", "atoi", "gets", "alloca", "system"):
            self.fails({"base/x.c": f"void f(void) {{ {call}(0); }}\n"}, f"x.c:1: {call}() is banned here")
        for call in ("malloc", "calloc", "realloc", "free", "strdup"):
            self.fails({"net/x.c": f"\nvoid f(void) {{ {call}(0); }}\n"}, f"x.c:2: {call}() is banned here")
        self.passes({"net/x.c": "void f(void) { free(0); /* check: allow free, jansson gave it */ }\n"})
        self.fails({"net/x.c": "void f(void) { malloc(0); /* check: allow free */ }\n"}, "malloc() is banned")

    def test_names_and_rooms(self):
        self.fails({"net/x.c": "\n", "router/x.c": "\n"}, "file name used again: router/x.c")
        self.fails({"extra/x.c": "\n"}, "in no known room")
        self.passes({"build/x.c": "\n", "net/x.c": "\n", "net/CMakeLists.txt": "", "text/CMakeLists.txt": ""})


if __name__ == "__main__":
    unittest.main()
