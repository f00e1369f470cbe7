"""Several alternatives by one command: which they are, who runs them, what the screen shows, the table at the end."""
