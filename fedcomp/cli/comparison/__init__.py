"""Comparisons: the alternatives of one command, the processes that run them, their dashboard, folder and table."""
