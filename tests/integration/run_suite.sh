#!/usr/bin/env bash
# run_suite.sh FILE: runs one Python suite with the packages that tests/run.sh installed.
set -eu
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$root/build/venv/bin/python
if [ ! -x "$python" ]; then
    echo "run_suite.sh: $python is missing; tests/run.sh installs it" >&2
    exit 1
fi
export PYTHONDONTWRITEBYTECODE=1
exec "$python" -m pytest -q -rs -p no:cacheprovider --tb=short --durations=5 "$@"
