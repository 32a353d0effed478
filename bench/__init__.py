"""Measurements: each compares with a floor or a peer in the same run, since machines are shared and noisy."""
