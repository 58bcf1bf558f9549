"""What every test runs under."""

from __future__ import annotations

import logging

import torch

# pytest gives its handlers to every logger that does not propagate; with one on this logger, torch writes out each graph it captures.
# After the import of torch, which sets its loggers up.
logging.getLogger(f"{torch.__name__}.__trace").propagate = True
