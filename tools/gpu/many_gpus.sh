#!/usr/bin/env bash
# The user's commands on several GPUs of one host: `vf-vllm` on the first, ranks on the others, by way of accelerate.
#
#     PYTHON=python3 bash tools/gpu/many_gpus.sh CASE...       # ROWS:CONFIG:WHAT, say musique:zero3:lora
#
# ROWS         musique or gsm8k: synthetic rows, which a policy grown to SHAPE can learn; gsm8k=FILE or musique=FILE: real ones,
#              for random weights, with rewards drawn at random
# CONFIG       zero3, zero2, fsdp2, ddp, or none (no configuration file)
# WHAT         lora (r16; the adapter is synced to the server), full (all weights, by NCCL), alone (lora without vLLM)
#
#     RANKS=3 RANK_GPUS=1,2,3 SHAPE=7b STEPS=5 SERVER_MEMORY=0.9     # on four GPUs; these are the defaults
#     RANKS=2 RANK_GPUS=1,0 SHAPE=7b STEPS=5 SERVER_MEMORY=0.3       # on two: the second rank beside the server
#     MODEL=FOLDER SERVER_FLAGS="..." FLAGS="..." PORT=8000          # a model; more for vf-vllm, more for train
#     SAVE=0            # weights are not written (30 GB for 7B), as they never are with real rows; else they are deleted again
#
# A step is 16 prompts x 8 generations, as nearly as the number of ranks divides it. The models are tools/gpu/grow_model.py's.
# Needs plumbob, its environments, vLLM and DeepSpeed importable by $PYTHON. Three to four minutes a case.
set -uo pipefail
. "$(dirname "$0")/server.sh"
python=${PYTHON:-python3}
ranks=${RANKS:-3}
shape=${SHAPE:-7b}
out=${OUT_DIR:-/tmp/many_gpus}
port=${PORT:-8000}
mkdir -p "$out"
# NVLink multicast stays off: it can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
server="" served=""
stop_server() { [ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null; server="" served=""; }
trap stop_server EXIT

serve() { # model, way: kept for the next case where both are the same
    [ "$served" = "$1 $2" ] && return
    stop_server
    local started=$SECONDS log=$out/vf-vllm-$2.log
    CUDA_VISIBLE_DEVICES=0 $python -m plumbob.trainer.vllm.serve --model "$1" --port "$port" --dtype bfloat16 --max-model-len 4096 \
        --gpu-memory-utilization "${SERVER_MEMORY:-0.9}" --sync "$2" ${SERVER_FLAGS:-} >"$log" 2>&1 &
    server=$! served="$1 $2"
    wait_for_server "$port" $server "$log" || { stop_server; return 1; }
    echo "vf-vllm --sync $2: up after $((SECONDS - started)) s"
}

run() {
    local rows config what each model
    IFS=: read -r rows config what <<<"$1"
    local env=${rows%%=*} data="--datasets synthetic" program="-m plumbob.trainer"
    local name=$env-$config-$what policy=tiny-$env
    [ "${SAVE:-1}" = 1 ] || program="tools/gpu/many_gpus.py not-saved"
    if [ "$rows" != "$env" ]; then
        data="--datasets ${rows#*=}" program="tools/gpu/many_gpus.py random-rewards" name=real-$name policy=random
    fi
    model=${MODEL:-$out/$policy-$shape}
    [ -f "$model/tokenizer.json" ] || $python tools/gpu/grow_model.py $policy "$shape" "$model" 2>"$out/grow.log" || return 1

    local engine="--engine vllm --vllm-url http://127.0.0.1:$port" trained="--peft --lora-r 16 --learning-rate ${LORA_RATE:-1e-4}"
    case $what in
    lora) serve "$model" lora || return 1 ;;
    full)
        serve "$model" nccl || return 1
        trained="--learning-rate ${FULL_RATE:-1e-6}"
        ;;
    alone) engine="" ;;
    esac
    local file="--config-file configs/$config.yaml"
    [ "$config" = none ] && file=""
    each=$((16 * 8 / 4 / ranks / 2 * 2))
    local flags="$env $data $engine $trained --model $model --bf16 --eval-examples 0 --num-generations 8 --gradient-accumulation-steps 4
        --batch-size $each --max-context 4096 --max-steps ${STEPS:-5} --output-dir $out --run-name $name"
    [ "$env" = musique ] && flags+=" --max-tokens 128 -a retriever=bm25"
    [ "$env" = gsm8k ] && flags+=" --max-tokens 256"
    [ "$rows" = musique ] && flags+=" -a hops=2"
    flags+=" ${FLAGS:-}"

    rm -rf "${out:?}/$name"
    local started=$SECONDS status=0
    echo "== $name: accelerate launch --num-processes $ranks $file $program" $flags
    CUDA_VISIBLE_DEVICES=${RANK_GPUS:-1,2,3} timeout "${LIMIT:-240}" $python -m accelerate.commands.accelerate_cli launch \
        --num-processes "$ranks" $file $program $flags >"$out/$name.log" 2>&1 || { status=1; echo "$name FAILED"; }
    grep -v -E 'it/s|Loading weights|^$' "$out/$name.log" | tail -n "${LINES_SHOWN:-25}"
    echo "$((SECONDS - started)) s in all"
    [ -s "$out/$name/metrics.jsonl" ] && $python tools/gpu/many_gpus.py table "$out/$name"
    du -sm "$out/$name"/checkpoints/* "$out/$name/model" 2>/dev/null
    rm -rf "$out/$name/checkpoints" "$out/$name/model"
    return $status
}

failed=0
for case in "$@"; do
    run "$case" || { echo "$case could not be run"; failed=1; }
done
exit $failed
