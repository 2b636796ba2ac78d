"""The command line: one module per command parses its flags, one beside it does the work."""
