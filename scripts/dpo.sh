#!/usr/bin/env bash
# Preference optimisation with flags: scripts/dpo.sh --config dpo.yaml --learning_rate 1e-6
set -euo pipefail
source "$(dirname "$0")/common.bash"

usage() {
    cat <<'TEXT'
Usage: scripts/dpo.sh OPTION ...

Prefers the chosen completions to the rejected ones: unmask dpo OPTION ... These options have other names there:

  --model_name_or_path PATH    --model PATH
  --preference_data_path FILE  --data FILE
  --output_dir DIR             --output DIR
  --config_file FILE           --config FILE (one of another trainer: `unmask migrate FILE` first)
  --diffusion_steps N          --samples N
  --gradient_checkpointing     --activation_checkpointing

Example:
  scripts/dpo.sh --model_name_or_path runs/sft/model --preference_data_path preferences.jsonl --output_dir runs/dpo --learning_rate 1e-6
TEXT
}

if [[ $# -eq 0 ]]; then
    usage >&2
    fail "give a model and preferences, or a configuration"
fi
arguments=()
for word in "$@"; do
    name=${word%%=*}
    case $name in
    -h | --help)
        usage
        exit 0
        ;;
    --model_name_or_path) ours=--model ;;
    --preference_data_path) ours=--data ;;
    --output_dir) ours=--output ;;
    --config_file) ours=--config ;;
    --diffusion_steps) ours=--samples ;;
    --gradient_checkpointing) ours=--activation_checkpointing ;;
    *) ours=$name ;;
    esac
    arguments+=("$ours${word#"$name"}")
done
find_unmask
exec "${unmask[@]}" dpo "${arguments[@]}"
