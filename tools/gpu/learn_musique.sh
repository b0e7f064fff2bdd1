#!/usr/bin/env bash
# Real MuSiQue questions with retrieval tools, from a model that does not use them: sft on oracle transcripts, then GRPO, with
# evaluations before, between and after on questions that nothing here trains on.
#
#     PYTHON=python3 bash tools/gpu/learn_musique.sh PART MODEL_FOLDER DATA [OUTPUT_DIR] [train's options]
#
# PART is one of base, sft, after-sft, grpo and after-grpo, which come in this order. DATA is a folder with musique.jsonl,
# 2wikimultihopqa.jsonl and hotpotqa.jsonl, in MuSiQue's schema. The last 145 of 545 records of musique.jsonl are held out. SFT
# sees the first 400 and 400 of 2WikiMultiHopQA, which come with a decomposition; GRPO sees 400 of HotpotQA as well.
# SEED, STEPS and NAME set GRPO's seed, steps and run name (with --trained-reward random: the control). Each run takes ENGINE_MEMORY of
# its GPU for keys and values: two runs share an H200 with 0.12 each. Needs plumbob and its environment `musique` importable by $PYTHON.
set -euo pipefail
python=${PYTHON:-python3}
part=${1:?base, sft, after-sft, grpo or after-grpo} model=${2:?a model folder} data=${3:?a folder of records} out=${4:-/tmp/learn_musique}
seed=${SEED:-0}
name=${NAME:-grpo-seed$seed}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
run() { $python -c "from plumbob.trainer.cli.$1 import main; main()" "${@:2}"; }
same=(musique --engine paged --bf16 --max-tokens 256 --max-turns 8 --max-context 6144 --max-concurrent 512
    --engine-memory "${ENGINE_MEMORY:-0.3}" --output-dir "$out")
shown="$data/musique.jsonl,,[:400];$data/2wikimultihopqa.jsonl,,[:400]"
trained=(--peft --eval-examples 0 --microbatch-tokens 16384)
evaluate() {  # MODEL NAME
    run evaluate "${same[@]}" --model "$1" -a datasets="$data/musique.jsonl,,[400:]" -n -1 -r 4 --temperature 1 \
        --pass-threshold 0.9 --run-name "$2"
}
case $part in
base) evaluate "$model" before ;;
sft) run sft "${same[@]}" "${trained[@]}" --model "$model" --datasets "$shown" --demonstrations oracle --num-epochs 2 --run-name sft ;;
after-sft) evaluate "$out/sft" after-sft ;;
grpo)
    run train "${same[@]}" "${trained[@]}" --model "$out/sft" --datasets "$shown;$data/hotpotqa.jsonl,,[:400]" --max-steps "${STEPS:-200}" \
        --num-generations 8 --batch-size 12 --gradient-accumulation-steps 8 --learning-rate 1e-4 --seed "$seed" --run-name "$name" "${@:5}"
    ;;
after-grpo) evaluate "$out/$name" "after-$name" ;;
*) echo "there is no part $part" >&2; exit 2 ;;
esac
