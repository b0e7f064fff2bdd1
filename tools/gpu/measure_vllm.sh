#!/usr/bin/env bash
# Test and measure vLLM on GPUs: the contract tests against a real server, then tools/gpu/measure_vllm.py.
#
#     PYTHON=python3 bash tools/gpu/measure_vllm.sh one|two [OUTPUT_DIR] [--parts lora,ipc,transformers,library,disk]
#     CONTRACT=0 skips the contract tests, which take two minutes.
#
# Needs plumbob, its environment `lookup` and vLLM >= 0.25 importable by $PYTHON; the tests need pytest and hypothesis.
# Takes about seven minutes on one H200, three on two.
set -euo pipefail
. "$(dirname "$0")/server.sh"
python=${PYTHON:-python3}
gpus=${1:?one or two}
out=${2:-/tmp/vllm_gpu}
mkdir -p "$out"
# NVLink multicast stays off, because it can make shared GPUs unusable for other jobs.
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1

if [ "$gpus" = one ] && [ "${CONTRACT:-1}" = 1 ]; then
    port=8137
    $python -m plumbob.trainer.inference.vllm.vf_vllm --model tiny --port $port --dtype float32 --max-model-len 1024 --enforce-eager \
        --gpu-memory-utilization 0.2 >"$out/tiny.log" 2>&1 &
    server=$!
    trap 'kill $server 2>/dev/null || true' EXIT
    wait_for_server $port $server "$out/tiny.log"
    PLUMBOB_VLLM_FULL=1 PLUMBOB_VLLM_URL=http://127.0.0.1:$port $python -m pytest -q -s -p no:cacheprovider -o addopts=--import-mode=importlib \
        trainer/tests/inference/vllm/test_live.py || echo "the contract tests failed; measuring continues"
    kill $server
    wait $server 2>/dev/null || true
fi
$python tools/gpu/measure_vllm.py "$gpus" --out "$out" "${@:3}"
