"""Heads that draft: the interface, and one file per kind."""
