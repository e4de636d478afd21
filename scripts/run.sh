#!/usr/bin/env bash
# Reinforcement learning on a task, in a mode: scripts/run.sh sudoku balanced
set -euo pipefail
source "$(dirname "$0")/common.bash"

usage() {
    cat <<'TEXT'
Usage: scripts/run.sh [TASK [MODE]] [OPTION ...]

Trains a model with reinforcement learning: unmask grpo --recipe grpo-TASK --mode MODE OPTION ...

  TASK    sudoku, countdown, gsm8k, math500, code-python or code-ocaml; left out: the variable DIFFU_DATASET
  MODE    speed, memory or balanced: what to spare on this machine; left out: balanced
  OPTION  whatever `unmask grpo` takes: --model PATH, --output DIR, --config FILE, training.max_steps=100, ...

The model: --model PATH, or the variable UNMASK_MODEL__PATH (or DIFFU_MODEL_PATH).
The output: --output DIR, or UNMASK_OUTPUT_DIR, or that of a --config; without a --config runs/grpo-TASK-MODE.

Examples:
  scripts/run.sh sudoku balanced --model runs/sft/model
  DIFFU_DATASET=sudoku DIFFU_MODEL_PATH=runs/sft/model scripts/run.sh
  UNMASK_MODEL__PATH=runs/sft/model scripts/run.sh gsm8k memory --data train.jsonl training.max_steps=100
TEXT
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
esac
task=${DIFFU_DATASET:-} mode=balanced
if [[ $# -gt 0 && $1 != -* && $1 != *=* ]]; then
    task=$1
    shift
    if [[ $# -gt 0 && $1 != -* && $1 != *=* ]]; then
        mode=$1
        shift
    fi
fi
if [[ -z $task ]]; then
    usage >&2
    fail "give a task, or set DIFFU_DATASET"
fi
if [[ ${DIFFU_DATASET:-$task} != "$task" && $DIFFU_DATASET == *[./]* ]]; then
    echo "the data are those of DIFFU_DATASET, $DIFFU_DATASET" >&2
else
    if [[ ${DIFFU_DATASET:-$task} != "$task" ]]; then
        echo "the task is $task; DIFFU_DATASET, $DIFFU_DATASET, is passed over" >&2
    fi
    unset DIFFU_DATASET # the recipe sets the task and its data
fi

if [[ " $*" != *" --config"* ]]; then
    if [[ -z "${UNMASK_MODEL__PATH:-}${DIFFU_MODEL_PATH:-}" && " $*" != *" --model"* && " $*" != *" model.path="* ]]; then
        fail "no model: give --model PATH, or set UNMASK_MODEL__PATH"
    fi
    export UNMASK_OUTPUT_DIR=${UNMASK_OUTPUT_DIR:-runs/grpo-$task-$mode}
fi
find_unmask
exec "${unmask[@]}" grpo --recipe "grpo-$task" --mode "$mode" "$@"
