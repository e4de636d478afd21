"""Run untrusted programs in isolation and with limits, and test them from another process."""
