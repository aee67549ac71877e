#!/usr/bin/env bash
# Trains a setting of `fedproto reproduce field` for limited time; the same call goes on from there.
#
#   FEDPROTO_DATA=DATA bash paper/field.sh SETTING SECONDS [options of fedproto reproduce]
#
# SETTING is one of paper/field.toml, such as field-cnn. Runs are kept in $RUNS (runs/field); what
# the tables need of them (records, no weights) is packed into $OUT (.) as SETTING.tar.xz. To show
# them: unpack it anywhere below FOLDER, then
#
#   fedproto reproduce field --scale paper --existing --runs FOLDER --out results/field
set -euo pipefail
setting=$1 seconds=$2
shift 2
cd "$(dirname "$0")/.."
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
runs=${RUNS:-runs/field}
timeout -s INT -k 60 "$seconds" "${PYTHON:-python3}" -m fedproto reproduce field \
    --scale paper --only "$setting" --runs "$runs" --out "$runs/tables" "$@" ||
    echo "stopped (exit code $?); the same call goes on"
"${PYTHON:-python3}" -m fedproto reproduce field \
    --scale paper --only "$setting" --runs "$runs" --out "$runs/tables" --existing "$@"
tar -C "$runs" -cf - --exclude checkpoints --exclude clients --exclude tables . |
    xz -6 -T0 > "${OUT:-.}/$setting.tar.xz"
