#!/usr/bin/env bash
# From the command to the end of the first step: the parts in seconds, without compiled code and then with it.
#
#     PYTHON=python3 bash tools/gpu/first_step.sh 1.5b TOKENIZER_FOLDER GSM8K_FOLDER [OUTPUT_DIR] [train's options]
#
# The first argument is a shape of tools/gpu/shapes.py: the model has random weights, in a step of 128 x 8 rollouts of up to 320
# tokens, by default with LoRA, and random rewards, without which nothing would be trained. Files that the first run reads stay in
# memory for the second one. Two minutes on one H200.
set -euo pipefail
python=${PYTHON:-python3}
shape=${1:?a shape, as 1.5b} tokenizer=${2:?a folder with a tokenizer} data=${3:?a folder with train.jsonl} out=${4:-/tmp/first_step}
mkdir -p "$out"
[ -d "$out/model" ] || $python tools/gpu/shapes.py "$shape" "$tokenizer" "$out/model"
unset PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TORCHINDUCTOR_CACHE_DIR=$out/compiled
unset TRITON_CACHE_DIR
rm -rf "$out/compiled" "$out/cold" "$out/warm"
for caches in cold warm; do
    SECONDS=0
    $python -m plumbob.trainer gsm8k --datasets "$data" --model "$out/model" --engine paged --bf16 --max-steps 1 --num-generations 8 \
        --batch-size 128 --gradient-accumulation-steps 8 --max-tokens 320 --max-context 1024 --max-concurrent 1024 \
        --eval-examples 0 --trained-reward random --output-dir "$out" --run-name $caches --peft "${@:5}"
    echo "$caches: the whole command took $SECONDS s"
    cat "$out/$caches/start.json"
    ls "$out"/compiled/plumbob 2>/dev/null | sed 's/^/compiled beforehand: /'
done
