#!/usr/bin/env bash
# The predecessor's defects on a pretrained model: a short SFT on MuSiQue, then GRPO from there with one thing changed each.
#
#     PYTHON=python3 bash tools/gpu/defects.sh sft MODEL_FOLDER OUT
#     PYTHON=python3 bash tools/gpu/defects.sh musique OUT/sft-10 OUT "all three of these"
#     PYTHON=python3 bash tools/gpu/defects.sh gsm8k MODEL_FOLDER OUT "loss mask given as the attention mask" GSM8K_FOLDER
#
# The changes are the arms of tools/bench/predecessor.py, which has their names. Trained is LoRA r16 at rate 5e-5; what `doctor`
# says before a run and after it is in OUT/RUN.before.json and OUT/RUN.after.json (DOCTOR=0 leaves the first out). SFT takes
# SFT_STEPS steps, so few that much is left to learn. STEPS, BATCH and EVAL set GRPO's steps, tasks a step and held-out tasks, SEED
# its seed. OPTIONS are more options of `train` and `doctor`, for example "--importance-correction none", and LABEL what they add to
# the run's name. Several parts can share a GPU. Needs plumbob, its environments and plumbob.testing importable by $PYTHON.
set -euo pipefail
python=${PYTHON:-python3}
part=${1:?sft, musique or gsm8k} model=${2:?a model folder} out=${3:?a folder for runs} arm=${4:-}
here=$(dirname "$0")/../bench
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
same=(--engine "${ENGINE:-paged}" --engine-memory "${ENGINE_MEMORY:-0.04}" --bf16 --peft --output-dir "$out" --microbatch-tokens 8192)
musique=(--datasets "synthetic,answerable,train[:600]" --eval-datasets "synthetic,answerable,validation[:128]"
    --max-tokens 256 --max-turns 8 --max-context 4096 --max-concurrent 256)
case $part in
sft)
    $python -c "from plumbob.trainer.cli.sft import main; main()" musique --model "$model" "${same[@]}" "${musique[@]}" \
        --demonstrations oracle --max-steps "${SFT_STEPS:-10}" --eval-examples 64 --run-name "sft-${SFT_STEPS:-10}"
    exit ;;
musique) run=(musique "${musique[@]}") ;;
gsm8k) run=(gsm8k --datasets "${5:?the folder of GSM8K}" --answer-style boxed --max-tokens 320 --max-context 1024 --max-concurrent 512) ;;
*) echo "the first argument is sft, musique or gsm8k, not $part" >&2; exit 2 ;;
esac
name="$part-$(tr A-Z a-z <<<"${arm:?an arm of tools/bench/predecessor.py}" | tr -c 'a-z0-9\n' -)${LABEL:+-$LABEL}-seed${SEED:-0}"
read -ra options <<<"${OPTIONS:-}"
run+=(--model "$model" "${same[@]}" --learning-rate 5e-5 --num-generations 8 --seed "${SEED:-0}" "${options[@]}")
one() { $python "$here/predecessor.py" --one "$arm" -- "$@"; }
mkdir -p "$out"
if [[ ${DOCTOR:-1} == 1 ]]; then one doctor "${run[@]}" --json >"$out/$name.before.json" || true; fi
one train "${run[@]}" --batch-size "${BATCH:-32}" --gradient-accumulation-steps 8 --max-steps "${STEPS:-24}" --eval-examples "${EVAL:-128}" \
    --save-steps 1000 --run-name "$name"
one doctor "$out/$name" --json >"$out/$name.after.json" || true
