"""The serving image of the lab: real vLLM and Ray for CPU, assembled without a Docker daemon."""
