#!/usr/bin/env bash
# aarch64.sh FOLDER [--neon-only]: compiles the CPU kernels for AArch64 into FOLDER and runs their parity tests under qemu:
# NEON gives the bits of plain C. With --neon-only it sees that the NEON kernels compile. Skipped (77) without a cross
# compiler or an emulator. (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static)
set -eu
folder=$1
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cc=aarch64-linux-gnu-gcc
run=$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)
if ! command -v $cc >/dev/null || [ "${2:-}" != --neon-only ] && [ -z "$run" ]; then
    echo "aarch64.sh: skipped, needs $cc and qemu-aarch64"
    exit 77
fi
flags=(-std=gnu17 -O2 -Wall -Wextra -Wconversion -Werror -ffp-contract=off -D_GNU_SOURCE '-DBT_VERSION="test"' -I.)
mkdir -p "$folder"
if [ "${2:-}" = --neon-only ]; then
    exec $cc "${flags[@]}" -fsyntax-only kernels/cpu/isa_neon.c
fi
rm -f "$folder"/*.o "$folder/kernels.a"
for source in base/*.c kernels/*.c kernels/cpu/*.c; do
    case $source in
    */isa_avx* | */int8_avx* | *_plain_fma.c | */*_vnni.c | */*_avx512_bf16.c | */bf16_avx*) continue ;; # x86
    esac
    echo "$source"
done >"$folder/sources"
export folder
# shellcheck disable=SC2016 # the inner shell's variables
xargs -P "$(nproc)" -I{} sh -c 'source=$1; shift; exec "$@" -c "$source" -o "$folder/$(basename "$source" .c).o"' \
    sh {} $cc "${flags[@]}" <"$folder/sources"
aarch64-linux-gnu-ar rcs "$folder/kernels.a" "$folder"/*.o
for test in tests/parity/test_kernels_*.c; do
    name=$(basename "$test" .c)
    $cc "${flags[@]}" "$test" "$folder/kernels.a" -static -lm -lpthread -o "$folder/$name"
    echo "$name"
    "$run" "$folder/$name"
done
