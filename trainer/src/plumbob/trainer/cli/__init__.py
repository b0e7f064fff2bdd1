"""The command lines. Each parses its arguments first, and only then imports what does the work."""
