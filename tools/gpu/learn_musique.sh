#!/usr/bin/env bash
# MuSiQue with retrieval tools, from a model that does not use them: evaluate, sft on oracle transcripts, evaluate, GRPO,
# evaluate. Evaluations are on questions that neither saw.
#
#     PYTHON=python3 bash tools/gpu/learn_musique.sh PART MODEL_FOLDER RECORDS.jsonl [OUTPUT_DIR] [train's options]
#
# PART is all, or one of base, sft, after-sft, grpo and after-grpo, which come in this order.
# RECORDS.jsonl: real records in the official schema; the first 50 are trained on, the others are held out. The rest of the
# training questions is synthetic. SFT_STEPS ends SFT early, so that more is left to learn. SEED and STEPS set GRPO's seed and
# steps, NAME its run's name, CONCURRENT how many rollouts run at once, ENGINE_MEMORY the share of the GPU for keys and values
# (several parts can share a GPU, with 0.1 each). Needs plumbob and its environment `musique` importable by $PYTHON.
set -euo pipefail
python=${PYTHON:-python3}
part=${1:?a part, or all} model=${2:?a model folder} records=${3:?a file of real records} out=${4:-/tmp/learn_musique}
seed=${SEED:-0}
name=${NAME:-grpo-seed$seed}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
run() { $python -c "from plumbob.trainer.cli.$1 import main; main()" "${@:2}"; }
same=(--engine paged --bf16 --max-tokens 256 --max-turns 8 --max-context 4096 --max-concurrent "${CONCURRENT:-512}"
    --engine-memory "${ENGINE_MEMORY:-0.4}")
train_on="synthetic,answerable,train[:600];$records,,[:50]"
held_out="synthetic,answerable,validation[:64];$records,,[50:]"
until=(--num-epochs 2)
if [[ -n ${SFT_STEPS:-} ]]; then until=(--max-steps "$SFT_STEPS"); fi
trained=(--datasets "$train_on" --eval-datasets "$held_out" --peft --output-dir "$out")

evaluate() {  # MODEL NAME
    for data in "synthetic,answerable,validation[64:264]" "$records,,[50:]"; do
        run evaluate musique --model "$1" "${same[@]}" -a datasets="$data" -n -1 -r 4 --temperature 1 --pass-threshold 0.9 \
            --output-dir "$out" --run-name "$2-$([[ $data == synthetic* ]] && echo synthetic || echo real)"
    done
}

case $part in all | base | sft | after-sft | grpo | after-grpo) ;; *) echo "there is no part $part" >&2; exit 2 ;; esac
if [[ $part == base || $part == all ]]; then
    evaluate "$model" before
fi
if [[ $part == sft || $part == all ]]; then
    run sft musique --model "$model" "${same[@]}" "${trained[@]}" --demonstrations oracle "${until[@]}" --eval-examples 64 \
        --log-completions 1 --run-name sft
fi
if [[ $part == after-sft || $part == all ]]; then
    evaluate "$out/sft" after-sft
fi
if [[ $part == grpo || $part == all ]]; then
    $python -m plumbob.trainer musique --model "$out/sft" "${same[@]}" "${trained[@]}" --max-steps "${STEPS:-40}" --num-generations 8 \
        --batch-size 32 --gradient-accumulation-steps 8 --learning-rate 5e-5 --eval-examples 64 --seed "$seed" --run-name "$name" "${@:5}"
fi
if [[ $part == after-grpo || $part == all ]]; then
    evaluate "$out/$name" "after-$name"
fi
