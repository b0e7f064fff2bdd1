#!/usr/bin/env bash
# Run the user's commands on several GPUs of one host: `vf-vllm` on the first, ranks of accelerate on the others.
#
#     PYTHON=python3 bash tools/gpu/many_gpus.sh CASE...       # a case is ROWS:CONFIG:WHAT, such as musique:zero3:lora
#
# ROWS         musique or gsm8k: synthetic rows, and a bundled policy grown to SHAPE, which can learn them;
#              gsm8k=FILE or musique=FILE: real rows, with random weights and random rewards
# CONFIG       zero3, zero2, fsdp2, ddp, or none (no configuration file)
# WHAT         lora (r16; the adapter is synced to the server), full (all weights, by NCCL), alone (lora without vLLM)
#
#     RANKS=3 RANK_GPUS=1,2,3 SHAPE=7b STEPS=5 SERVER_MEMORY=0.9     # on four GPUs; these are the defaults
#     RANKS=2 RANK_GPUS=1,0 SHAPE=7b STEPS=5 SERVER_MEMORY=0.3       # on two: the second rank shares the server's GPU
#     MODEL=FOLDER SERVER_FLAGS="..." FLAGS="..." PORT=8000          # another model; options of vf-vllm; options of train
#     SAVE=0            # do not save weights (30 GB for 7B); with real rows they are never saved
#
# A step has 16 prompts x 8 generations, or nearly so if the number of ranks does not divide them. Saved weights are
# deleted after each case. The models are made by tools/gpu/grow_model.py. Needs plumbob, its environments, vLLM and
# DeepSpeed importable by $PYTHON. A case takes three to four minutes.
set -uo pipefail
. "$(dirname "$0")/server.sh"
python=${PYTHON:-python3}
ranks=${RANKS:-3}
shape=${SHAPE:-7b}
out=${OUT_DIR:-/tmp/many_gpus}
port=${PORT:-8000}
mkdir -p "$out"
# NVLink multicast stays off, because it can make shared GPUs unusable for other jobs.
export NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
server="" served=""
stop_server() { [ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null; server="" served=""; }
trap stop_server EXIT

serve() { # arguments: model, sync. A running server is kept if both are those of the case before.
    [ "$served" = "$1 $2" ] && return
    stop_server
    local started=$SECONDS log=$out/vf-vllm-$2.log
    CUDA_VISIBLE_DEVICES=0 $python -m plumbob.trainer.inference.vllm.vf_vllm --model "$1" --port "$port" --dtype bfloat16 --max-model-len 4096 \
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
        # Drawn by lot: the model cannot solve real rows, and without a signal nothing would be trained.
        data="--datasets ${rows#*=} --trained-reward random" program="tools/gpu/many_gpus.py not-saved" name=real-$name policy=random
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
    echo "$((SECONDS - started)) s in total"
    [ -s "$out/$name/metrics.jsonl" ] && $python tools/gpu/many_gpus.py table "$out/$name"
    du -sm "$out/$name"/checkpoints/* "$out/$name/model" 2>/dev/null
    rm -rf "$out/$name/checkpoints" "$out/$name/model"
    return $status
}

failed=0
for case in "$@"; do
    run "$case" || { echo "$case failed"; failed=1; }
done
exit $failed
