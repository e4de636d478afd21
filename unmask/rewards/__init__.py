"""Graders: pure functions from a model's text to a value, strict and bounded, that never run what they read."""
