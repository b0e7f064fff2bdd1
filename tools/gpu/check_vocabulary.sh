#!/usr/bin/env bash
# Two training steps with a vLLM server that the run starts, on a model whose tokenizer is as large as its vocabulary
# (SmolLM2, Llama 2, Mistral): the id after the last one would end such a server. Then the contract tests.
#
#     PYTHON=python3 bash tools/gpu/check_vocabulary.sh MODEL_FOLDER [OUTPUT_DIR]
#
# Needs plumbob, its environment `gsm8k` and vLLM >= 0.25 importable by $PYTHON. Takes about three minutes on one H200.
set -euo pipefail
. "$(dirname "$0")/server.sh"
python=${PYTHON:-python3}
model=${1:?a model folder}
out=${2:-/tmp/check_vocabulary}
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
$python -m plumbob.trainer gsm8k --datasets synthetic --model "$model" --engine vllm --bf16 --max-steps 2 --eval-examples 32 \
    --batch-size 32 --gradient-accumulation-steps 1 --max-tokens 128 --max-context 1024 --output-dir "$out" --run-name smoke
grep -c "index out of bounds" "$out/smoke/vllm.log" || true
port=8137
$python -m plumbob.trainer.inference.vllm.vf_vllm --model tiny --port $port --dtype float32 --max-model-len 1024 --enforce-eager \
    --gpu-memory-utilization 0.2 >"$out/tiny.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
wait_for_server $port $server "$out/tiny.log"
PLUMBOB_VLLM_FULL=1 PLUMBOB_VLLM_URL=http://127.0.0.1:$port $python -m pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib \
    trainer/tests/inference/vllm/test_live.py
