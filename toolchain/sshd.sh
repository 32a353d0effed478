#!/bin/sh
# Prints the path of an sshd for the tests. Where none is installed, Debian's is unpacked into the cache rather than
# installed: installing it would start a server on this machine.
set -eu

for found in "${SPARK_VLLM_TEST_SSHD:-}" "$(command -v sshd || true)" /usr/sbin/sshd /usr/local/sbin/sshd; do
    if [ -n "$found" ] && [ -x "$found" ]; then
        echo "$found"
        exit 0
    fi
done

cache=${SPARK_VLLM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spark-vllm}/sshd
if [ ! -x "$cache/usr/sbin/sshd" ]; then
    if ! command -v apt-get > /dev/null || ! command -v dpkg > /dev/null; then
        echo "sshd: none found, and no apt-get to fetch one; install OpenSSH's server or set SPARK_VLLM_TEST_SSHD" >&2
        exit 1
    fi
    echo "sshd: none found; unpacking Debian's openssh-server into $cache" >&2
    mkdir -p "$(dirname "$cache")"
    work=$(mktemp -d "$(dirname "$cache")/unfinished-sshd.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    # apt's own sandbox user cannot write into a folder of ours; that is a notice, not a fault.
    packages="openssh-server openssh-sftp-server libwrap0"
    # shellcheck disable=SC2086
    if ! (cd "$work" && timeout 300 apt-get -q download $packages > log 2>&1); then
        # Before the first update apt knows no packages.
        if ! (cd "$work" && timeout 300 apt-get -q update > log 2>&1 && timeout 300 apt-get -q download $packages > log 2>&1); then
            echo "sshd: apt-get download $packages failed: $(tail -n 1 "$work/log")" >&2
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
echo "$cache/usr/sbin/sshd"
