#!/usr/bin/env bash
# Builds llama.cpp's own server, which PyPI's source package of llama-cpp-python contains, for this CPU, into build/peers. For
# bench/mixed.py. Takes minutes; progress is shown.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PEER_VERSION=${PEER_VERSION:-0.3.36}
peers=build/peers
source=$peers/llama_cpp_python-$PEER_VERSION
mkdir -p $peers
if [ ! -d "$source" ]; then
    [ -x $peers/venv/bin/python ] || python3 -m venv $peers/venv
    $peers/venv/bin/pip download --quiet --no-deps --no-binary llama-cpp-python -d $peers "llama-cpp-python==$PEER_VERSION"
    tar -xzf "$source.tar.gz" -C $peers
fi
generator=()
if command -v ninja >/dev/null; then
    generator=(-G Ninja)
fi
cmake -S "$source/vendor/llama.cpp" -B $peers/server-build "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
    -DLLAMA_OPENSSL=OFF >/dev/null
cmake --build $peers/server-build --target llama-server -j "$(nproc)"
echo "$peers/server-build/bin/llama-server"
