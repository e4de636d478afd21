#!/usr/bin/env bash
# Conversion in three stages: scripts/convert.sh --model microsoft/phi-2 --data wikitext:wikitext-103-raw-v1 --output runs/convert
set -euo pipefail
source "$(dirname "$0")/common.bash"

usage() {
    cat <<'TEXT'
Usage: scripts/convert.sh OPTION ...

Turns a causal model into a diffusion model: unmask convert OPTION ... Without a configuration: --recipe full.

  --model_config FILE, --training_config FILE, --hardware_config FILE
                     configurations, as --config FILE (those of another trainer: `unmask migrate` first)
  --dry_run          two steps of every stage, and the plan, as --dry-run
  --checkpoint PATH  go on from this checkpoint, as --resume PATH
  OPTION             whatever `unmask convert` takes: --model PATH, --data FILE, --output DIR, --debug, training.max_steps=100, ...

Examples:
  scripts/convert.sh --model microsoft/phi-2 --data corpus.txt --output runs/convert --dry_run
  scripts/convert.sh --config convert.yaml --checkpoint runs/convert/stage-2/checkpoint-1000
TEXT
}

if [[ $# -eq 0 ]]; then
    usage >&2
    fail "give a model and data, or a configuration"
fi
arguments=() configured=
while [[ $# -gt 0 ]]; do
    name=${1%%=*} value=()
    case $name in
    -h | --help)
        usage
        exit 0
        ;;
    --model_config | --training_config | --hardware_config | --config | --recipe | --checkpoint)
        if [[ $1 == *=* ]]; then
            value=("${1#*=}")
        elif [[ $# -gt 1 ]]; then
            value=("$2")
            shift
        else
            fail "$name needs a value"
        fi
        ;;
    esac
    case $name in
    --dry_run) arguments+=(--dry-run) ;;
    --checkpoint) arguments+=(--resume "${value[0]}") ;;
    --recipe | --config) arguments+=("$name" "${value[0]}") configured=yes ;;
    --*_config) arguments+=(--config "${value[0]}") configured=yes ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
find_unmask
[[ -n $configured ]] || arguments=(--recipe full "${arguments[@]}")
exec "${unmask[@]}" convert "${arguments[@]}"
