"""The command line: each verb reads its options and hands over to the module that does the work, imported
only then."""

from unmask.cli.entry import app, main

__all__ = ["app", "main"]
