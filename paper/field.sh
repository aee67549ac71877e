#!/usr/bin/env bash
# Trains a setting of `fedproto reproduce field` for limited time; the same call goes on from there.
#
#   FEDPROTO_DATA=DATA bash paper/field.sh SETTING MINUTES [options of fedproto reproduce]
#
# SETTING is one of paper/field.toml, such as field-cnn. Runs are kept in $RUNS (runs/field); what
# the tables need of them (records, no weights) is packed into $OUT (.) as SETTING.tar.xz. To show
# them: unpack it anywhere below FOLDER, then
#
#   fedproto reproduce field --scale paper --existing --runs FOLDER --out results/field
set -euo pipefail
setting=$1 minutes=$2
shift 2
cd "$(dirname "$0")/.."
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
runs=${RUNS:-runs/field}
study=("${PYTHON:-python3}" -m paper field --scale paper --only "$setting" --runs "$runs" --out "$runs/tables" "$@")
"${study[@]}" --minutes "$minutes"
"${study[@]}" --existing
tar -C "$runs" -cf - --exclude checkpoints --exclude clients --exclude tables . |
    xz -6 -T0 > "${OUT:-.}/$setting.tar.xz"
