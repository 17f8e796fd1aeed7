#!/usr/bin/env bash
# From a clone to a built Baton: installs what is missing with apt, then builds the `release` preset.
# Re-running is cheap: what is there is not touched.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps_only=no
test_deps=no
yes=no

usage() {
    cat <<'USAGE'
Usage: deploy/quickstart.sh [options]

  --deps-only   install what the build needs and stop
  --test-deps   also what the test suites of other languages need (node, npm)
  --yes         do not ask before using sudo
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
    fi
}

# Runs a command as root; asks first unless that is us already or --yes was given.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
        return
    fi
    have_command sudo || die "sudo is not installed; as root run: $*"
    if [ "$yes" != yes ]; then
        [ -t 0 ] || die "not on a terminal: give --yes to allow sudo, or as root run: $*"
        local answer
        read -r -p "Run with sudo: $* ? [y/N] " answer
        case $answer in
        y | Y | yes) ;;
        *) die "stopped; nothing was changed" ;;
        esac
    fi
    sudo "$@"
}

install_deps() {
    local missing left
    mapfile -t missing < <(missing_packages)
    if [ "${#missing[@]}" = 0 ]; then
        return
    fi
    have_command apt-get || die "missing (Debian's names): ${missing[*]}; there is no apt-get here to install them"
    say "Missing: ${missing[*]}"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q update
    mapfile -t missing < <(missing_packages | sed "s/^llhttp\$/$(llhttp_package)/")
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install "${missing[@]}"
    left=$(missing_packages | tr '\n' ' ')
    [ -z "$left" ] || die "still missing after the installation: $left(is this release too old?)"
}

# ---- build ----------------------------------------------------------------------------------------------------

build_release() {
    local generator=()
    if [ ! -e "$root/build/release/CMakeCache.txt" ] && have_command ninja; then
        generator=(-G Ninja)
    fi
    (cd "$root" && cmake --preset release "${generator[@]}" >/dev/null && cmake --build --preset release -j "$(nproc)")
}

main() {
    while [ $# -gt 0 ]; do
        case $1 in
        --deps-only) deps_only=yes ;;
        --test-deps) test_deps=yes ;;
        --yes) yes=yes ;;
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
    install_deps
    if [ "$deps_only" = yes ]; then
        exit 0
    fi
    build_release
    say "Built: $root/build/release/bin"
}

main "$@"
