"""The unprivileged process that serves a run's lease: a relay, or an allowlist proxy."""
