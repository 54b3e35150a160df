"""The worker: one privileged process that runs many sealed commands, for callers that need not be root."""
