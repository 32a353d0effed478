"""What runs on a host itself, as a systemd unit; each file stands alone."""
