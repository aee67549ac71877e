"""The command line: one module per group of commands."""

from fedproto.cli.app import main

__all__ = ["main"]
