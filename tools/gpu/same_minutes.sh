#!/usr/bin/env bash
# What the same minutes bring on GSM8K: plumbob's 48 steps on one GPU, TRL's steps that fit into that time on another, side by side.
#
#     PYTHON=python3 GPU=0 bash tools/gpu/same_minutes.sh plumbob MODEL GSM8K OUT &
#     PYTHON=python3 GPU=1 bash tools/gpu/same_minutes.sh trl MODEL GSM8K OUT; wait
#
# Both train all weights on 128 tasks x 8 rollouts of at most 320 tokens a step. plumbob's time holds its start and its evaluations of
# 1,319 test rows before and after; TRL's holds its start, its steps and saving the model, which plumbob then evaluates in the same
# way. STEPS are TRL's, 8 if not set. Prints `MINUTES part seconds`. TRL's part needs TRL 1.16 and vLLM.
set -euo pipefail
python=${PYTHON:-python3}
part=${1:?plumbob or trl} model=${2:?a model folder} data=${3:?a folder with train.jsonl and test.jsonl} out=${4:?a folder for runs}
here=$(dirname "$0")
mkdir -p "$out"
began=$SECONDS
case $part in
plumbob)
    CUDA_VISIBLE_DEVICES=${GPU:-0} bash "$here/learn_gsm8k.sh" full "$model" "$data" "$out" --run-name same-minutes
    echo "MINUTES plumbob $((SECONDS - began)) s" ;;
trl)
    $python "$here/../bench/grpo_step.py" "$model" "$data" --arms trl-vllm --gpus "${GPU:-0}" --steps "${STEPS:-8}" --out "$out/trl-steps" \
        --trl-save "$out/trl-model" --limit "${LIMIT:-580}"
    echo "MINUTES trl $((SECONDS - began)) s"
    for sampled in 0 1; do
        CUDA_VISIBLE_DEVICES=${GPU:-0} HF_HUB_OFFLINE=1 $python -c "from plumbob.trainer.cli.evaluate import main; main()" gsm8k \
            --model "$out/trl-model" --datasets "$data" -a answer_style=boxed -n -1 --temperature $sampled --max-tokens 320 \
            --max-context 1024 --max-concurrent 1024 --engine paged --bf16 --output-dir "$out" --run-name "trl-temperature-$sampled"
    done ;;
*) echo "the first argument is plumbob or trl, not $part" >&2; exit 2 ;;
esac
