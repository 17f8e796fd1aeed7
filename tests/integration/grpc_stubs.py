"""Python stubs generated from proto/ when a suite starts, as any user of grpcio would make them."""

import importlib
import os
import sys
import tempfile

from grpc_tools import protoc

from cluster import ROOT

_folder = tempfile.TemporaryDirectory(prefix="baton-stubs-")
PROTO = os.path.join(ROOT, "proto")


def load(package="v1", name="inference"):
    """(messages, stubs) of baton.v1.Inference, or of another file under proto/baton."""
    arguments = ["protoc", f"--proto_path={PROTO}", f"--python_out={_folder.name}", f"--grpc_python_out={_folder.name}",
                 os.path.join(PROTO, "baton", package, f"{name}.proto")]
    assert protoc.main(arguments) == 0
    if _folder.name not in sys.path:
        sys.path.insert(0, _folder.name)
    module = f"baton.{package.replace('/', '.')}.{name}_pb2"
    importlib.invalidate_caches()
    return importlib.import_module(module), importlib.import_module(module + "_grpc")
