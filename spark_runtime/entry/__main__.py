"""Entry point of the folder that is mounted into the container: ``python3 /opt/spark-vllm <command>``.

This file stands beside the package ``spark_runtime`` in that folder.
"""

import sys
from pathlib import Path

# Running a folder puts it on the path by itself; again here for interpreters whose isolation flags do not.
FOLDER = str(Path(__file__).resolve().parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

if __name__ == "__main__" and sys.argv[1:] == ["health"]:  # many times an hour: without the rest of the supervisor
    from spark_runtime.health import tell

    sys.exit(tell())

from spark_runtime.supervisor import main  # noqa: E402 (the path has to be set first)

if __name__ == "__main__":
    sys.exit(main())
