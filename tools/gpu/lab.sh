#!/usr/bin/env bash
# The runs of docs/results/lab, and the second seeds of docs/results/why-musique-did-not-learn.md, several at a time.
#
#     export PYTHON=python3 GPUS=0,1
#     bash tools/gpu/lab.sh cpu OUT                    # H01 to H08, bundled models, JOBS at a time (16); uses no GPU
#     bash tools/gpu/lab.sh sft MODEL DATA OUT         # the model from which H11 to H16 begin
#     bash tools/gpu/lab.sh gpu OUT                    # H11, H12, H13 and H16, JOBS at a time (5 for each GPU)
#     bash tools/gpu/lab.sh defects MODEL DATA OUT     # the arms that have one seed, with SEED (1), four for each GPU
#     bash tools/gpu/lab.sh pack OUT ARCHIVE.tar.gz    # the records of all that, without weights, traces and logs
#
# MODEL is the folder of the pretrained 0.5B, DATA one with musique/ and hotpotqa/ (defects: and gsm8k/), as ../shared/data is.
# SEEDS (3) is the number of seeds of a lab, SFT_STEPS (20) how long the model is taught. After LIMIT seconds (530) a part is
# interrupted: its runs save a checkpoint, and the same command goes on with them. Archives of several machines are unpacked one
# over the other in docs/results/lab; then `lab verdict -C docs/results/lab` writes the verdicts from all of them. Folders beside
# experimental-results/, defects/ and 0.5b-sft/, are no part of the lab. Needs plumbob, its environments and plumbob.testing
# importable by $PYTHON from any folder.
set -euo pipefail
part=${1:?cpu, sft, gpu, defects or pack}
python=$(command -v "${PYTHON:-python3}")
if [[ $python != /* ]]; then python=$PWD/$python; fi
repository=$(realpath "$(dirname "$0")/../..")
IFS=, read -ra gpus <<<"${GPUS:-0}"
limit=(timeout --signal INT --kill-after 60 "${LIMIT:-530}")
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

enter() {  # FOLDER: where commands run, with the lab, what its arms name, and the commands that it starts
    mkdir -p "$1/bin" "$1/docs/results" "$1/models"
    cd "$1"
    ln -sfn "$repository/tools" tools
    if [[ ! -d docs/results/lab ]]; then cp -r "$repository/docs/results/lab" docs/results/lab; fi
    for name in train sft; do
        printf '#!/bin/sh\nexec "%s" -c "from plumbob.trainer.cli.%s import main; main()" "$@"\n' "$python" "$name" >"bin/$name"
        chmod +x "bin/$name"
    done
    export PATH="$PWD/bin:$PATH"
}
lab() { "${limit[@]}" "$python" -c "from plumbob.lab.cli.main import main; main()" "$@" --seeds "${SEEDS:-3}" -C docs/results/lab; }

case $part in
cpu)
    enter "${2:?a folder for runs}/cpu"
    CUDA_VISIBLE_DEVICES='' lab run H01 H02 H03 H04 H05 H06 H07 H08 --jobs "${JOBS:-16}"
    ;;
sft)
    model=$(realpath "${2:?a model folder}") data=$(realpath "${3:?a folder of real questions}")
    enter "${4:?a folder for runs}/gpu"
    ln -sfn "$data" data
    if [[ -f models/0.5b-sft/summary.json ]]; then exit; fi
    rm -rf models/0.5b-sft
    CUDA_VISIBLE_DEVICES=${gpus[0]} "${limit[@]}" sft musique --model "$model" --engine "${ENGINE:-paged}" --engine-memory 0.2 --bf16 --peft \
        --datasets "data/musique/musique_ans_train_545.jsonl,,[:350]" --eval-datasets "data/musique/musique_ans_train_545.jsonl,,[350:400]" \
        --demonstrations oracle --max-steps "${SFT_STEPS:-20}" --eval-examples 50 --max-tokens 256 --max-turns 8 --max-context 4096 \
        --microbatch-tokens 8192 --max-concurrent 256 --output-dir models --run-name 0.5b-sft
    ;;
gpu)
    enter "${2:?a folder for runs}/gpu"
    lab run H11 H12 H13 H16 --jobs "${JOBS:-$((5 * ${#gpus[@]}))}" --gpus "${GPUS:-0}"
    ;;
defects)
    model=$(realpath "${2:?a model folder}") data=$(realpath "${3:?a folder of data}")
    mkdir -p "${4:?a folder for runs}/defects"
    cd "$4/defects"
    export SEED=${SEED:-1} DOCTOR=0 PYTHON=$python
    one() {  # PART ARM OPTIONS LABEL, unless it is finished
        name="$1-$(tr A-Z a-z <<<"$2" | tr -c 'a-z0-9\n' -)${4:+-$4}-seed$SEED"
        if [[ -f $name/summary.json ]]; then return; fi
        rm -rf "$name"
        began=sft-12
        if [[ $1 == gsm8k ]]; then began=$MODEL; fi
        # shellcheck disable=SC2206
        ids=(${GPUS//,/ })
        CUDA_VISIBLE_DEVICES=${ids[$((SLOT % ${#ids[@]}))]} OPTIONS=$3 LABEL=$4 bash "$TOOLS/defects.sh" "$1" "$began" . "$2" "$DATA/gsm8k" \
            >"$name.log" 2>&1 && echo "$name" || echo "$name failed: $(tail -n 1 "$name.log")"
    }
    export -f one
    export MODEL=$model DATA=$data GPUS=${GPUS:-0} TOOLS=$repository/tools/gpu OMP_NUM_THREADS=1
    if [[ ! -f sft-12/summary.json ]]; then
        rm -rf sft-12
        CUDA_VISIBLE_DEVICES=${gpus[0]} SFT_STEPS=12 bash "$TOOLS/defects.sh" sft "$model" . >sft-12.log 2>&1
    fi
    mask="loss mask given as the attention mask"
    # GSM8K, 40 steps of 64 x 8, takes longest and comes first.
    printf '%s\0' \
        gsm8k "$mask" "" "" gsm8k "rewards drawn by lot" "" "" \
        musique "assistant header missing from the trained row" "" "" musique "tool descriptions missing from the trained row" "" "" \
        musique "all three of these" "" "" musique "LoRA at 1e-6, gradients clipped to 0.01" "" "" \
        musique "nothing changed" "--importance-correction none" uncorrected musique "$mask" "--importance-correction none" uncorrected |
        "${limit[@]}" xargs -0 -n 4 -P "${JOBS:-$((4 * ${#gpus[@]}))}" --process-slot-var=SLOT bash -c '
            if [[ $1 == gsm8k ]]; then export STEPS=${STEPS:-40} BATCH=64 EVAL=${EVAL:-1319}; else export STEPS=${STEPS:-30}; fi
            one "$@"' -
    ;;
pack)
    out=$(realpath "${2:?a folder of runs}") archive=$(realpath -m "${3:?a name for the archive}")
    cd "$out"
    # shellcheck disable=SC2046
    tar -czf "$archive" --exclude='*.log' --exclude={model,checkpoints,traces,records,logs,.lock,report.html,demonstrations.jsonl.gz} \
        --transform 's,^[cg]pu/docs/results/lab/,,' \
        --transform 's,^gpu/models/,,' $(ls -d [cg]pu/docs/results/lab/experimental-results/h* gpu/models/0.5b-sft defects 2>/dev/null)
    ls -l "$archive"
    ;;
*) echo "the first argument is cpu, sft, gpu, defects or pack, not $part" >&2; exit 2 ;;
esac
