"""What runs inside the serving containers: one rank supervisor per node, and the API key check.

Standard library only and Python 3.10 syntax, so that the python of any serving image can run it. Nothing
outside this package is imported. ``protocol.py`` says what the ranks agree on; start reading there.
"""

__version__ = "1"
