"""Run untrusted programs: isolated, with limits, and tested from outside their process."""
