"""Tests of the toolchain: what it builds, and how it sets a checkout up."""
