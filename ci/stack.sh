#!/bin/sh
# The jobs of a stack in plain shell, for any CI: ci/stack.sh JOB STACK
#   offline  plan without state, secrets or nodes; for code that is not trusted
#   preview  look at the nodes and say what would change; a summary in Markdown on standard output
#   up       make it so; goes back to the last settings that served if these fail
#   drift    say whether the nodes are as the stack says; status 2 if not
# Exit statuses: docs/automation.md. State and passphrase: docs/how-to/state-and-passphrase.md.
set -eu
if [ $# -ne 2 ]; then
    sed -n '2,6p' "$0" >&2
    exit 64
fi
job=$1 stack=$2
cd "$(dirname "$0")/.."
python3 toolchain/bootstrap.py >&2
. ./env
case $job in
    offline) exec python -m automation preview --stack "$stack" --offline --markdown --deadline 10m ;;
    preview) exec python -m automation preview --stack "$stack" --markdown --deadline 30m ;;
    up)
        exec python -m automation up --stack "$stack" --yes --json --rollback-on-failure --clear-stale-lock \
            --wait-lock 30m --deadline 4h
        ;;
    drift) exec python -m automation drift --stack "$stack" --json --deadline 30m ;;
    *)
        echo "ci/stack.sh: expected offline, preview, up or drift, found $job" >&2
        exit 64
        ;;
esac
