"""The client: its session, which trains and proposes updates, and its state. Nothing here depends on a transport."""
