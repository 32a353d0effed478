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

if ! "$(dirname "$0")/unpack_debian.sh" sshd usr/sbin/sshd openssh-server openssh-sftp-server libwrap0; then
    echo "sshd: none found; install OpenSSH's server or set SPARK_VLLM_TEST_SSHD" >&2
    exit 1
fi
