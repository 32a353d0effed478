#!/usr/bin/python3
"""Stand-in for ibdev2netdev on an emulated host: recorded rows of a DGX Spark, with this host's link state.

Which device belongs to which interface was recorded; Up or Down is read from the emulated interface, so
that a pulled cable shows. There is no RDMA device behind it.
"""

import sys
from pathlib import Path

rows = Path("/usr/share/spark-lab/recorded/ibdev2netdev.txt").read_text().splitlines()
for row in rows:
    device = row.split(" ==> ")[0]
    interface = row.split(" ==> ")[1].split()[0]
    try:
        up = Path(f"/sys/class/net/{interface}/carrier").read_text().strip() == "1"
    except OSError:
        up = False
    print(f"{device} ==> {interface} ({'Up' if up else 'Down'})")
sys.exit(0)
