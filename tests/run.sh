#!/usr/bin/env bash
# Installs what the tests need, builds the `release` preset, runs every suite; the last thing printed is ctest's
# summary.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
long=no
ctest_args=()

usage() {
    cat <<'USAGE'
Usage: tests/run.sh [options] [-- ctest options]

  --long   also the tests labelled long; fetches the model that the quickstart serves
  --help   print this and exit

JOBS=N sets how many tests run at once (default: one for each CPU, at most 4).
Example: tests/run.sh -- -R base_
USAGE
}

while [ $# -gt 0 ]; do
    case $1 in
    --long) long=yes ;;
    --help | -h)
        usage
        exit 0
        ;;
    --)
        shift
        ctest_args=("$@")
        break
        ;;
    *)
        usage >&2
        echo "tests/run.sh: unknown option $1" >&2
        exit 2
        ;;
    esac
    shift
done

# Skips a step whose input files are unchanged since it last succeeded: stamp FILE INPUT...
fresh() {
    local stamp=$1
    shift
    [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$(sha256sum "$@")" ]
}

# Python packages of the static checks and the integration suites: build/venv.
install_python() {
    local lists
    mapfile -t lists < <(ls tools/requirements.txt tests/integration/requirements.txt 2>/dev/null)
    local stamp=build/venv/.installed
    if fresh "$stamp" "${lists[@]}"; then
        return
    fi
    echo "tests: installing ${lists[*]} into build/venv"
    python3 -m venv build/venv
    build/venv/bin/python -m pip install --quiet --disable-pip-version-check "${lists[@]/#/-r}"
    sha256sum "${lists[@]}" >"$stamp"
}

# Node packages of the integration suites: build/node/node_modules.
install_node() {
    local from=tests/integration
    local stamp=build/node/.installed
    if [ ! -e "$from/package-lock.json" ] || fresh "$stamp" "$from/package.json" "$from/package-lock.json"; then
        return
    fi
    echo "tests: installing $from/package-lock.json into build/node"
    mkdir -p build/node
    cp "$from/package.json" "$from/package-lock.json" build/node/
    (cd build/node && npm ci --silent --no-audit --no-fund)
    sha256sum "$from/package.json" "$from/package-lock.json" >"$stamp"
}

deps=(--deps-only)
if [ -e tests/integration/package-lock.json ]; then
    deps+=(--test-deps)
fi
deploy/quickstart.sh "${deps[@]}"
install_python
install_node

cpus=$(nproc)
generator=()
if [ ! -e build/release/CMakeCache.txt ] && command -v ninja >/dev/null; then
    generator=(-G Ninja)
fi
cmake --preset release "${generator[@]}" >/dev/null
cmake --build --preset release -j "$cpus"

if [ "$long" = no ]; then
    ctest_args+=(-LE '^long$')
elif [ -z "${BATON_SMOLLM2_GGUF:-}" ]; then
    # The small real model, where the quickstart has it too.
    if model=$(build/release/bin/baton fetch); then
        export BATON_SMOLLM2_GGUF=$model
    else
        echo "tests: without that model its suites are skipped" >&2
    fi
fi
exec ctest --test-dir build/release --output-on-failure --no-tests=error \
    -j "${JOBS:-$((cpus < 4 ? cpus : 4))}" "${ctest_args[@]}"
