#!/bin/sh
# Entry point of the image: starts a server by itself, as images for real Sparks do. Whoever runs the image for
# something else (a Ray node, a rank under a supervisor) gives an entrypoint of their own.
exec vllm serve "${VLLM_MODEL:-/model}" --host 0.0.0.0 --port "${VLLM_PORT:-8000}" "$@"
