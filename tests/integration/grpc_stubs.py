"""Python stubs generated from proto/ when a suite starts, as any user of grpcio would make them."""

import importlib
import os
import sys
import tempfile

from grpc_tools import protoc

from cluster import ROOT

_folder = tempfile.TemporaryDirectory(prefix="baton-stubs-")
PROTO = os.path.join(ROOT, "proto")


def load():
    """(messages, stubs) of baton.v1.Inference"""
    arguments = ["protoc", f"--proto_path={PROTO}", f"--python_out={_folder.name}", f"--grpc_python_out={_folder.name}",
                 os.path.join(PROTO, "baton", "v1", "inference.proto")]
    assert protoc.main(arguments) == 0
    sys.path.insert(0, _folder.name)
    return importlib.import_module("baton.v1.inference_pb2"), importlib.import_module("baton.v1.inference_pb2_grpc")
