#!/usr/bin/env bash
# Preference optimisation with flags: scripts/dpo.sh --config dpo.yaml --learning_rate 1e-6
set -euo pipefail
source "$(dirname "$0")/common.bash"

usage() {
    cat <<'TEXT'
Usage: scripts/dpo.sh OPTION ...

Prefers the chosen completions to the rejected ones: unmask dpo OPTION ... Flags that are no options of it are settings:

  --model_name_or_path PATH    --model PATH
  --preference_data_path FILE  --data FILE
  --output_dir DIR             --output DIR
  --config_file FILE           --config FILE (one of another trainer: `unmask migrate FILE` first)
  --diffusion_steps N          training.samples=N
  --NAME VALUE                 training.NAME=VALUE, for example --learning_rate 1e-6
  OPTION                       whatever `unmask dpo` takes: --recipe NAME, --resume, training.beta=0.1, ...

Example:
  scripts/dpo.sh --model_name_or_path runs/sft/model --preference_data_path preferences.jsonl --output_dir runs/dpo --learning_rate 1e-6
TEXT
}

if [[ $# -eq 0 ]]; then
    usage >&2
    fail "give a model and preferences, or a configuration"
fi
arguments=()
while [[ $# -gt 0 ]]; do
    name=${1%%=*}
    case $name in
    -h | --help)
        usage
        exit 0
        ;;
    --resume | --overwrite | --dry-run | --print-config | --debug | --measure-variance | [!-]*)
        arguments+=("$1")
        shift
        continue
        ;;
    esac
    if [[ $1 == *=* ]]; then
        value=${1#*=}
    elif [[ $# -gt 1 && $2 != --* ]]; then
        value=$2
        shift
    else
        fail "$name needs a value"
    fi
    shift
    case $name in
    --model | --data | --task | --output | --config | --recipe | --mode) arguments+=("$name" "$value") ;;
    --model_name_or_path) arguments+=(--model "$value") ;;
    --preference_data_path) arguments+=(--data "$value") ;;
    --output_dir) arguments+=(--output "$value") ;;
    --config_file) arguments+=(--config "$value") ;;
    --diffusion_steps) arguments+=("training.samples=$value") ;;
    --gradient_checkpointing) arguments+=("training.activation_checkpointing=$value") ;;
    --*) arguments+=("training.${name#--}=$value") ;;
    *) fail "$name is no option" ;;
    esac
done
find_unmask
exec "${unmask[@]}" dpo "${arguments[@]}"
