"""What an owner watches a deployment with: metrics by name, Prometheus' configuration and rules, Grafana's dashboard.

Pure: settings in, files out. Every query is written with the names in :mod:`spark_core.monitoring.metrics`.
"""

from spark_core.monitoring.files import MonitoringFiles, monitoring_files

__all__ = ["MonitoringFiles", "monitoring_files"]
