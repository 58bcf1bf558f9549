"""fxoffload: a memory compiler for PyTorch training."""
