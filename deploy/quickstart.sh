#!/usr/bin/env bash
# From a clone to an answer: installs what is missing with apt, builds the `release` preset, starts a cluster on this
# machine, streams a sample prompt over both interfaces, and says how to go on. A second run takes seconds.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps_only=no
test_deps=no
cuda=no
yes=no
keep=no
device=0
kv_bytes=
node_options=()
model=
prompt='Why is the sky blue? Answer in two sentences.'
# Another one for gRPC: what was asked before is cached on both nodes, and nothing would be seen to move.
prompt_grpc='Name three large rivers, and say in one sentence for each which countries it flows through.'

usage() {
    cat <<'USAGE'
Usage: deploy/quickstart.sh [options]

  --deps-only   install what the build needs and stop
  --test-deps   also what the test suites need besides (node, npm, valgrind)
  --cuda        with the CUDA backend: its preset, on a device of this machine; needs nvcc of CUDA Toolkit 13.
                Fetches cuBLAS (430 MB) into build/cuda-wheels where the toolkit has none
  --device N    with --cuda: which device (default: 0, the first)
  --kv-dtype T  element type of the KV cache on both nodes: auto, f32, f16, bf16, fp8 (default: that of `baton up`)
  --kv-bytes SIZE
                memory for the KV cache of each node, like 8GiB (default: that of `baton up`; with --cuda 2GiB)
  --yes         do not ask before using sudo
  --keep        leave the cluster running until Ctrl-C
  --model PATH  serve this model (default: SmolLM2-135M-Instruct, fetched once)
  --prompt TEXT ask this
  --help        print this and exit

Debian 12 or newer, Ubuntu 24.04 or newer. Elsewhere it names what is missing.
USAGE
}

say() {
    printf '%s\n' "$*" >&2
}

die() {
    say "quickstart: $*"
    exit 1
}

# ---- dependencies ---------------------------------------------------------------------------------------------

have_command() {
    command -v "$1" >/dev/null 2>&1
}

have_module() {
    have_command pkg-config && pkg-config --exists "$1"
}

have_llhttp() {
    have_module libllhttp || [ -e /usr/include/llhttp.h ] || [ -e /usr/share/include/llhttp/llhttp.h ]
}

# libllhttp-dev where the release has it; before that its sources come inside node-llhttp.
llhttp_package() {
    if [ -n "$(apt-cache show --no-all-versions libllhttp-dev 2>/dev/null)" ]; then
        echo libllhttp-dev
    else
        echo node-llhttp
    fi
}

have_libc_headers() {
    echo '#include <stdio.h>' | cc -E -x c - >/dev/null 2>&1
}

# Prints the packages that are missing, one a line. It looks for the thing, not for the package, so that a
# UCX or compiler installed by hand counts.
missing_packages() {
    have_command cc && have_command gcc || echo gcc
    have_libc_headers || echo libc6-dev
    have_command cmake || echo cmake
    have_command ninja || echo ninja-build
    have_command pkg-config || echo pkg-config
    have_command protoc-c || echo protobuf-c-compiler
    have_module 'ucx >= 1.13' || echo libucx-dev
    have_module 'libprotobuf-c >= 1.3' || echo libprotobuf-c-dev
    have_module 'libuv >= 1.40' || echo libuv1-dev
    have_module 'libnghttp2 >= 1.43' || echo libnghttp2-dev
    have_module 'openssl >= 3.0' || echo libssl-dev
    have_module 'jansson >= 2.13' || echo libjansson-dev
    have_module 'libpcre2-8 >= 10.36' || echo libpcre2-dev
    have_module 'libutf8proc >= 2.4' || echo libutf8proc-dev
    have_llhttp || echo llhttp
    have_command python3 || echo python3
    python3 -c 'import ensurepip' 2>/dev/null || echo python3-venv
    python3 -m pip --version >/dev/null 2>&1 || echo python3-pip
    have_command curl || echo curl
    [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
    if [ "$test_deps" = yes ]; then
        have_command node || echo nodejs
        have_command npm || echo npm
        have_command valgrind || echo valgrind
    fi
}

# How to do by hand what this script may not do. Before its first update apt does not know the name of every package.
by_hand() {
    local packages=("${missing[@]/#llhttp/$(llhttp_package)}")
    say "Install these as root, then run this again:"
    say "  apt-get update && apt-get install --no-install-recommends ${packages[*]}"
    [ -n "$(apt-cache show --no-all-versions cmake 2>/dev/null)" ] || say "  (node-llhttp: libllhttp-dev where there is one)"
}

# Makes sure that as_root may act: we are root, or there is sudo and the user agrees.
ask_for_root() {
    if [ "$(id -u)" = 0 ]; then
        return
    fi
    if ! have_command sudo; then
        by_hand
        die "not root, and sudo is not installed"
    fi
    if [ "$yes" = yes ]; then
        return
    fi
    if [ ! -t 0 ]; then
        by_hand
        die "not on a terminal, so nobody can be asked: --yes allows sudo"
    fi
    local answer=
    read -r -p "Install them with sudo apt-get? [y/N] " answer || true
    case $answer in
    [yY] | [yY][eE][sS]) ;;
    *)
        by_hand
        die "stopped; nothing was changed"
        ;;
    esac
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo "$@"
    fi
}

install_deps() {
    local missing left
    mapfile -t missing < <(missing_packages)
    if [ "${#missing[@]}" = 0 ]; then
        return
    fi
    have_command apt-get || die "missing (Debian's names): ${missing[*]}; there is no apt-get here to install them"
    say "Missing: ${missing[*]}"
    ask_for_root
    local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q)
    if ! as_root "${apt[@]}" update; then
        by_hand
        die "apt-get update failed: its messages are above"
    fi
    mapfile -t missing < <(missing_packages | sed "s/^llhttp\$/$(llhttp_package)/")
    if ! as_root "${apt[@]}" -y --no-install-recommends install "${missing[@]}"; then
        by_hand
        die "apt-get install failed: its messages are above; does this machine reach a package mirror?"
    fi
    left=$(missing_packages | tr '\n' ' ')
    [ -z "$left" ] || die "still missing after the installation: $left(is this release too old?)"
}

# Where the CUDA toolkit lies; nvcc itself may be a script somewhere else.
cuda_toolkit() {
    nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p'
}

# cuBLAS: of the toolkit, else pinned wheel, unpacked where cmake looks for it (cmake/BatonCuda.cmake).
install_cuda() {
    local list=$root/deploy/cuda-requirements.txt wheels=$root/build/cuda-wheels top
    nvcc --version 2>/dev/null | grep -q "release 13" ||
        die "--cuda: there is no nvcc of CUDA Toolkit 13 in PATH; NVIDIA's packages have it (cuda-nvcc-13-0, cuda-cudart-dev-13-0 and newer)"
    top=$(cuda_toolkit)
    if [ -e "$top/include/cublasLt.h" ] || compgen -G "$top/targets/*/include/cublasLt.h" >/dev/null; then
        return
    fi
    if [ -e "$wheels/.installed" ] && [ "$(cat "$wheels/.installed")" = "$(sha256sum <"$list")" ]; then
        return
    fi
    say "The CUDA toolkit has no cuBLAS: fetching $(tr '\n' ' ' <"$list")into build/cuda-wheels"
    rm -rf "$wheels"
    # Without what it depends on: a compiler at run time that products do not need.
    if ! PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$wheels" -r "$list" >&2; then
        say "Without it the CUDA backend builds too, with its own kernels only. To bring it from another machine:"
        say "  pip download --no-deps -r deploy/cuda-requirements.txt    there, and here, with the wheel:"
        say "  pip install --no-deps --target build/cuda-wheels nvidia_cublas-*.whl"
        die "pip install failed: its messages are above; does this machine reach PyPI?"
    fi
    sha256sum <"$list" >"$wheels/.installed"
}

# ---- build ----------------------------------------------------------------------------------------------------

programs=(baton baton-router baton-prefilld baton-decoded)

# The programs alone: the tests, which tests/run.sh builds, would take as long again.
build_programs() {
    local generator=() preset=release
    if [ "$cuda" = yes ]; then
        preset=cuda
        programs+=(bench-engine)
    fi
    bin=$root/build/$preset/bin
    if [ ! -e "$root/build/$preset/CMakeCache.txt" ]; then
        say "Building, once: $([ "$cuda" = yes ] && echo "some ten minutes" || echo "about a minute") on two cores"
        have_command ninja && generator=(-G Ninja)
    fi
    # What ptxas says of every kernel is for those who work on them.
    (cd "$root" && configured=$(cmake --preset "$preset" "${generator[@]}") &&
        { grep 'cuBLAS' <<<"$configured" >&2 || true; } &&
        cmake --build --preset "$preset" -j "$(nproc)" --target "${programs[@]}" > >(grep -v -e '^ptxas' -e 'bytes stack frame' >&2))
}

# Asks the backend itself, with the smallest model there is.
find_device() {
    local answer
    if ! answer=$("$bin/bench-engine" --backend cuda --device "$device" --prefill 1 --decode 0 --repeat 1 "$root/tests/golden/models/llama" 2>&1); then
        say "$answer"
        die "built, in build/cuda, but it cannot run here: the message above says why"
    fi
}

bin=

# Here rather than in `baton up`, whose output passes through tee: pip shows its progress on a terminal only.
find_model() {
    if [ -z "$model" ]; then
        model=$("$bin/baton" fetch) || exit 1
    fi
}

# ---- a cluster ------------------------------------------------------------------------------------------------

up_pid=
work=

stop_cluster() {
    if [ -n "$up_pid" ] && kill -0 "$up_pid" 2>/dev/null; then
        kill -INT "$up_pid"
        wait "$up_pid" || true
    fi
    [ -z "$work" ] || rm -rf "$work"
}

# Starts `baton up` and waits until it says where it listens.
start_cluster() {
    local port=0
    # With --keep the port that README.md and the options' defaults name, if nobody listens there.
    if [ "$keep" = yes ] && ! (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; then
        port=8000
    fi
    work=$(mktemp -d)
    trap stop_cluster EXIT
    [ "$cuda" = no ] || node_options+=(--backend cuda --device "$device")
    [ "$cuda" = no ] || kv_bytes=${kv_bytes:-2GiB} # which the backend wants to be told
    [ -z "$kv_bytes" ] || node_options+=(--kv-bytes "$kv_bytes")
    # A session of its own, and a deaf tee: Ctrl-C must reach the cluster through us alone, and its last words us.
    setsid "$bin/baton" up --listen "127.0.0.1:$port" --model "$model" "${node_options[@]}" 2> >(tee -i "$work/log" >&2) </dev/null &
    up_pid=$!
    local tries=0
    until server=$(sed -n 's#.*ready.* on http://\([^:]*:[0-9]*\).*#\1#p' "$work/log" 2>/dev/null | head -n 1) && [ -n "$server" ]; do
        kill -0 "$up_pid" 2>/dev/null || die "the cluster did not start; its messages are above"
        tries=$((tries + 1))
        [ "$tries" -lt 6000 ] || die "the cluster was not ready after 10 minutes"
        sleep 0.1
    done
}

# A question over OpenAI HTTP, streamed, printed as it comes.
ask_http() {
    python3 - "$server" "$prompt" <<'PY'
import json, sys, urllib.request
server, prompt = sys.argv[1:]
body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 64, "temperature": 0, "stream": True}
req = urllib.request.Request(f"http://{server}/v1/chat/completions", json.dumps(body).encode(),
                             {"content-type": "application/json"})
with urllib.request.urlopen(req) as answer:
    for line in answer:
        line = line.strip()
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            for choice in json.loads(line[6:])["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
print()
PY
}

show_answers() {
    say ""
    say "-- OpenAI HTTP, streamed: POST http://$server/v1/chat/completions"
    say "> $prompt"
    ask_http
    say ""
    say "-- gRPC, streamed: baton.v1.Inference/Generate, with timings"
    say "> $prompt_grpc"
    "$bin/baton" complete --server "$server" --chat --max-tokens 64 --temperature 0 --timings "$prompt_grpc"
}

# As a shell wants it typed; short where the shell is in the clone.
show_command() {
    local path=$bin/baton
    [ "$PWD" != "$root" ] || path=${bin#"$root/"}/baton
    printf '  %q %s\n' "$path" "$1" >&2
}

show_next_steps() {
    say ""
    say "Go on:"
    show_command "up        # the cluster, on 127.0.0.1:8000; or: deploy/quickstart.sh --keep"
    show_command "chat      # in another terminal"
    show_command "status"
    say "  README.md has the rest."
}

keep_running() {
    local to=
    [ "$server" = 127.0.0.1:8000 ] || to=" --server $server"
    say ""
    say "The cluster stays up on http://$server until Ctrl-C; its dashboard is there. In another terminal:"
    show_command "chat$to"
    show_command "status$to"
    trap 'exit 0' INT TERM
    wait "$up_pid" || true
}

main() {
    while [ $# -gt 0 ]; do
        case $1 in
        --deps-only) deps_only=yes ;;
        --test-deps) test_deps=yes ;;
        --cuda) cuda=yes ;;
        --yes) yes=yes ;;
        --keep) keep=yes ;;
        --model | --prompt | --device | --kv-dtype | --kv-bytes)
            [ $# -ge 2 ] || die "$1 needs a value"
            case $1 in
            --model) model=$2 ;;
            --prompt) prompt=$2 prompt_grpc=$2 ;;
            --device) device=$2 ;;
            --kv-bytes) kv_bytes=$2 ;;
            --kv-dtype) node_options+=("$1" "$2") ;;
            esac
            shift
            ;;
        --help | -h)
            usage
            exit 0
            ;;
        *)
            usage >&2
            die "unknown option $1"
            ;;
        esac
        shift
    done
    if [ -n "$model" ]; then
        [ -e "$model" ] || die "--model $model: no such file or directory"
        model=$(realpath "$model")
    fi
    install_deps
    [ "$cuda" = no ] || install_cuda
    if [ "$deps_only" = yes ]; then
        exit 0
    fi
    build_programs
    [ "$cuda" = no ] || find_device
    find_model
    start_cluster
    show_answers
    if [ "$keep" = yes ]; then
        keep_running
    else
        show_next_steps
    fi
}

main "$@"
