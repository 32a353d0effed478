#!/bin/sh
# Prints the path of a program from Debian's packages, which are unpacked into the cache and not installed: nothing is
# started, and nothing of the machine changes.
#
#     unpack_debian.sh NAME PROGRAM PACKAGE...
#
# NAME is its folder in the cache, PROGRAM its path in the packages.
set -eu

name=$1
program=$2
shift 2

cache=${SPARK_VLLM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spark-vllm}/$name
if [ ! -x "$cache/$program" ]; then
    if ! command -v apt-get > /dev/null || ! command -v dpkg > /dev/null; then
        echo "$name: no apt-get to fetch $* with" >&2
        exit 1
    fi
    echo "$name: unpacking Debian's $* into $cache" >&2
    mkdir -p "$(dirname "$cache")"
    work=$(mktemp -d "$(dirname "$cache")/unfinished-$name.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    # apt's own sandbox user cannot write into a folder of ours; that is a notice, not a fault.
    if ! (cd "$work" && timeout 300 apt-get -q download "$@" > log 2>&1); then
        # Before the first update apt knows no packages.
        if ! (cd "$work" && timeout 300 apt-get -q update > log 2>&1 && timeout 300 apt-get -q download "$@" > log 2>&1); then
            echo "$name: apt-get download $* failed: $(tail -n 1 "$work/log")" >&2
            exit 1
        fi
    fi
    mkdir "$work/root"
    for package in "$work"/*.deb; do
        dpkg -x "$package" "$work/root"
    done
    chmod 755 "$work/root"
    rm -rf "$cache"
    mv "$work/root" "$cache"
fi
echo "$cache/$program"
