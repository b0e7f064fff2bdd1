#!/usr/bin/env bash
# Two training steps with a vLLM server that the run starts, on a model whose tokenizer is as large as its vocabulary
# (SmolLM2, Llama 2, Mistral): the id after the last one would end such a server. Prints 0 assertions of the GPU last.
#
#     PYTHON=python3 bash tools/gpu/check_vocabulary.sh MODEL_FOLDER [OUTPUT_DIR]
#
# Needs plumbob, its environment `gsm8k` and vLLM >= 0.25 (0.25 with ray) importable by $PYTHON. Takes about two minutes on one H200.
set -euo pipefail
python=${PYTHON:-python3}
model=${1:?a model folder}
out=${2:-/tmp/check_vocabulary}
mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
$python -m plumbob.trainer gsm8k --datasets synthetic --model "$model" --engine vllm --bf16 --max-steps 2 --eval-examples 32 \
    --batch-size 32 --gradient-accumulation-steps 1 --max-tokens 128 --max-context 1024 --output-dir "$out" --run-name smoke
grep -c "index out of bounds" "$out/smoke/vllm.log" || true
