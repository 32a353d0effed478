"""Stands in for the engine's process: listens, starts the provider as the engine's plugin script does, and waits.

Prints the provider's port. On SIGUSR1 it closes the provider's standard input, and lives on.
"""

import signal
import socket
import subprocess
import sys
import threading

listener = socket.create_server(("127.0.0.1", 0))
address = f"127.0.0.1:{listener.getsockname()[1]}"
# A shell is between the two, and waits for the provider.
words = ["sh", "-c", '"$0" -u -m pulumi.dynamic "$1"; exit $?', sys.executable, address]
plugin = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert plugin.stdin is not None and plugin.stdout is not None
signal.signal(signal.SIGUSR1, lambda *_: plugin.stdin.close())  # type: ignore[union-attr]
print(plugin.stdout.readline().decode().strip(), flush=True)
threading.Thread(target=plugin.stdout.read, daemon=True).start()
while True:
    listener.accept()[0].close()
