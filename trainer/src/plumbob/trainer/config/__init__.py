"""Every setting of every command, with its help text and its checks. Imports nothing heavy."""
