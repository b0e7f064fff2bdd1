#!/usr/bin/env bash
# The bundled policy on lookup through each engine of `evaluate`, vLLM's server among them, on one GPU.
#
#     PYTHON=python3 bash tools/gpu/evaluate_vllm.sh [OUTPUT_DIR]
#
# Needs plumbob with vLLM >= 0.25 importable by $PYTHON. Prints the tables and the paired comparison. Greedy scores should
# be the same for all engines where the arithmetic is the same (float32); sampled ones differ, for their random numbers do.
set -euo pipefail
. "$(dirname "$0")/server.sh"
python=${PYTHON:-python3}
out=${1:-/tmp/evaluate_vllm}
port=8123
mkdir -p "$out"
run() { $python -c "from plumbob.trainer.evaluation.$1 import main; main()" "${@:2}"; }

$python -m plumbob.trainer.vllm.serve --model tiny --port $port --dtype float32 --max-model-len 4096 \
    --gpu-memory-utilization 0.3 --sync disk --no-dev-endpoints \
    --enable-auto-tool-choice --tool-call-parser hermes >"$out/vllm.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
wait_for_server $port $server "$out/vllm.log"

url=http://127.0.0.1:$port/v1
common=(lookup --output-dir "$out" -n 256)
run cli "${common[@]}" --run-name transformers
run cli "${common[@]}" --run-name vllm --engine vllm --base-url $url
run cli "${common[@]}" --run-name openai --engine openai --base-url $url
run cli "${common[@]}" --run-name transformers-sampled -r 4
run cli "${common[@]}" --run-name vllm-sampled -r 4 --engine vllm --base-url $url
run analyze "$out"/{transformers,vllm,openai}/lookup.jsonl
run analyze "$out"/{transformers-sampled,vllm-sampled}/lookup.jsonl
run cli lookup --output-dir "$out" --run-name replayed --replay "$out/vllm-sampled/lookup.jsonl" | sed -n 1,4p
