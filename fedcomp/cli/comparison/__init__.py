"""Comparisons: the alternatives of one command, the processes that run them, and their dashboard, folder and table of results."""
