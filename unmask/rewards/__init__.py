"""Graders: from a model's text to a verdict, strict and bounded. Nothing that they read is run in this process."""
