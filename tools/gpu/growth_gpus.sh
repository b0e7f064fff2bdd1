#!/usr/bin/env bash
# How a GRPO step's time falls with the number of GPUs: the same steps on real GSM8K rows, on one GPU and then on two.
#
#     PYTHON=python3 bash tools/gpu/growth_gpus.sh MODEL_FOLDER GSM8K_FOLDER OUT [train's options]
#
# A step has 128 questions x 8 rollouts of at most 320 tokens, all weights, the paged engine in each process. GPUS="1 2" are the numbers
# of GPUs, STEPS=8 the steps of each. Prints medians, in seconds (growth_gpus.py, which also draws them).
set -euo pipefail
python=${PYTHON:-python3}
model=${1:?a model folder} data=${2:?a folder with train.jsonl and test.jsonl} out=${3:?a folder for runs}
# NVLink multicast stays off, because it can make shared GPUs unusable for other jobs.
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$out"
for n in ${GPUS:-1 2}; do
    devices=$(seq -s, 0 $((n - 1)))
    CUDA_VISIBLE_DEVICES=$devices timeout "${LIMIT:-240}" $python -m accelerate.commands.accelerate_cli launch --num-processes "$n" \
        -m plumbob.trainer gsm8k --datasets "$data" --answer-style boxed --model "$model" --engine paged --bf16 --learning-rate 2e-6 \
        --max-steps "${STEPS:-8}" --num-generations 8 --batch-size 128 --gradient-accumulation-steps $((8 / n)) --max-tokens 320 \
        --max-context 1024 --max-concurrent 1024 --eval-examples 0 --save-steps 1000 --no-report \
        --output-dir "$out" --run-name "gpus-$n" "${@:4}" >"$out/gpus-$n.log" 2>&1 || { tail -n 20 "$out/gpus-$n.log"; echo "GPUS $n failed"; }
done
$python "$(dirname "$0")/growth_gpus.py" "$out"
