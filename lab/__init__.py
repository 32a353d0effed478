"""A lab of emulated DGX Spark hosts on one Linux machine.

Each host is a set of namespaces with systemd as PID 1, its own sshd, its own dockerd, its own disk and its
own network interfaces. Docker, Ray and vLLM on it are the real ones; only the accelerator is missing. The
product never imports this package: it reaches the hosts as it would reach real ones, over SSH.

Start with ``python -m lab up``.
"""
