#!/usr/bin/env bash
# Everything about the CUDA backend that needs a GPU, in under ten minutes and without a network: checks, then measurements.
# See gpu_check.py, or --help.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
