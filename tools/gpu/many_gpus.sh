#!/usr/bin/env bash
# The user's commands on several GPUs of one host: ZeRO-3 LoRA r16, replication, FSDP2 and ZeRO with all parameters.
#
#     PYTHON=python3 bash tools/gpu/many_gpus.sh [CASE...]     # default: zero3-lora ddp-lora fsdp2-full zero3-full zero2-full
#     GPUS=2 LORA_SHAPE=7b FULL_SHAPE=1.5b STEPS=3             # and their defaults
#
# Needs plumbob, vf-musique and DeepSpeed importable by $PYTHON, main memory for GPUS float32 copies of the model while it
# is loaded, and three minutes a case. Prints each rank's peak memory, and by step the seconds of rollouts, training and
# sync, and the acknowledged parity. `fsdp2-full` also saves, resumes and writes the final model.
set -euo pipefail
python=${PYTHON:-python3}
gpus=${GPUS:-2}
steps=${STEPS:-3}
lora=${LORA_SHAPE:-7b}
full=${FULL_SHAPE:-1.5b}
out=${OUT_DIR:-/tmp/many_gpus}
cases=${*:-zero3-lora ddp-lora fsdp2-full zero3-full zero2-full}
mkdir -p "$out"
# NVLink multicast stays off: it can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# 16 prompts x 8 generations a step, whatever the number of GPUs.
batch=$((16 * 8 / 4 / gpus))
common="musique --datasets synthetic --retriever bm25 --bf16 --eval-examples 0 --num-generations 8 --batch-size $batch
    --gradient-accumulation-steps 4 --max-turns 3 --max-tokens 96 --max-context 6144 --output-dir $out"

train() { # configuration, name, flags...
    local config=$1 name=$2
    shift 2
    echo "== $name ($config)"
    timeout "${LIMIT:-240}" $python -m accelerate.commands.accelerate_cli launch --num-processes "$gpus" --config-file "configs/$config.yaml" \
        tools/gpu/many_gpus.py train $common --run-name "$name" "$@" 2>&1 |
        grep -v -E 'it/s|Loading weights|^$' | tail -n "${LINES_SHOWN:-40}" || echo "$name FAILED"
}

for case in $cases; do
    config=${case%-*}
    shape=$lora peft="--peft --lora-r 16 --learning-rate 1e-5"
    if [ "${case#*-}" = full ]; then shape=$full peft="--learning-rate 1e-6"; fi
    model=$out/model-$shape
    [ -d "$model" ] || $python tools/gpu/many_gpus.py model "$shape" "$model" >/dev/null 2>&1
    rm -rf "${out:?}/$case"
    if [ "$case" = fsdp2-full ]; then
        train "$config" "$case" --model "$model" $peft --max-steps "$steps" --save-steps "$steps"
        common="" train "$config" "$case" --resume "$out/$case" --max-steps "$((steps + 1))"
        du -sh "$out/$case/model" "$out/$case/checkpoints"/* || true
    else
        SAVE=0 train "$config" "$case" --model "$model" $peft --max-steps "$steps"
    fi
done
