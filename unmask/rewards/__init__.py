"""Verdicts on text that a model wrote, and what calling a reward function needs: time limits, worker
processes, HTTP, logs. Text of a model is never executed in this process."""
