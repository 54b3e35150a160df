"""Measures sealnet against what the kernel itself needs, and against other tools, in one run on one machine."""
