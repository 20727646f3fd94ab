"""`python -m agentinfer`."""

from __future__ import annotations

import sys

from agentinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
