"""`python -m fxoffload` is the command `fxoffload`."""

import sys

from fxoffload.cli import main

sys.exit(main())
