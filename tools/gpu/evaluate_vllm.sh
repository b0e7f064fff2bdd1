#!/usr/bin/env bash
# Evaluate the bundled policy on lookup with each engine of `evaluate` (transformers, vllm, openai), on one GPU.
#
#     PYTHON=python3 bash tools/gpu/evaluate_vllm.sh [OUTPUT_DIR]
#
# Needs plumbob and vLLM >= 0.25 importable by $PYTHON. Prints the tables and the paired comparison. In float32, where
# the arithmetic agrees, `transformers` and `vllm` should have the same greedy scores; sampled scores differ because the
# random numbers differ.
set -euo pipefail
. "$(dirname "$0")/server.sh"
python=${PYTHON:-python3}
out=${1:-/tmp/evaluate_vllm}
port=8123
mkdir -p "$out"
run() { $python -c "from plumbob.trainer.cli.$1 import main; main()" "${@:2}"; }

$python -m plumbob.trainer.inference.vllm.vf_vllm --model tiny --port $port --dtype float32 --max-model-len 4096 \
    --gpu-memory-utilization 0.3 --sync disk --no-dev-endpoints \
    --enable-auto-tool-choice --tool-call-parser hermes >"$out/vllm.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
wait_for_server $port $server "$out/vllm.log"

url=http://127.0.0.1:$port/v1
common=(lookup --output-dir "$out" -n 256)
run evaluate "${common[@]}" --run-name transformers --engine transformers
run evaluate "${common[@]}" --run-name vllm --engine vllm --base-url $url
run evaluate "${common[@]}" --run-name openai --engine openai --base-url $url
run evaluate "${common[@]}" --run-name transformers-sampled --engine transformers -r 4
run evaluate "${common[@]}" --run-name vllm-sampled -r 4 --engine vllm --base-url $url
run analyze "$out"/{transformers,vllm,openai}/lookup.jsonl
run analyze "$out"/{transformers-sampled,vllm-sampled}/lookup.jsonl
run evaluate lookup --output-dir "$out" --run-name replayed --replay "$out/vllm-sampled/lookup.jsonl" | sed -n 1,4p
