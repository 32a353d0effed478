"""Tests of what runs inside the containers."""
