#!/usr/bin/env bash
# Reinforcement learning on a task, in a mode: scripts/run.sh sudoku balanced
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/run.sh TASK MODE [OPTION ...]

Trains a model with reinforcement learning: unmask grpo --recipe grpo-TASK --mode MODE OPTION ...

  TASK    sudoku, countdown, gsm8k, math500, code-python or code-ocaml
  MODE    speed, memory or balanced: what to spare on this machine
  OPTION  whatever `unmask grpo` takes: --model PATH, --output DIR, --config FILE, training.max_steps=100, ...

The model: --model PATH, or the variable UNMASK_MODEL__PATH (or DIFFU_MODEL_PATH).
The output: --output DIR, or UNMASK_OUTPUT_DIR, or that of a --config; without a --config runs/grpo-TASK-MODE.

Examples:
  scripts/run.sh sudoku balanced --model runs/sft/model
  UNMASK_MODEL__PATH=runs/sft/model scripts/run.sh gsm8k memory --data train.jsonl training.max_steps=100
TEXT
}

fail() {
    echo "error: $1" >&2
    exit 2
}

case "${1:-}" in
-h | --help)
    usage
    exit 0
    ;;
esac
if [ $# -lt 2 ] || [[ $1 == -* || $2 == -* ]]; then
    usage >&2
    fail "give a task and a mode"
fi
task=$1 mode=$2
shift 2

if [[ " $*" != *" --config"* ]]; then
    if [[ -z "${UNMASK_MODEL__PATH:-}${DIFFU_MODEL_PATH:-}" && " $*" != *" --model"* && " $*" != *" model.path="* ]]; then
        fail "no model: give --model PATH, or set UNMASK_MODEL__PATH"
    fi
    export UNMASK_OUTPUT_DIR=${UNMASK_OUTPUT_DIR:-runs/grpo-$task-$mode}
fi

PATH=$PATH:$(dirname "$0")/../.venv/bin # what `make` installs
if command -v unmask >/dev/null; then
    unmask=(unmask)
elif python=$(command -v python3 || command -v python) && "$python" -c "import unmask.cli" 2>/dev/null; then
    unmask=("$python" -m unmask)
else
    fail "unmask is not installed: pip install 'unmask[train,rewards]', or activate its environment"
fi
exec "${unmask[@]}" grpo --recipe "grpo-$task" --mode "$mode" "$@"
