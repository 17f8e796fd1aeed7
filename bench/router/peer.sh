#!/usr/bin/env bash
# The load of bench-router through sglang-router, whose HTTP workers bench-router plays.
# peer.sh MODEL MODE [options of bench-router]; MODE: regular (one worker a request) or pd (a prefill and a decode worker).
# PYTHON: an interpreter whose environment has sglang-router from PyPI; BENCH: bench-router; RUN: a command in front of both.
set -eu

MODEL=$1 MODE=$2
shift 2
PORT=18100 LISTEN=18090 PREFILL=4 DECODE=32
args=()
if [ "$MODE" = pd ]; then
    args+=(--pd-disaggregation)
    for ((i = 0; i < PREFILL; i++)); do args+=(--prefill "http://127.0.0.1:$((PORT + i))" none); done
    for ((i = 0; i < DECODE; i++)); do args+=(--decode "http://127.0.0.1:$((PORT + PREFILL + i))"); done
else
    args+=(--worker-urls)
    for ((i = 0; i < DECODE; i++)); do args+=("http://127.0.0.1:$((PORT + PREFILL + i))"); done
fi
# Nothing that the other router does besides passing answers on: no retries, no queue, round robin.
${RUN:-} "${PYTHON:-python3}" -m sglang_router.launch_router --host 127.0.0.1 --port $LISTEN --policy round_robin \
    --log-level error --max-concurrent-requests 100000 --queue-size 10000 --prometheus-port $((LISTEN + 1)) \
    --worker-startup-check-interval 1 --disable-retries --disable-circuit-breaker "${args[@]}" &
peer=$!
trap 'kill $peer' EXIT
sleep 3 # its Python part starts; it then asks its workers again each second
${RUN:-} "${BENCH:-build/release/bin/bench-router}" --model "$MODEL" --server 127.0.0.1:$LISTEN --pid $peer \
    --workers-port $PORT --prefill $PREFILL --decode $DECODE --warmup 8 "$@"
