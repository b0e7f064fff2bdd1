#!/usr/bin/env bash
# GRPO on real GSM8K rows with a pretrained model, all weights or LoRA: held-out accuracy on all test rows before -> after.
#
#     PYTHON=python3 bash tools/gpu/learn_gsm8k.sh full|lora MODEL_FOLDER GSM8K_FOLDER [OUTPUT_DIR] [train's options]
#
# GSM8K_FOLDER holds train.jsonl and test.jsonl. Needs plumbob and its environment `gsm8k` importable by
# $PYTHON. 48 steps of 128 tasks x 8 rollouts take about six minutes on one H200 for a model of 0.5 billion parameters.
set -euo pipefail
python=${PYTHON:-python3}
arm=${1:?full or lora} model=${2:?a model folder} data=${3:?a folder with train.jsonl and test.jsonl}
out=${4:-/tmp/learn_gsm8k}
case $arm in
full) trained=(--learning-rate 2e-6) ;;
lora) trained=(--peft --learning-rate 5e-5) ;;
*) echo "the first argument is full or lora, not $arm" >&2; exit 2 ;;
esac
mkdir -p "$out"
unset PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
$python -m plumbob.trainer gsm8k --datasets "$data" --answer-style boxed --model "$model" --engine "${ENGINE:-paged}" --bf16 \
    --max-steps 48 --num-generations 8 --batch-size 128 --gradient-accumulation-steps 8 --max-tokens 320 --max-context 1024 \
    --max-concurrent 1024 --eval-examples 1319 --seed "${SEED:-0}" \
    --output-dir "$out" --run-name "$arm-seed${SEED:-0}" "${trained[@]}" "${@:5}"
